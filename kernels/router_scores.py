# SPDX-License-Identifier: Apache-2.0
"""Scores of every expert for the balance loss, with the map of the top-k experts.

    s      = softmax(x) | sigmoid(x) | sqrt(softplus(x))           fp32
    scores = s, and for the last two s / (sum of all s + 1e-20) if top-k > 1
    map    = the k largest scores; ties go to the lowest id

Backward, with g the gradient of the scores and sums over all experts:

    softmax                dx = s (g - sum g s)
    others, normalised     dx = s' (g / S - sum g s / S^2)

Shapes: logits, scores [T, E]; map bool [T, E], or uint8 [T, ceil(E / 8)] with the lowest expert in
the lowest bit. Grid: one token and one warp a program.
"""

import torch
import triton
import triton.language as tl

from .launch import Launch, Launches
from .router_math import (
    EXCLUDED,
    map_row,
    pack_bits,
    pointwise_score,
    pointwise_slope,
    select_top,
    sortable,
    warps_of_row,
)


@triton.jit(do_not_specialize_on_alignment=["map_ptr"])
def _forward_kernel(
    logits_ptr, scores_ptr, map_ptr, row_stride,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64)
    inside = col < E
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if SCORE == "softmax":
        s = tl.exp(x - tl.max(x, 0))
        s *= 1.0 / tl.sum(s, 0)
        scores = s
    else:
        s = tl.where(inside, pointwise_score(x, SCORE), 0.0)
        scores = s * (1.0 / (tl.sum(s, 0) + 1e-20)) if K > 1 else s
    tl.store(scores_ptr + row * E + col, scores, mask=inside)
    chosen = select_top(tl.where(inside, sortable(s), EXCLUDED), K) & inside
    if BITS:
        BYTES: tl.constexpr = (E + 7) // 8
        byte = tl.arange(0, WIDTH // 8)
        tl.store(map_ptr + row * BYTES + byte, pack_bits(chosen), mask=byte < BYTES)
    else:
        tl.store(map_row(map_ptr, row, E) + col, chosen, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr, logits_ptr, out_ptr, row_stride,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64)
    inside = col < E
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf"))
    x = tl.where(inside, x.to(tl.float32), float("-inf"))
    g = tl.load(grad_ptr + row * E + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(inside, g, 0.0)
    if SCORE == "softmax":
        s = tl.exp(x - tl.max(x, 0))
        s *= 1.0 / tl.sum(s, 0)
        dx = s * (g - tl.sum(g * s, 0))
    else:
        s = tl.where(inside, pointwise_score(x, SCORE), 0.0)
        if K > 1:
            inverse = 1.0 / (tl.sum(s, 0) + 1e-20)
            g = (g - tl.sum(g * s, 0) * inverse) * inverse
        dx = g * pointwise_slope(x, s, SCORE)
    tl.store(out_ptr + row * E + col, dx, mask=inside)


_forwards, _backwards = Launches(), Launches()


def router_scores(
    logits: torch.Tensor, top_k: int, score: str, *, bits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores fp32 [T, E] and the map of the top-k, bool [T, E] or uint8 [T, ceil(E / 8)]."""
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    scores = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=logits.device)
    columns = triton.cdiv(num_experts, 8) if bits else num_experts
    dtype = torch.uint8 if bits else torch.bool
    routing_map = torch.empty((num_tokens, columns), dtype=dtype, device=logits.device)
    if num_tokens:
        key = (logits.shape, logits.stride(0), logits.dtype, logits.device, top_k, score, bits)
        launch = _forwards.get(key)
        if launch is None:
            width = max(8, triton.next_power_of_2(num_experts))
            constants = dict(
                E=num_experts, K=top_k, SCORE=score, BITS=bits, WIDTH=width,
                num_warps=warps_of_row(width),
            )  # fmt: skip
            numbers = (logits.stride(0),)
            launch = Launch(_forward_kernel, logits.device, (num_tokens,), numbers, constants)
            _forwards.add(key, launch)
        launch(logits, scores, routing_map)
    return scores, routing_map


def router_scores_backward(
    grad: torch.Tensor, logits: torch.Tensor, top_k: int, score: str
) -> torch.Tensor:
    """Gradient of the logits, in their dtype, from that of the scores [T, E]."""
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty((num_tokens, num_experts), dtype=logits.dtype, device=logits.device)
    if num_tokens:
        grad = grad.contiguous()
        key = (logits.shape, logits.stride(0), logits.dtype, logits.device, top_k, score,
               grad.dtype)  # fmt: skip
        launch = _backwards.get(key)
        if launch is None:
            width = max(8, triton.next_power_of_2(num_experts))
            constants = dict(
                E=num_experts, K=top_k, SCORE=score, WIDTH=width, num_warps=warps_of_row(width)
            )
            numbers = (logits.stride(0),)
            launch = Launch(_backward_kernel, logits.device, (num_tokens,), numbers, constants)
            _backwards.add(key, launch)
        launch(grad, logits, out)
    return out
