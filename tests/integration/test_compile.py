"""trainer.compile: the numbers and names are those without it, for packs of any size, checkpointed and under ZeRO-2."""

import dataclasses
import logging
import sys
from pathlib import Path

import pytest
import torch

UNIT = Path(__file__).resolve().parents[1] / "unit"
sys.path[:0] = [str(UNIT / "drafters"), str(UNIT / "training")]

from drafter_cases import DOCUMENTS, SHAPE, loss_and_grads, pack, shared_weights  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from deepspec.drafters import compiling  # noqa: E402
from deepspec.drafters.registry import build_drafter  # noqa: E402

pytestmark = pytest.mark.slow
OF = dataclasses.replace(SHAPE, sliding_window=9)


def made(**options: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_drafter(OF, shared_weights(OF), **options)


def needs_compiler() -> None:
    if compiling.missing_compiler(torch.device("cpu")):
        pytest.skip("no C++ compiler")


def test_compiled_layers_give_the_same_gradients_under_the_same_names() -> None:
    needs_compiler()
    plain, compiled = made(), made(compile=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    compiled.load_state_dict(plain.state_dict())
    counters.clear()
    packs = (DOCUMENTS, ((40, (3, 7, 30)),), ((9, (1,)), (12, (0, 2, 5, 8))))
    for documents in packs:
        batch = pack(OF, documents)
        for ours, reference in zip(
            loss_and_grads(compiled, batch, batch)[1], loss_and_grads(plain, batch, batch)[1], strict=True,
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    compiled.activation_checkpointing = True
    batch = pack(OF, packs[1])
    for ours, reference in zip(
        loss_and_grads(compiled, batch, batch)[1], loss_and_grads(plain, batch, batch)[1], strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_the_mask_of_flex_attention_can_be_compiled() -> None:
    """Forward on the CPU, which shares tracing, mask function and block layout with the kernel for CUDA."""
    needs_compiler()
    from torch.nn.attention import flex_attention as flex

    from deepspec.drafters.attention import inject_context, plan_context

    compiled = torch.compile(flex.flex_attention, dynamic=False)  # symbolic sizes break the C++ kernel of torch 2.13
    for size, window in ((200, 30), (330, None)):
        anchors = torch.arange(0, size, 5)
        plans = [plan_context(anchors, anchors // 100 * 100, size, slots=4, heads=4, window=window, backend=backend)
                 for backend in ("chunked", "flex")]
        generator = torch.Generator().manual_seed(size)
        query = torch.randn(len(anchors), 4, 4, 16, generator=generator)
        keys, values = torch.randn(2, size + 4 * len(anchors), 2, 16, generator=generator)
        query_1, keys_1, values_1 = (part.transpose(0, 1)[None] for part in (query.flatten(0, 1), keys, values))
        with torch.no_grad():
            found = compiled(query_1, keys_1, values_1, block_mask=plans[1].mask, enable_gqa=True)
            expected = inject_context(query, keys, values, plans[0])
        torch.testing.assert_close(found[0].transpose(0, 1).view_as(expected), expected, rtol=1e-4, atol=1e-5)


def test_training_under_zero_2(tmp_path: Path) -> None:
    needs_compiler()
    from tiny_training import SHAPE as TINY, TinySource, shared_weights as tiny_weights, tiny_config

    from deepspec.training import checkpoint
    from deepspec.training.identity import run_identity
    from deepspec.training.packs import Packer
    from deepspec.training.trainer import DrafterTrainer

    losses = {}
    for flag in (False, True):
        config = tiny_config(tmp_path / str(flag), max_steps=3, save_every=3)
        config.engine.zero_stage = 2
        torch.manual_seed(0)
        drafter = build_drafter(TINY, tiny_weights(), compile=flag)
        packer = Packer(TinySource(), TINY, config.trainer, config.objective, seed=5, num_workers=0)
        identity = run_identity(config, TINY, target="target", data="data")
        losses[flag] = DrafterTrainer(drafter, packer, config, identity=identity).run().row["loss"]
        loaded = checkpoint.load_drafter(checkpoint.find_latest(tmp_path / str(flag)), tiny_weights())
        assert not [name for name in loaded.state_dict() if "orig_mod" in name]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_without_a_compiler_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        model = made(compile=True)
    assert len(caplog.records) == 1 and "C++ compiler" in caplog.text
    assert model(pack(OF, DOCUMENTS)).hidden.isfinite().all()
