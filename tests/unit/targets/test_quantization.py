"""Names of quantised weights: from configurations as quantisers write them, and compared as people write them."""

import json
from pathlib import Path
from typing import Any, Optional

import pytest

from deepspec.doctor.endpoint import ServerFacts
from deepspec.doctor.weights import check_quantization
from deepspec.targets.quantization import folder_quantization, quantization_name, same_quantization

CONFIGS: list[tuple[dict[str, Any], Optional[str]]] = [
    ({}, None), ({"quantization_config": None}, None),
    ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq-int4"),
    ({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 8}}}, "gptq-int8"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes-int4"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt-nvfp4"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"type": "float", "num_bits": 8}}}}}, "compressed-tensors-fp8"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"type": "int", "num_bits": 4}, "input_activations": None}}}}, "compressed-tensors-w4a16"),
]


@pytest.mark.parametrize("config,name", CONFIGS)
def test_names(config: dict[str, Any], name: Optional[str], tmp_path: Path) -> None:
    assert quantization_name(config) == name
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder_quantization(str(tmp_path)) == name


def test_a_folder_that_is_elsewhere_says_nothing(tmp_path: Path) -> None:
    assert folder_quantization(None) is None and folder_quantization("owner/model") is None
    (tmp_path / "config.json").write_text("no json")
    assert folder_quantization(str(tmp_path)) is None


@pytest.mark.parametrize("one,other,same", [
    ("fp8", "compressed-tensors-fp8", True), ("awq", "awq_marlin", True), ("int4", "gptq-int4", True),
    ("fp8", "awq-int4", False), ("fp8", None, False), (None, None, True),
])
def test_the_same_weights_under_other_names(one: Optional[str], other: Optional[str], same: bool) -> None:
    assert same_quantization(one, other) is same and same_quantization(other, one) is same


def test_the_doctor_notes_another_quantisation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[3][0]))
    served = ServerFacts("vllm", target=str(tmp_path))
    [note] = check_quantization(served, None)
    assert note.kind == "note" and "awq-int4" in note.says and "not quantised" in note.says
    assert check_quantization(served, "awq") == [] and check_quantization(ServerFacts("vllm"), "fp8") == []
