# SPDX-License-Identifier: Apache-2.0
"""The training family in plain torch: what runs without a GPU, and the oracle of its kernels.

Everything computes in fp32, or in fp64 for fp64 inputs (the oracle of gradient tests), and torch
differentiates it. Row maps follow the kernels' layout, so that either execution reads the other's.
"""

from __future__ import annotations

import torch

from moe_backend.reference import SUM_FLOOR, top_ids
from moe_backend.types import RouterSpec


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def all_scores(x: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return x.softmax(-1)
    if score == "sigmoid":
        return x.sigmoid()
    return (x.clamp_min(0) + torch.log1p((-x.abs()).exp())).sqrt()


def _map(key: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    chosen = torch.zeros_like(key, dtype=torch.bool)
    return chosen.scatter_(1, top_ids(key.detach(), spec), True)


def router_dense(
    logits: torch.Tensor,
    spec: RouterSpec,
    pre_softmax: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in the logits' layout and dtype, zero where not chosen, and the bool map."""
    x = _wide(logits)
    after = spec.score == "softmax" and not pre_softmax
    score = x if after else all_scores(x, spec.score)
    key = score if bias is None else score + bias.to(score.dtype)
    chosen = _map(key, spec)
    if after:
        probs = x.masked_fill(~chosen, -torch.inf).softmax(-1)
        probs = torch.where(chosen, probs, 0.0)
    else:
        probs = torch.where(chosen, score, 0.0)
        if spec.score != "softmax" and spec.top_k > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + SUM_FLOOR)
    return (probs * spec.scale).to(logits.dtype), chosen


def router_scores(
    logits: torch.Tensor, top_k: int, score: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every expert, normalised over all of them, and the bool map of the top-k."""
    s = all_scores(_wide(logits), score)
    chosen = _map(s, RouterSpec(top_k))
    if score != "softmax" and top_k > 1:
        s = s / (s.sum(-1, keepdim=True) + SUM_FLOOR)
    return s, chosen


def pack_bits(routing_map: torch.Tensor) -> torch.Tensor:
    """bool ``[..., E]`` to uint8 ``[..., ceil(E / 8)]``, the lowest expert in the lowest bit."""
    padded = torch.nn.functional.pad(routing_map, (0, -routing_map.shape[-1] % 8))
    bits = padded.unflatten(-1, (-1, 8)).int() << torch.arange(8, device=routing_map.device)
    return bits.sum(-1).to(torch.uint8)


def unpack_bits(bits: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Inverse of pack_bits."""
    spread = (bits[..., None].int() >> torch.arange(8, device=bits.device)) & 1
    return spread.flatten(-2)[..., :num_experts].bool()


def aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """factor / T² · Σ probs[t, c] · tokens_per_expert[c]; factor is coeff · E / top_k."""
    wide = _wide(probs)
    total = total_num_tokens
    if isinstance(total, torch.Tensor):
        total = total.to(wide.dtype)
    return (wide.sum(0) * tokens_per_expert.to(wide.dtype)).sum() * (factor / total / total)
