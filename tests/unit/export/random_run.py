"""A random Qwen3-shaped target with a tokenizer, and the options of a run on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepspec.config.schema import Config, DrafterConfig, TargetShape
from deepspec.export import gates

WORDS = 250  # ordinary tokens; special ones and padding rows follow
ROWS = 320
MASK = 300  # a padding row of the embedding: no text has it
SHA = "a" * 64  # stands for the hash of a checkpoint


def save_target(folder: Path, *, tied: bool = False, model_type: str = "qwen3") -> Path:
    """A random target of six thin layers as a Hugging Face folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=ROWS, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=None,
        eos_token_id=251, pad_token_id=252, rope_theta=10000.0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    model.save_pretrained(folder)
    vocabulary = {f"w{index}": index for index in range(WORDS)} | {"<unk>": 250}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def make_config(folder: Path, run_dir: Path, **drafter: Any) -> Config:
    """Options of a run on the random target."""
    config = Config()
    config.run.name, config.run.dir, config.run.data_root = "random", str(run_dir), str(run_dir / "data")
    config.target.name, config.target.path, config.target.dtype = "random", str(folder), "float32"
    config.target.feature_layers, config.target.mask_token_id = [1, 2, 4], MASK
    config.target.shape = TargetShape("qwen3", 64, 96, 6, 4, 2, 16, ROWS)
    config.drafter = replace(DrafterConfig(num_layers=2, block_size=4, markov_rank=8), **drafter)
    config.trainer.num_anchors, config.data.max_length = 16, 128
    config.export.dtype = "float32"
    return config


def logits_of(drafter: Any) -> torch.Tensor:
    """Logits of three blocks over random hidden states."""
    ids = gates.fixed_tokens(drafter.shape.vocab_size, 30)
    width = len(drafter.shape.feature_layers) * 64
    features = torch.randn(30, width, generator=torch.Generator().manual_seed(3))
    return gates.block_logits(drafter, features, ids, torch.tensor([1, 9, 20]))
