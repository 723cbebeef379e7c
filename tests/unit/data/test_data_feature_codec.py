"""Codecs of hidden states: how exact, how large, and as large as the estimate says."""

from dataclasses import replace

import pytest
import torch
from tiny_data import sample
from transformers import AutoModelForCausalLM, Qwen3Config

from deepspec.data import feature_codec as codecs
from deepspec.data.anchors import valid_anchors
from deepspec.data.feature_format import StoreHeader, describe_estimate, estimate_bytes
from deepspec.data.feature_records import encode_record

HEADER = StoreHeader("target", "renderer", "responses", (1, 2, 3, 4, 5), 2560, "bf16", "float32")


def hidden_states() -> torch.Tensor:
    """[T, M, D] of a random transformer, with the towering channels that trained ones have."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=256, hidden_size=192, intermediate_size=256, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=48)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        states = model(torch.randint(0, 256, (1, 300)), output_hidden_states=True).hidden_states
    values = torch.stack([state[0] for state in states[1:4]], dim=1)
    values[..., 7] *= 3000
    return values


@pytest.mark.parametrize("codec,step", [("int8", 1 / 254), ("fp8-e4m3", 1 / 28)])
def test_scaled_codecs_survive_channels_that_tower_over_the_rest(codec: str, step: float) -> None:
    values = hidden_states()
    data, scales = codecs.encode(values, codec)
    assert codecs.group_size(192) == 96 and scales.shape == (300, 3, 2) and data.dtype.itemsize == 1
    read = codecs.decode(data, scales, codec)
    groups, errors = values.unflatten(-1, (2, 96)).abs(), (read - values).unflatten(-1, (2, 96)).abs()
    assert bool((errors <= groups.amax(-1, keepdim=True) * step * 1.02).all())
    zeros = codecs.encode(torch.zeros(2, 96), codec)
    assert not codecs.decode(*zeros, codec).any()


def test_fp8_errs_in_proportion_to_the_value() -> None:
    values = hidden_states()
    read = codecs.decode(*codecs.encode(values, "fp8-e4m3"), "fp8-e4m3")
    groups = values.unflatten(-1, (2, 96)).abs()
    large = (groups > groups.amax(-1, keepdim=True) / 5000).flatten(-2)
    assert float(((read - values).abs() / values.abs())[large].max()) <= 2**-4


def test_every_fp8_number_is_widened_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = (torch.arange(256) & 0x7F) != 0x7F
    scales = torch.tensor([0.375], dtype=torch.bfloat16).expand(2, 128, 1)
    wide = codecs.decode(every.view(2, 128, 1), scales, "fp8-e4m3").flatten()
    assert torch.equal(wide[numbers], every.float()[numbers] * 0.375)


def test_lossless_keeps_every_bit() -> None:
    values = hidden_states()
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.0, -1.0])
    for given in (values, odd.expand(5, 8), torch.empty(0, 8)):
        data, frame = codecs.encode(given, "lossless")
        read = codecs.decode(data, frame, "lossless")
        assert torch.equal(read.view(torch.int16), given.bfloat16().view(torch.int16))


def test_lossless_takes_about_what_is_assumed() -> None:
    values = hidden_states()
    data, frame = codecs.encode(values, "lossless")
    share = (data.numel() + frame.numel()) / (2 * values.numel())
    assert abs(share / codecs.ASSUMED_LOSSLESS_SHARE - 1) < 0.05


def test_a_frame_of_another_length_is_no_sample() -> None:
    data, frame = codecs.encode(torch.randn(4, 8), "lossless")
    with pytest.raises(ValueError, match="32 high bytes for 16"):
        codecs.decode(data[:2], frame, "lossless")


@pytest.mark.parametrize("codec,limit", [("int8", 0.52), ("fp8-e4m3", 0.52), ("lossless", 0.70), ("bf16", 1.0)])
@pytest.mark.parametrize("width", [576, 1024, 2560, 4096, 5120])
def test_bytes_per_token_against_all_rows_in_bf16(codec: str, limit: float, width: int) -> None:
    # A published shape: five layers, 30 % of the tokens are the prompt's. Ids, mask and lists count as well.
    documents = [sample("a", [0] * 300 + [1] * 700)]
    header = replace(HEADER, codec=codec, hidden_size=width)
    plain = 1000 * (len(header.layers) + 1) * width * 2
    assert estimate_bytes(header, documents) <= limit * plain
    # Even where every token predicts a label, the two halves stay below 52 % of the hidden states' bytes.
    everything = header.layout(1000, 1000)
    hidden = sum(section.size for section in (everything.features, everything.feature_extra, everything.hidden,
                                              everything.hidden_extra))
    assert hidden <= limit * plain


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_record_is_as_large_as_its_layout(codec: str) -> None:
    item = sample("a", [0] * 100 + [1] * 200)
    header = replace(HEADER, codec=codec, hidden_size=192, layers=(0, 1, 2))
    values = hidden_states()
    record, pieces = encode_record(header, item, "train", values.flatten(1), values[:, 0])
    assert record.label_rows == len(valid_anchors(item.loss_mask)) == 199
    assert sum(map(len, pieces)) == header.layout(300, 199, record.coded).size
    assert bool(record.coded) == (codec == "lossless") == ("coded" in record.to_json())


def test_the_estimate_says_what_it_assumes() -> None:
    assert describe_estimate(HEADER, 3 * 10**9) == "about 3.0 GB as bf16"
    assert describe_estimate(replace(HEADER, codec="lossless"), 10**6) == (
        "about 1.0 MB as lossless (assuming 69% of bf16's bytes)")
