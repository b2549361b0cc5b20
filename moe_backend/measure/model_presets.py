# SPDX-License-Identifier: Apache-2.0
"""Configurations of the models that `make-checkpoint` writes.

The full-size ones repeat the public ``config.json`` of the model they are named after:
``deepseek-ai/DeepSeek-R1``, ``Qwen/Qwen3-30B-A3B`` (quantised as in ``Qwen3-30B-A3B-FP8``) and
``moonshotai/Kimi-K2-Instruct``. The tiny ones keep the architecture and every routing feature of
their family (groups, bias, shared expert, a dense first layer) at a size a laptop serves.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any

FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "ep_size": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": FP8_BLOCKS,
}

# The model's own "model_type" is kimi_k2, an alias of deepseek_v3 that transformers lacks.
KIMI_K2: dict[str, Any] = DEEPSEEK_R1 | {
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": 163584,
    "eos_token_id": 163585,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "quantization_config": FP8_BLOCKS,
}

# kv_lora_rank 512 + qk_rope_head_dim 64 is the only latent width that the engine's MLA kernels
# have, on CPU and on GPU; everything else shrinks. TP 2 cuts every matrix at a block boundary.
TINY_DEEPSEEK: dict[str, Any] = DEEPSEEK_R1 | {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
}

TINY_QWEN3_MOE: dict[str, Any] = QWEN3_30B_A3B | {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-deepseek": TINY_DEEPSEEK,
    "tiny-qwen3-moe": TINY_QWEN3_MOE,
    "deepseek-r1": DEEPSEEK_R1,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "kimi-k2": KIMI_K2,
}
ZERO_IS_LEGAL = ("bos_", "eos_", "first_k", "num_nextn", "n_shared", "attention_")
TINY = ("tiny-deepseek", "tiny-qwen3-moe")


def is_deepseek(config: dict[str, Any]) -> bool:
    return config["model_type"] == "deepseek_v3"


def num_experts(config: dict[str, Any]) -> int:
    return config["n_routed_experts" if is_deepseek(config) else "num_experts"]


def is_moe_layer(config: dict[str, Any], layer: int) -> bool:
    if num_experts(config) == 0:
        return False
    if is_deepseek(config):
        first, every = config["first_k_dense_replace"], config["moe_layer_freq"]
        return layer >= first and layer % every == 0
    sparse = (layer + 1) % config["decoder_sparse_step"] == 0
    return sparse and layer not in config["mlp_only_layers"]


def build_config(preset: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The preset's configuration with fields replaced.

    Args:
        preset: a key of ``PRESETS``.
        overrides: field → value. A dot reaches into a nested field:
            ``{"quantization_config.weight_block_size": [64, 64]}``.

    Raises:
        ValueError: unknown preset or field, a value of another kind, or sizes that no model has.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    config = copy.deepcopy(PRESETS[preset])
    for name, value in overrides.items():
        _set_field(config, preset, name, value)
    _check(config)
    if not is_deepseek(config) and config["quantization_config"]:
        gates = [f"model.layers.{i}.mlp.gate" for i in _moe_layers(config)]
        config["quantization_config"].setdefault("modules_to_not_convert", ["lm_head", *gates])
    return config


def _moe_layers(config: dict[str, Any]) -> list[int]:
    return [i for i in range(config["num_hidden_layers"]) if is_moe_layer(config, i)]


def _set_field(config: dict[str, Any], preset: str, name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    target: Any = config
    for parent in parents:
        target = target.get(parent) if isinstance(target, dict) else None
    if not isinstance(target, dict) or leaf not in target:
        known = list(target) if isinstance(target, dict) else list(config)
        near = difflib.get_close_matches(leaf, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; fields: {', '.join(known)}"
        raise ValueError(f"{preset} has no field {name!r}{hint}")
    old = target[leaf]
    number = isinstance(old, (int, float)) and not isinstance(old, bool)
    wrong = not isinstance(value, (int, float)) if number else not isinstance(value, type(old))
    if number and isinstance(value, bool):
        wrong = True
    if isinstance(old, int) and number and isinstance(value, float) and name != "rope_theta":
        wrong = True
    if old is not None and value is not None and wrong:
        kind = type(old).__name__
        raise ValueError(f"{name}: expected a value like {old!r} ({kind}), found {value!r}")
    target[leaf] = value


def _check(config: dict[str, Any]) -> None:
    """Refuses what no model could be; what our kernels refuse is not refused here."""
    for name, value in config.items():
        zero_ok = name.startswith(ZERO_IS_LEGAL)
        counted = isinstance(value, int) and not isinstance(value, bool)
        if counted and (value < 0 or (value == 0 and not zero_ok)):
            raise ValueError(f"{name}: expected a positive number, found {value}")
    experts, top_k = num_experts(config), config["num_experts_per_tok"]
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok: {top_k} is more than the {experts} experts")
    if is_deepseek(config):
        groups, top_groups = config["n_group"], config["topk_group"]
        if experts % groups:
            raise ValueError(f"n_group: {groups} does not divide n_routed_experts ({experts})")
        if top_groups > groups or top_k > experts // groups * top_groups:
            raise ValueError(
                f"topk_group: {top_groups} of {groups} groups cannot hold top-{top_k} experts"
            )
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ValueError("num_key_value_heads: does not divide num_attention_heads")
    quantization = config["quantization_config"]
    block = quantization and quantization.get("weight_block_size")
    if block and (len(block) != 2 or any(not isinstance(b, int) or b < 1 for b in block)):
        raise ValueError(f"weight_block_size: expected [rows, columns], found {block}")
