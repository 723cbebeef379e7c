"""Shared by the tests against real engines: a random target and drafter, exported by our code."""

from pathlib import Path
from typing import Any

import torch

from deepspec.config.schema import Config, DrafterConfig, TargetShape
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.launch import Origin
from deepspec.targets.load import load_target

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 6, 128, 4, 2, 32, 1024
WORDS = 990  # ids below have a token
MASK = 1000
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SHA = "a" * 64  # stands for the hash of a checkpoint


def save_target(folder: Path, *, tied: bool = False, sharp: float = 1.0, template: str = TEMPLATE) -> Path:
    """A random Qwen3 with a word-level tokenizer whose ids stop short of the embedding's last rows. ``sharp`` times the
    LM head makes its distributions uneven, so that drafters can be right at temperature 1 too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=512,
        tie_word_embeddings=tied, eos_token_id=2, bos_token_id=None, pad_token_id=2,
    )).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.06)
    if sharp != 1.0:
        head = model.get_output_embeddings().weight.data.mul_(sharp)
        head[WORDS:] = 0.0  # ids without a token, which we never propose and an engine would
    model.save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def make_config(target_folder: Path, run_dir: Path, formats: tuple[str, ...] = ("deepspec",), **drafter: Any) -> Config:
    """Options of a run on the random target, in fp32."""
    config = Config()
    config.run.name, config.run.dir, config.run.data_root = "random", str(run_dir), str(run_dir / "data")
    config.target.name, config.target.path, config.target.dtype = "random", str(target_folder), "float32"
    config.target.feature_layers, config.target.mask_token_id = [1, 2, 4], MASK
    config.target.shape = TargetShape("qwen3", HIDDEN, 256, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY)
    options = {"num_layers": 2, "block_size": 4, "markov_rank": 16} | drafter
    config.drafter = DrafterConfig(**options)
    config.export.dtype, config.export.formats = "float32", list(formats)
    return config


def export_random(target_folder: Path, run_dir: Path, formats: tuple[str, ...] = ("deepspec",), **drafter: Any) -> Path:
    """Export a random drafter (every weight non-zero) on the random target, in fp32."""
    config = make_config(target_folder, run_dir, formats, **drafter)
    target = load_target(config.target, device="cpu", cache_dir=run_dir / "data")
    torch.manual_seed(1)
    shape = shape_from(target.spec, config.target, config.drafter)
    model = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return export_model(config, target, model)


def export_model(config: Config, target: Any, model: Any) -> Path:
    """Export ``model`` as ``config`` says."""
    run_dir = Path(config.run.dir)
    origin = Origin(config.target.path, None, target.fingerprint, "float32", SHA, "step-1", str(run_dir / "export"),
                    ("Qwen3ForCausalLM",))
    evidence = gather(run_dir, SHA, target.fingerprint, model.shape.draft_length)
    return export_drafter(ExportRequest(config, target, model, origin, evidence, run_dir / "profile" / "records.jsonl"))
