"""The micro target, made small enough to train in seconds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.artifacts import read_manifest
from deepspec.config.schema import TargetConfig
from deepspec.errors import InputRefused
from deepspec.targets import load, micro, micro_corpus, micro_tokenizer
from deepspec.targets.micro import MicroConfig, ensure_micro

TINY = MicroConfig(layers=2, hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16, steps=12,
                   chats=150, tokenizer_size=400, embedding_rows=448, max_length=96, batch_tokens=512)


@pytest.fixture(scope="module", autouse=True)
def small_corpus() -> object:
    """Reading the whole library takes seconds; one package of it is enough here."""
    with pytest.MonkeyPatch.context() as patch:
        skipped = micro_corpus._SKIPPED
        root = Path(micro_corpus.sysconfig.get_paths()["stdlib"])
        others = {path.name for path in root.iterdir() if path.name not in {"json", "email", "http"}}
        patch.setattr(micro_corpus, "_SKIPPED", skipped | others)
        patch.setattr(micro_corpus, "_MIN_CONVERSATIONS", 100)
        patch.setattr(micro.os, "sched_getaffinity", lambda _: {0})  # leave the other cores to the other tests
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_micro(tmp_path_factory.mktemp("targets"), TINY)


def test_it_loads_as_a_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ensure_micro", lambda cache_dir: folder)
    config = TargetConfig(name="micro", source="micro", path="", dtype="float32", feature_layers=[0],
                          mask_token_id=micro_tokenizer.MASK_ID)
    target = load.load_target(config, device="cpu", cache_dir=folder.parent)
    assert (target.spec.num_layers, target.spec.vocab_size, target.spec.model_type) == (2, 448, "qwen3")
    assert target.tokenizer_size == 400 and target.spec.eos_token_ids == (micro_tokenizer.END_ID,)
    manifest = read_manifest(folder)
    assert manifest is not None and 0 < manifest.facts["loss"] < 6.0 and manifest.facts["seconds"] > 0


def test_special_ids_are_fixed_and_text_never_has_them(folder: Path) -> None:
    tokenizer = load.load_tokenizer(folder, TargetConfig(name="micro"))
    assert [tokenizer.convert_tokens_to_ids(token) for token in micro_tokenizer.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 3 and tokenizer.bos_token_id is None
    text = "def f(x):\n    return 'caf\u00e9 \u4f60'\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and min(ids) > micro_tokenizer.MASK_ID


@pytest.mark.parametrize("answer", ["return 1", "    indented", "\n\nnewlines first", ""])
def test_a_prompt_is_a_prefix_of_its_conversation(folder: Path, answer: str) -> None:
    tokenizer = load.load_tokenizer(folder, TargetConfig(name="micro"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for extra in ({}, {"tools": tools}):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **extra)
        whole = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": answer}, {"role": "tool", "content": "{}"}], return_dict=False,
            **extra)
        assert whole[:len(prompt)] == prompt and whole.count(micro_tokenizer.START_ID) == 4
        assert whole.count(micro_tokenizer.END_ID) == 4
        assert ("look" in tokenizer.decode(prompt)) == bool(extra)


def test_a_complete_folder_is_reused_and_training_repeats(folder: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.random.get_rng_state()
    again = ensure_micro(tmp_path, TINY)
    assert torch.equal(state, torch.random.get_rng_state())
    first, second = read_manifest(folder), read_manifest(again)
    assert first is not None and second is not None and first.files == second.files
    monkeypatch.setattr(micro, "_make", lambda *_: pytest.fail("it was trained again"))
    assert ensure_micro(tmp_path, TINY) == again
    assert replace(TINY, steps=13) != TINY


def test_every_epoch_sees_every_sample_once_within_the_budget() -> None:
    samples = [[4] * length + [9] for length in range(1, 60)]
    batches = micro._batches(samples, replace(TINY, batch_tokens=128))
    seen: list[int] = []
    while len(seen) < len(samples):
        batch = next(batches)
        assert batch.numel() <= 128 or batch.shape[0] == 1
        seen.extend((batch != -100).sum(dim=1).tolist())
    assert sorted(seen) == [len(ids) for ids in samples]


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(micro_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputRefused, match="gives only 0 conversations"):
        micro_corpus.conversations(0)
