# SPDX-License-Identifier: Apache-2.0
"""Which tensors a checkpoint holds, and their seeded random values.

Every matrix has the variance that keeps the residual stream level: rows of standard deviation
``gain / sqrt(columns)``. Scale blocks differ by up to a factor of four, as in trained models, so
that a wrong or shifted block scale is visible; router rows are wide enough for clear choices.
A value depends on the seed and on the tensor's name only, never on the order of writing.

Each token also has a favourite successor, whose logit is about as high as the best random one.
That spreads the gap between the best and the second best token as in a trained model, where most
greedy choices are clear; with purely random logits a rounding would decide every seventh token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from moe_backend.measure.model_presets import is_deepseek, is_moe_layer, num_experts
from moe_backend.types import FP8, cdiv

FP8_MAX = 448.0
EMBEDDING = "model.embed_tokens.weight"
DOWN_GAIN = 0.15  # of an MLP's last matrix, see _mlp
SUCCESSOR_GAIN = 26.0  # times the share of the embedding in the last hidden state, about a half
Kind = Literal["matrix", "plain", "norm", "bias", "head"]


@dataclass(frozen=True)
class TensorSpec:
    """One parameter. ``matrix`` is quantised in an FP8 checkpoint, the others never are."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    gain: float = 1.0

    def num_bytes(self, block: list[int] | None) -> int:
        if self.kind == "matrix" and block:
            scales = cdiv(self.shape[0], block[0]) * cdiv(self.shape[1], block[1])
            return math.prod(self.shape) + 4 * scales
        return math.prod(self.shape) * (4 if self.kind == "bias" else 2)


def plan(config: dict[str, Any]) -> list[TensorSpec]:
    """Every tensor of the model in the order of the layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    specs = [TensorSpec(EMBEDDING, (vocab, hidden), "plain", math.sqrt(hidden))]
    layers = config["num_hidden_layers"]
    for layer in range(layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        if layer >= layers:
            specs += _next_token_head(prefix, hidden, vocab)
        specs += [
            TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), "norm"),
            TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), "norm"),
        ]
        specs += (_mla if is_deepseek(config) else _attention)(f"{prefix}.self_attn", config)
        specs += (_moe if is_moe_layer(config, layer) else _dense)(f"{prefix}.mlp", config)
    specs.append(TensorSpec("model.norm.weight", (hidden,), "norm"))
    if not config["tie_word_embeddings"]:
        specs.append(TensorSpec("lm_head.weight", (vocab, hidden), "head", 3.0))
    return specs


def _next_token_head(prefix: str, hidden: int, vocab: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"{prefix}.embed_tokens.weight", (vocab, hidden), "plain", math.sqrt(hidden)),
        TensorSpec(f"{prefix}.enorm.weight", (hidden,), "norm"),
        TensorSpec(f"{prefix}.hnorm.weight", (hidden,), "norm"),
        TensorSpec(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), "plain"),
        TensorSpec(f"{prefix}.shared_head.norm.weight", (hidden,), "norm"),
        TensorSpec(f"{prefix}.shared_head.head.weight", (vocab, hidden), "plain", 3.0),
    ]


def _mla(prefix: str, config: dict[str, Any]) -> list[TensorSpec]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    query = heads * (nope + rope)
    if q_rank is None:
        specs = [TensorSpec(f"{prefix}.q_proj.weight", (query, hidden), "matrix")]
    else:
        specs = [
            TensorSpec(f"{prefix}.q_a_proj.weight", (q_rank, hidden), "matrix"),
            TensorSpec(f"{prefix}.q_a_layernorm.weight", (q_rank,), "norm"),
            TensorSpec(f"{prefix}.q_b_proj.weight", (query, q_rank), "matrix"),
        ]
    return [
        *specs,
        TensorSpec(f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), "matrix"),
        TensorSpec(f"{prefix}.kv_a_layernorm.weight", (kv_rank,), "norm"),
        TensorSpec(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank), "matrix"),
        TensorSpec(f"{prefix}.o_proj.weight", (hidden, heads * value), "matrix"),
    ]


def _attention(prefix: str, config: dict[str, Any]) -> list[TensorSpec]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return [
        TensorSpec(f"{prefix}.q_proj.weight", (query, hidden), "matrix"),
        TensorSpec(f"{prefix}.k_proj.weight", (key, hidden), "matrix"),
        TensorSpec(f"{prefix}.v_proj.weight", (key, hidden), "matrix"),
        TensorSpec(f"{prefix}.q_norm.weight", (dim,), "norm"),
        TensorSpec(f"{prefix}.k_norm.weight", (dim,), "norm"),
        TensorSpec(f"{prefix}.o_proj.weight", (hidden, query), "matrix"),
    ]


def _mlp(prefix: str, hidden: int, intermediate: int, down: float = DOWN_GAIN) -> list[TensorSpec]:
    # Gate rows of gain 2 make SwiGLU's output about as wide as a plain layer's. On the way down a
    # small gain lets the residual stream dominate, as it does in trained models; with a large one
    # a rounding in one layer is amplified by the choices of the routers behind it.
    return [
        TensorSpec(f"{prefix}.gate_proj.weight", (intermediate, hidden), "matrix", 2.0),
        TensorSpec(f"{prefix}.up_proj.weight", (intermediate, hidden), "matrix"),
        TensorSpec(f"{prefix}.down_proj.weight", (hidden, intermediate), "matrix", down),
    ]


def _dense(prefix: str, config: dict[str, Any]) -> list[TensorSpec]:
    return _mlp(prefix, config["hidden_size"], config["intermediate_size"])


def _moe(prefix: str, config: dict[str, Any]) -> list[TensorSpec]:
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    experts = num_experts(config)
    down = DOWN_GAIN / config.get("routed_scaling_factor", 1.0)
    specs = [TensorSpec(f"{prefix}.gate.weight", (experts, hidden), "plain", 1.5)]
    if is_deepseek(config):
        if config["topk_method"] == "noaux_tc":
            name = f"{prefix}.gate.e_score_correction_bias"
            specs.append(TensorSpec(name, (experts,), "bias", 0.05))
        if config["n_shared_experts"]:
            shared = intermediate * config["n_shared_experts"]
            specs += _mlp(f"{prefix}.shared_experts", hidden, shared)
    for expert in range(experts):
        specs += _mlp(f"{prefix}.experts.{expert}", hidden, intermediate, down)
    return specs


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _successors(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Rows of the head that answer to the embedding of the token before."""
    vocab, hidden = shape
    embedding = _generator(seed, EMBEDDING).standard_normal(shape, dtype=np.float32)
    step = round(vocab * 0.618)  # far apart, and every token is somebody's successor
    return torch.from_numpy(np.roll(embedding, step, axis=0)) * (SUCCESSOR_GAIN / hidden)


