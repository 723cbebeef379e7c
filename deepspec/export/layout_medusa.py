"""Layout of Medusa drafters in numbers (vLLM's ``MedusaModel``). Needs no torch."""

from typing import Any, Mapping

from deepspec.drafters.config_medusa import ALGORITHM, ARCHITECTURE, OWN, is_medusa

__all__ = ["ALGORITHM", "ARCHITECTURE", "REQUIRED", "check_keys", "is_medusa", "medusa_tensors"]
REQUIRED = ("architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "vocab_size", "truncated_vocab_size",
            "num_heads", "num_hidden_layers", "original_lm_head", "medusa_fc_bias", "block_size", "target_layer_ids",
            "deepspec_algorithm", OWN)


def medusa_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What training changes: the residual blocks of every head."""
    width = config["hidden_size"]
    return {f"blocks.{head}.layers.{layer}.{name}": shape for head in range(config["block_size"])
            for layer in range(config["num_hidden_layers"])
            for name, shape in (("weight", (width, width)), ("bias", (width,)))}


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """What contradicts itself in a config.json whose required keys are there."""
    problems = [] if config["num_heads"] == config["block_size"] else [
        f"num_heads={config['num_heads']} must be block_size={config['block_size']}"]
    taken = sorted(key for key in config if "num" in key and ("heads" in key or "layers" in key)
                   and key not in ("num_heads", "num_hidden_layers"))
    problems += [f"{key} stands at the top level, where vLLM takes it for its own" for key in taken]
    if config["truncated_vocab_size"] != config["vocab_size"]:
        problems.append("truncated_vocab_size differs from vocab_size, but there is no token_map")
    return problems
