"""The target architectures that are supported, by ``model_type``; docs/adding-a-target.md says how to add one.

A family is in the table when a row of tests/unit/targets/golden_families.py holds it to Hugging Face's own outputs.
"""

from dataclasses import dataclass

from deepspec.errors import InputRefused


@dataclass(frozen=True)
class Family:
    """How the targets of a ``model_type`` are run and read.

    ``packed``: tokens meet in attention alone, so documents can be laid end to end; otherwise they are run one by one.
    ``streams``: layers hand on several residual streams, a layer's output is their mean, and engines capture the last
    layer too (DeepSeek-V4); otherwise a layer's output is its hidden state and the last layer cannot be captured.
    """

    name: str
    packed: bool = True
    streams: bool = False


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family("DeepSeek-V3 and R1"),
    "deepseek_v4": Family("DeepSeek-V4", packed=False, streams=True),  # compressed keys and values of many tokens
    "gemma2": Family("Gemma 2"),
    "gemma3": Family("Gemma 3"),
    "gemma3_text": Family("Gemma 3, text only"),
    "gemma4": Family("Gemma 4"),
    "gemma4_text": Family("Gemma 4, text only"),
    "gemma4_unified": Family("Gemma 4 unified"),
    "gemma4_unified_text": Family("Gemma 4 unified, text only"),
    "glm4_moe": Family("GLM-4.5 and 4.6"),
    "glm_moe_dsa": Family("GLM-5", packed=False),  # an indexer chooses keys by scores over all earlier tokens
    "gpt_oss": Family("gpt-oss"),
    "granite": Family("Granite"),
    "llama": Family("Llama 2 and 3, SmolLM2"),
    "mistral": Family("Mistral"),
    "olmo2": Family("OLMo 2"),
    "phi3": Family("Phi-3 and Phi-4"),
    "qwen2": Family("Qwen2.5"),
    "qwen3": Family("Qwen3"),
    "qwen3_5": Family("Qwen3.5", packed=False),  # the state of linear attention runs on from token to token
    "qwen3_5_text": Family("Qwen3.5, text only", packed=False),
    "qwen3_5_moe": Family("Qwen3.5 MoE", packed=False),
    "qwen3_5_moe_text": Family("Qwen3.5 MoE, text only", packed=False),
    "qwen3_moe": Family("Qwen3 MoE"),
}


def family_of(model_type: str, name: str) -> Family:
    """The family of a target called ``name``. Raises InputRefused, listing all families, for an unknown one."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(f"{key} ({family.name})" for key, family in sorted(FAMILIES.items()))
    raise InputRefused(
        f"The target {name} has model_type={model_type!r}, which is not among the supported ones: {known}. "
        "docs/adding-a-target.md says how to add it: one line in deepspec/targets/families.py, one file in "
        "conf/target and one row of the golden test."
    )
