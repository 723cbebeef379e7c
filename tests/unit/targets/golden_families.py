"""One tiny configuration, or more, of every supported family: what the golden tests run over."""

from dataclasses import dataclass
from typing import Any, Callable

from transformers import (
    DeepseekV3Config, DeepseekV4Config, Gemma2Config, Gemma3Config, Gemma3TextConfig, Gemma4TextConfig,
    Gemma4UnifiedConfig, Glm4MoeConfig, GlmMoeDsaConfig, GptOssConfig, GraniteConfig, LlamaConfig, MistralConfig,
    Olmo2Config, Phi3Config, Qwen2Config, Qwen3_5Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig,
)

ROWS = 320  # of the embedding; the tokenizer has fewer
FEATURES = (0, 2)
_SIZES: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 3,
}
_UNTIED = _SIZES | {"tie_word_embeddings": False}
_TIED = _SIZES | {"tie_word_embeddings": True}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                      "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
           "num_key_value_heads": 4, "head_dim": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
         "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
_LONG = {"original_max_position_embeddings": 8, "max_position_embeddings": 128, "rope_parameters": {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}}
_GEMMA4 = _TIED | _WINDOWED | {
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": ROWS}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_V4 = {key: value for key, value in _UNTIED.items() if key not in ("intermediate_size", "head_dim")} | {
    "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                    "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "partial_rotary_factor": 0.25, "q_lora_rank": 32,
    "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "sliding_window": 8, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 512, "hc_mult": 4, "max_position_embeddings": 512}


@dataclass(frozen=True)
class Tiny:
    """How to configure a tiny target, and the standard deviation of its random weights."""

    config: Callable[[], Any]
    spread: float = 0.3


TINY: dict[str, Tiny] = {
    "qwen2": Tiny(lambda: Qwen2Config(**{key: value for key, value in _TIED.items() if key != "head_dim"})),
    "qwen3": Tiny(lambda: Qwen3Config(**_UNTIED)),
    "qwen3_tied": Tiny(lambda: Qwen3Config(**_TIED)),
    "qwen3_moe": Tiny(lambda: Qwen3MoeConfig(**_UNTIED, **_EXPERTS, num_experts=4, mlp_only_layers=[1])),
    "qwen3_5_text": Tiny(lambda: Qwen3_5TextConfig(**_TIED, **_LINEAR), 0.2),
    "qwen3_5": Tiny(lambda: Qwen3_5Config(text_config=_UNTIED | _LINEAR, tie_word_embeddings=False), 0.2),
    "llama": Tiny(lambda: LlamaConfig(**_UNTIED, attention_bias=True, rope_parameters=_LLAMA3)),
    "mistral_window": Tiny(lambda: MistralConfig(**_UNTIED, sliding_window=7)),
    "gemma2": Tiny(lambda: Gemma2Config(**_TIED, sliding_window=5, query_pre_attn_scalar=16,
                                        final_logit_softcapping=3.0, attn_logit_softcapping=2.0)),
    "gemma3_text": Tiny(lambda: Gemma3TextConfig(**_TIED, **_WINDOWED, query_pre_attn_scalar=16,
                                                 final_logit_softcapping=3.0)),
    "gemma3": Tiny(lambda: Gemma3Config(text_config=_TIED | _WINDOWED, vision_config={
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14})),
    "gemma4_text": Tiny(lambda: Gemma4TextConfig(**_GEMMA4), 0.15),
    "gemma4_shared": Tiny(lambda: Gemma4TextConfig(**_GEMMA4 | {"num_kv_shared_layers": 2}), 0.15),
    "gemma4_moe": Tiny(lambda: Gemma4TextConfig(**_GEMMA4 | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0}), 0.15),
    "gemma4_unified": Tiny(lambda: Gemma4UnifiedConfig(
        text_config={key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
        image_token_id=300, audio_token_id=301, video_token_id=302, boi_token_id=303, eoi_token_id=304,
        boa_token_id=305, eoa_token_index=306), 0.15),
    "gpt_oss": Tiny(lambda: GptOssConfig(**_UNTIED, **_WINDOWED, num_local_experts=4, num_experts_per_tok=2,
                                         rope_parameters=_YARN)),
    "glm4_moe": Tiny(lambda: Glm4MoeConfig(**_UNTIED, **_ROUTED, use_qk_norm=True)),
    "glm_moe_dsa": Tiny(lambda: GlmMoeDsaConfig(**_UNTIED | _ROUTED | _LATENT | {
        "index_topk": 6, "index_head_dim": 16, "index_n_heads": 16})),
    "deepseek_v3": Tiny(lambda: DeepseekV3Config(**_UNTIED | _ROUTED | _LATENT | {"rope_parameters": _YARN})),
    "deepseek_v4": Tiny(lambda: DeepseekV4Config(**_V4), 0.2),
    "olmo2": Tiny(lambda: Olmo2Config(**_UNTIED)),
    "phi3": Tiny(lambda: Phi3Config(**_UNTIED | _LONG, sliding_window=7)),
    "granite": Tiny(lambda: GraniteConfig(**_TIED, logits_scaling=4.0, embedding_multiplier=6.0,
                                          residual_multiplier=0.5, attention_multiplier=0.2)),
}
FAMILIES = {name: tiny.config for name, tiny in TINY.items()}
