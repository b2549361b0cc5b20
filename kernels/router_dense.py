# SPDX-License-Identifier: Apache-2.0
"""Dense differentiable router: probabilities in the logits' layout, zero where not chosen.

    softmax, pre    p = softmax(x),                    chosen by p + bias
    softmax, post   p = softmax of the chosen logits,  chosen by x + bias
    sigmoid, sqrtsoftplus
                    p = s / (sum of chosen s + 1e-20) if top-k > 1 else s,  chosen by s + bias
    output          p * scale

Backward, with g the gradient of the output times scale, all sums over the chosen:

    softmax, pre    dx = p (g - sum g p)          for every expert, g = 0 where not chosen
    softmax, post   dx = p (g - sum g p)          for the chosen
    others          dx = s' (g / S - sum g s / S^2)

Shapes: logits, probs [T, E]; map bool [T, E] or bits uint8 [T, ceil(E / 8)], lowest expert in the
lowest bit; indices [T, k] by rising expert. Grid: one token and one warp a program. Backward
reads the map and, but for softmax before selection, only the chosen logits and gradients.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Launches
from .router_math import (
    EXCLUDED,
    columns,
    keep_best_groups,
    map_row,
    pack_bits,
    pointwise_score,
    pointwise_slope,
    select_top,
    sortable,
    unsortable,
    warps_of_row,
)


@dataclass(frozen=True)
class DenseSpec:
    """How logits become probabilities; ``candidates`` keys of a group make its score."""

    top_k: int
    score: str = "softmax"
    pre_softmax: bool = False
    num_groups: int = 1
    top_groups: int = 1
    candidates: int = 1
    scale: float = 1.0


class DenseRouting(NamedTuple):
    probs: torch.Tensor  # [num_tokens, num_experts], the logits' dtype
    routing_map: torch.Tensor | None  # bool [num_tokens, num_experts]
    bits: torch.Tensor | None  # uint8 [num_tokens, ceil(num_experts / 8)]


@triton.jit(do_not_specialize_on_alignment=["map_ptr"])
def _forward_kernel(
    logits_ptr, bias_ptr, probs_ptr, map_ptr, bits_ptr, indices_ptr, row_stride, scale,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    expert, inside = columns(E, NUM_GROUPS, GROUPS, GROUP)
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + row * row_stride + expert
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    inverse = 1.0
    score = x
    if SCORE != "softmax":
        score = pointwise_score(x, SCORE)
    elif PRE:
        e = tl.exp(x - peak)
        inverse = 1.0 / tl.sum(e, 0)
        score = e * inverse
    key = score
    if bias_ptr is not None:
        key += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, sortable(key), EXCLUDED)
    if NUM_GROUPS > 1:
        keys = keep_best_groups(keys, NUM_GROUPS, TOP_GROUPS, CANDIDATES, GROUPS, GROUP)
    chosen = select_top(keys, K) & inside

    # registers: without a bias the key still holds the score; else long rows are read again
    if bias_ptr is None:
        score = unsortable(keys)
        if SCORE != "softmax" or PRE:  # such a score is never negative: its key was NaN's
            score = tl.where(keys < 0, float("nan"), score)
    elif GROUPS * GROUP > 1024:
        score = tl.load(at, mask=chosen, other=float("-inf")).to(tl.float32)
        if SCORE != "softmax":
            score = pointwise_score(score, SCORE)
        elif PRE:
            score = tl.exp(score - peak) * inverse
    if SCORE == "softmax" and not PRE:
        score = tl.where(chosen, score, float("-inf"))
        p = tl.where(chosen, tl.exp(score - tl.max(score, 0)), 0.0)
        p *= scale / tl.sum(p, 0)
    else:
        p = tl.where(chosen, score, 0.0)
        if SCORE != "softmax" and K > 1:
            scale /= tl.sum(p, 0) + 1e-20
        p *= scale
    tl.store(probs_ptr + row * E + expert, p, mask=inside)
    if map_ptr is not None:
        tl.store(map_row(map_ptr, row, E) + expert, chosen, mask=inside)
    if indices_ptr is not None:
        slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices_ptr + row * K + slot, expert, mask=chosen)
    if bits_ptr is not None:
        BYTES: tl.constexpr = (E + 7) // 8
        if NUM_GROUPS > 1 and GROUP * NUM_GROUPS != E:  # columns are not ids: go by the map
            tl.debug_barrier()
            col = tl.arange(0, NATURAL)
            chosen = tl.load(map_ptr + row * E + col, mask=col < E, other=0) != 0
        byte = tl.arange(0, chosen.shape[0] // 8)
        tl.store(bits_ptr + row * BYTES + byte, pack_bits(chosen), mask=byte < BYTES)


@triton.jit(do_not_specialize_on_alignment=["map_ptr"])
def _backward_kernel(
    grad_ptr, logits_ptr, map_ptr, out_ptr, row_stride, scale,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr,
    BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64)
    inside = col < E
    if BITS:
        byte = tl.load(map_ptr + row * ((E + 7) // 8) + col // 8, mask=inside, other=0)
        chosen = ((byte.to(tl.int32) >> (col % 8)) & 1) != 0
    else:
        chosen = tl.load(map_row(map_ptr, row, E) + col, mask=inside, other=0) != 0
    chosen = chosen & inside  # again, so that the padding folds away at compile time
    g = tl.load(grad_ptr + row * E + col, mask=chosen, other=0.0).to(tl.float32)
    g = tl.where(chosen, g * scale, 0.0)
    needed = inside if PRE and SCORE == "softmax" else chosen
    x = tl.load(logits_ptr + row * row_stride + col, mask=needed, other=float("-inf"))
    x = tl.where(needed, x.to(tl.float32), float("-inf"))
    if SCORE == "softmax":
        p = tl.where(needed, tl.exp(x - tl.max(x, 0)), 0.0)
        p *= 1.0 / tl.sum(p, 0)
        dx = p * (g - tl.sum(g * p, 0))
    else:
        s = tl.where(chosen, pointwise_score(x, SCORE), 0.0)
        if K > 1:
            inverse = 1.0 / (tl.sum(s, 0) + 1e-20)
            g = (g - tl.sum(g * s, 0) * inverse) * inverse
        dx = tl.where(chosen, g * pointwise_slope(x, s, SCORE), 0.0)
    tl.store(out_ptr + row * E + col, dx, mask=inside)


_forwards, _backwards = Launches(), Launches()


def _columns(num_experts: int, num_groups: int) -> tuple[int, int]:
    """Powers of two that hold the groups and the members of one, eight columns at least."""
    groups = triton.next_power_of_2(num_groups)
    return groups, max(triton.next_power_of_2(num_experts // num_groups), 8 // groups)


def router_dense(
    logits: torch.Tensor,
    spec: DenseSpec,
    bias: torch.Tensor | None = None,
    *,
    want_map: bool = True,
    want_bits: bool = False,
    indices: torch.Tensor | None = None,
) -> DenseRouting:
    """Probabilities of every expert, zero where not chosen.

    Args:
        logits: [num_tokens, num_experts] fp32, bf16 or fp16; rows may be strided.
        spec: how to score and select.
        bias: [num_experts], steers the selection only.
        want_map, want_bits: which forms of the map to write.
        indices: [num_tokens, top_k] integers to fill with the chosen ids, rising.
    """
    num_tokens, num_experts = logits.shape
    device = logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    groups, group = _columns(num_experts, spec.num_groups)
    shifted = spec.num_groups > 1 and group * spec.num_groups != num_experts
    probs = torch.empty((num_tokens, num_experts), dtype=logits.dtype, device=device)
    routing_map = bits = None
    if want_map or (want_bits and shifted):
        routing_map = torch.empty((num_tokens, num_experts), dtype=torch.bool, device=device)
    if want_bits:
        size = (num_tokens, triton.cdiv(num_experts, 8))
        bits = torch.empty(size, dtype=torch.uint8, device=device)
    if num_tokens:
        key = (
            logits.shape, logits.stride(0), logits.dtype, device, spec, want_map, want_bits,
            None if bias is None else bias.dtype, None if indices is None else indices.dtype,
        )  # fmt: skip
        launch = _forwards.get(key)
        if launch is None:
            constants = dict(
                E=num_experts, K=spec.top_k, SCORE=spec.score, PRE=spec.pre_softmax,
                NUM_GROUPS=spec.num_groups, TOP_GROUPS=spec.top_groups, CANDIDATES=spec.candidates,
                GROUPS=groups, GROUP=group, NATURAL=max(8, triton.next_power_of_2(num_experts)),
                num_warps=warps_of_row(groups * group),
            )  # fmt: skip
            numbers = (logits.stride(0), spec.scale)
            launch = Launch(_forward_kernel, device, (num_tokens,), numbers, constants)
            _forwards.add(key, launch)
        launch(logits, bias, probs, routing_map, bits, indices)
    return DenseRouting(probs, routing_map if want_map else None, bits)


def router_dense_backward(
    grad: torch.Tensor, logits: torch.Tensor, routing_map: torch.Tensor, spec: DenseSpec
) -> torch.Tensor:
    """Gradient of the logits, in their dtype, from that of the probabilities [T, E].

    ``routing_map`` is the bool map or the uint8 bits of the forward pass.
    """
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty((num_tokens, num_experts), dtype=logits.dtype, device=logits.device)
    if num_tokens:
        grad = grad.contiguous()
        key = (logits.shape, logits.stride(0), logits.dtype, logits.device, spec, grad.dtype,
               routing_map.dtype)  # fmt: skip
        launch = _backwards.get(key)
        if launch is None:
            width = triton.next_power_of_2(num_experts)
            constants = dict(
                E=num_experts, K=spec.top_k, SCORE=spec.score, PRE=spec.pre_softmax,
                BITS=routing_map.dtype is torch.uint8, WIDTH=width, num_warps=warps_of_row(width),
            )  # fmt: skip
            numbers = (logits.stride(0), spec.scale)
            launch = Launch(_backward_kernel, logits.device, (num_tokens,), numbers, constants)
            _backwards.add(key, launch)
        launch(grad, logits, routing_map, out)
    return out