def values(
    spec: TensorSpec, seed: int, block: list[int], quantized: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or for a quantised matrix the FP8 tensor and its ``weight_scale_inv``.

    With ``quantized=False`` a matrix is the bf16 rounding of what the FP8 pair stands for.
    """
    random = _generator(seed, spec.name)
    if spec.kind == "norm":
        yield spec.name, torch.from_numpy(random.uniform(0.8, 1.2, spec.shape)).to(torch.bfloat16)
        return
    std = spec.gain / (1.0 if spec.kind == "bias" else math.sqrt(spec.shape[-1]))
    raw = torch.from_numpy(random.standard_normal(spec.shape, dtype=np.float32)) * std
    if spec.kind == "head":
        raw += _successors(spec.shape, seed)
    if spec.kind != "matrix":
        yield spec.name, raw.to(torch.float32 if spec.kind == "bias" else torch.bfloat16)
        return
    rows, columns = (cdiv(n, b) for n, b in zip(spec.shape, block, strict=True))
    spread = np.exp2(random.uniform(-1.0, 1.0, (rows, columns))).astype(np.float32)
    raw *= expand(torch.from_numpy(spread), spec.shape, block)
    quantised, scale = quantize_blocks(raw, block)
    if quantized:
        yield spec.name, quantised
        yield f"{spec.name}_scale_inv", scale
    else:
        yield spec.name, (quantised.float() * expand(scale, spec.shape, block)).to(torch.bfloat16)


def expand(scale: torch.Tensor, shape: tuple[int, ...], block: list[int]) -> torch.Tensor:
    """One value per block → one value per element; the last block of an axis may be partial."""
    full = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]


def quantize_blocks(w: torch.Tensor, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [rows, columns] → e4m3 of the same shape and fp32 scales, one per block."""
    rows, columns = (cdiv(n, b) for n, b in zip(w.shape, block, strict=True))
    padded = w.new_zeros(rows * block[0], columns * block[1])
    padded[: w.shape[0], : w.shape[1]] = w
    tiles = padded.view(rows, block[0], columns, block[1])
    scale = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-10) / FP8_MAX
    codes = (w / expand(scale, tuple(w.shape), block)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, scale
