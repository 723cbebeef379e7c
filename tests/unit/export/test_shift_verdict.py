"""What the shift gate makes of acceptance under shifted conventions."""

from types import SimpleNamespace

import pytest
import torch

from deepspec.export import gates


@pytest.mark.parametrize("lead, verdict", [(0.005, "indistinct"), (0.1, "wrong"), (-0.1, "clear")])
def test_only_a_material_defeat_is_wrong(lead: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers shifted by one are ahead of the exported ones by ``lead``, far beyond noise; slots are learned."""
    noise = torch.linspace(-1e-4, 1e-4, 64)
    means = {("slots", -1): 0.1, ("slots", 0): 0.6, ("slots", 1): 0.1, ("layers", -1): 0.6 + lead, ("layers", 0): 0.6,
             ("layers", 1): 0.3}
    rates = {key: mean + noise * key[1] for key, mean in means.items()}
    monkeypatch.setattr(gates, "_rates", lambda *_: rates)
    drafter = SimpleNamespace(shape=SimpleNamespace(draft_length=4))
    result = gates.shift_gate(drafter, None, [torch.arange(64)])
    assert result.verdict == verdict
    assert ("layers -1" in result.note) == (verdict != "clear")
