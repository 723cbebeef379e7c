"""The micro target's tokenizer: byte-level BPE with a ChatML template and fixed ids for its special tokens."""

from typing import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Ids are positions in this tuple whatever the text was, so configurations can name them.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
TEXT_END_ID, START_ID, END_ID, PAD_ID, MASK_ID = range(5)

CHAT_TEMPLATE = """\
{%- set listed = tools is defined and tools -%}
{%- if listed -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + '\\n\\n' }}{%- endif -%}
{{ 'Tools:\\n' }}{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (listed and loop.first and message['role'] == 'system') -%}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] -%}{{ '\\n' + (call | tojson) }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most ``vocab_size`` ids, special tokens first.

    A newline is always a token of its own, so that the ids of a rendered prompt are a prefix of the ids of the whole
    conversation, whatever an answer starts with.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=None, eos_token=SPECIAL_TOKENS[END_ID], pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=[SPECIAL_TOKENS[index] for index in (TEXT_END_ID, START_ID, MASK_ID)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False)
