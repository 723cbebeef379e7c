"""Each numbered check refuses what it is for; the gates fail on a shifted layer and on a shifted slot."""

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.errors import InputRefused
from deepspec.export import checks, gates
from deepspec.export.exporter import export_drafter
from deepspec.export.load import read_config
from deepspec.export.verify import refuse_failures, verify_folder


@pytest.fixture
def exported(make_request: Callable[..., Any]) -> tuple[Path, Any]:
    request = make_request()
    return export_drafter(request), request


@pytest.mark.parametrize("change, said", [
    ({"target_layer_ids": [1, 4, 2]}, "strictly increasing"), ({"target_layer_ids": [1, 2, 5]}, "last layer 5"),
    ({"target_layer_ids": [-1, 2, 4]}, "at least 0"), ({"mask_token_id": None}, "mask_token_id=null"),
    ({"markov_rank": 0}, "floating point"), ({"block_size": 5}, "block_size is 5 but 4"),
    ({"dflash_config": {}}, "dflash_config lacks mask_token_id"),
    ({"dflash_config": {"block_size": 4, "target_layer_ids": [1, 2, 4], "mask_token_id": 300,
                        "sample_from_anchor": True}}, "sample_from_anchor stands in"),
])
def test_check_1_keys(exported: tuple[Path, Any], change: dict[str, Any], said: str) -> None:
    values = read_config(exported[0])
    assert checks.check_keys(values) == []
    assert said in "; ".join(checks.check_keys(values | change))
    for key in ("num_anchors", "sample_from_anchor", "rope_parameters", "layer_types", "torch_dtype"):
        less = {name: value for name, value in values.items() if name != key}
        assert f"config.json lacks {key}" in checks.check_keys(less)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> list[str]:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")
    return checks.check_tensors(folder, read_config(folder))


def test_check_2_tensors(exported: tuple[Path, Any]) -> None:
    folder = exported[0]
    assert rewrite(folder, lambda stored: None) == []
    assert any("not expected (wrapper prefix)" in line for line in rewrite(
        folder, lambda stored: stored.update({"module.norm.weight": stored["norm.weight"].clone()})))
    assert rewrite(folder, lambda stored: stored.pop("module.norm.weight")) == []
    assert any("[64" not in line and "shape (1, 65)" in line for line in rewrite(
        folder, lambda stored: stored.update({"confidence_head.proj.weight": torch.zeros(1, 65)})))
    assert any("float16" in line for line in rewrite(
        folder, lambda stored: stored.update({"norm.weight": stored["norm.weight"].half()})))
    assert any("not finite" in line for line in rewrite(
        folder, lambda stored: stored["fc.weight"].fill_(float("inf"))))


def test_check_3_shared(exported: tuple[Path, Any]) -> None:
    folder, request = exported
    problems, digests = checks.check_shared(folder, request.drafter.shared, torch.float32)
    assert problems == [] and len(digests["lm_head.weight"]) == 64
    rewrite(folder, lambda stored: stored["lm_head.weight"][3].mul_(1.001))
    problems, _ = checks.check_shared(folder, request.drafter.shared, torch.float32)
    assert problems == ["lm_head.weight differs from the target's"]


@pytest.mark.parametrize("mask, said", [(300, ""), (251, "eos"), (5, "ordinary token 'w5'"), (320, "not below"),
                                        (252, "")])
def test_check_4_mask(exported: tuple[Path, Any], mask: int, said: str) -> None:
    folder, request = exported
    problems, norm = checks.check_mask_token(
        read_config(folder) | {"mask_token_id": mask}, request.target.tokenizer, request.drafter.shared.embed)
    assert (not problems and norm > 0) if not said else said in problems[0]


def test_check_5_rope_survives(exported: tuple[Path, Any]) -> None:
    folder = exported[0]
    values = read_config(folder)
    assert checks.check_auto_config(folder, values) == []
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    changed = values | {"rope_parameters": scaled, "rope_scaling": scaled, "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(changed))
    assert checks.check_auto_config(folder, changed) == []
    assert "contradicts" in checks.check_auto_config(folder, changed | {"rope_theta": 10000.0})[-1]


def test_checks_11_and_12(exported: tuple[Path, Any]) -> None:
    folder = exported[0]
    values = read_config(folder)
    assert checks.check_speculative_tokens(folder, values, 4) == []
    shorter = values | {"sample_from_anchor": False}
    assert "makes 3 draft tokens" in checks.check_speculative_tokens(folder, shorter, 4)[0]
    told = folder / "serving" / "vllm_speculative_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"num_speculative_tokens": 5}))
    assert "num_speculative_tokens=5" in checks.check_speculative_tokens(folder, values, 4)[0]
    assert checks.check_architecture(folder, values) == []
    assert "auto_map" in checks.check_architecture(folder, values | {"auto_map": {}})[0]
    assert "expected one of" in checks.check_architecture(folder, values | {"architectures": ["DSparkDraftModel"]})[0]


def test_gate_9_shifted_ids_fail(target: Any) -> None:
    assert gates.layer_id_gate(target, [1, 2, 4]) == []
    for shifted in ([2, 3, 4], [0, 1, 3], [1, 2, 3]):
        assert "differ from the target's hidden_states[i+1]" in gates.layer_id_gate(target, shifted)[0]
    assert "exported layer ids, but" in gates.layer_id_gate(target, [1, 2])[0]


def test_gate_10_untrained_is_indistinct(make_request: Callable[..., Any], target: Any) -> None:
    documents = [torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    result = gates.shift_gate(make_request().drafter, target, documents)
    assert result.verdict in ("indistinct", "clear") and result.blocks > 20 and set(result.layers) == {-1, 0, 1}


def test_gate_10_wrong_slots_are_seen(make_request: Callable[..., Any], target: Any,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft logits that are the target's own for a chosen slot stand for a trained drafter."""
    drafter = make_request().drafter
    documents = [torch.randint(0, 250, (70,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def oracle(offset: int) -> Callable[..., torch.Tensor]:
        def logits(model: Any, features: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
            states = gates.hidden_states(target, ids)
            right = torch.cat([states[i + 1] for i in (1, 2, 4)], dim=-1)
            noise = (features - right).abs().mean() * 5  # other features than the trained ones: a worse draft
            rows = anchors[:, None] + torch.arange(4) + offset
            clean = target.logits(states[-1])[rows]
            return torch.where(torch.isfinite(clean), clean + noise * torch.sin(torch.arange(320.0) * 3), clean)
        return logits

    monkeypatch.setattr(gates, "block_logits", oracle(0))
    result = gates.shift_gate(drafter, target, documents)
    assert result.verdict == "clear" and result.slots[0] > 0.99 > result.layers[1]
    monkeypatch.setattr(gates, "block_logits", oracle(1))
    assert gates.shift_gate(drafter, target, documents).slots[1] > 0.99


def test_failures_are_one_message(exported: tuple[Path, Any]) -> None:
    folder, request = exported
    rewrite(folder, lambda stored: stored["norm.weight"].fill_(float("nan")))
    results, _ = verify_folder(folder, request.target, request.drafter)
    with pytest.raises(InputRefused, match=r"check 2 .*norm.weight has 64 values"):
        refuse_failures(results, folder)
