"""A tokenizer with chat templates, a random target in a folder, and small samples."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from deepspec.config.schema import Config, DataConfig, SourceConfig, TargetConfig, TargetShape
from deepspec.data.batch import FeatureSample, Sample

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<s>"]
END, MASK = 2, 3
ROWS = 576  # of the embedding; the tokenizer has 512 ids at most

# Like Qwen3: reasoning of earlier turns is dropped, an empty think block closes the generation prompt without thinking.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}{{ '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}\
{%- elif message.role == 'assistant' %}\
{{ '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}\
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\\n' }}\
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}\
{%- endif %}"""
# Writes its own BOS, opens the think tag in the prompt, and refuses roles that do not alternate.
STRICT_TEMPLATE = """\
{{ bos_token }}\
{%- for message in messages %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{{ '[' + message.role + ']' + message.content + '<|im_end|>' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '[assistant]<think>' }}{% endif %}"""


@lru_cache(maxsize=2)
def tiny_tokenizer(strict: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ``strict`` also prepends a BOS of its own, as a post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3, "user assistant think"], trainer)
    if strict:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        bos_token="<s>" if strict else None,
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|mask|>"],
    )
    fast.chat_template = STRICT_TEMPLATE if strict else CHAT_TEMPLATE
    return fast


def save_target(folder: Path, seed: int = 0) -> Path:
    """A random four-layer Qwen3 with the tokenizer above."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=ROWS, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, eos_token_id=[END, 0], pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [END, 0]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(root: Path, target: Path, prompts: Path) -> Config:
    """A configuration that runs the three data stages in ``root``."""
    shape = TargetShape(
        model_type="qwen3", hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab_size=ROWS,
    )
    config = Config(
        target=TargetConfig(name="tiny", path=str(target), dtype="float32", feature_layers=[0, 2], mask_token_id=MASK,
                            shape=shape),
        data=DataConfig(sources=[SourceConfig(name="own", kind="jsonl", path=str(prompts))], max_length=96,
                        held_out_fraction=0.2, min_held_out=1),
    )
    config.run.name = "test"
    config.run.data_root = str(root)
    config.responses = replace(config.responses, max_tokens=12, batch_size=4, temperature=1.0, top_p=1.0, top_k=0)
    config.features = replace(config.features, codec="fp32", token_budget=128, shard_megabytes=1)
    return config


def sample(name: str, mask: list[int], first: int = 100, domain: str = "chat") -> Sample:
    """Token ids count up from ``first``."""
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    return Sample(name, domain, torch.arange(first, first + len(mask)), loss_mask)


def with_features(item: Sample, layers: int = 2, width: int = 8, seed: int = 0) -> FeatureSample:
    """Random hidden states."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(item.input_ids)
    return FeatureSample(
        item, torch.randn(tokens, layers * width, generator=generator), torch.randn(tokens, width, generator=generator),
    )


def chat(*turns: str, **rest: Any) -> dict[str, Any]:
    """A row with user and assistant turns in alternation."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)], **rest}
