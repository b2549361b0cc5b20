# SPDX-License-Identifier: Apache-2.0
"""Adds a batch to the balance counters of a layer in one launch.

    tokens[e] += number of ids equal to e                                      int64, exact
    scores[e] += sum over rows of the normalised score of e (see router_scores)   float64

Shapes: ids [T, k]; logits [T, E] (rows may be strided); padding bool [T]; tokens, scores [E].
Ids out of range, like -1, and rows that are padding count nowhere; a row with a NaN among its
logits has no scores. Grid: a few blocks an SM stride over the rows, score sums in registers, one
atomic addition an expert and block at the end (so their last bits depend on the order).
"""

import torch
import triton
import triton.language as tl

from .launch_counter import sm_count
from .router_math import pointwise_score, warps_of_row


@triton.jit
def _balance_sums_kernel(
    ids_ptr, logits_ptr, padding_ptr, tokens_ptr, scores_ptr, num_tokens, row_stride,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, KP)
    col = tl.arange(0, WIDTH)
    inside = col < E
    sums = tl.zeros([WIDTH], tl.float32)
    for block in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.full([1], 0, tl.int64) + block
        wanted = slot < K
        if padding_ptr is not None:
            wanted = wanted & (tl.load(padding_ptr + row) == 0)
        ids = tl.load(ids_ptr + row * K + slot, mask=wanted, other=-1)
        one = tl.full([KP], 1, tl.int64)
        tl.atomic_add(tokens_ptr + ids, one, mask=(ids >= 0) & (ids < E), sem="relaxed")
        if logits_ptr is not None:
            x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf"))
            x = x.to(tl.float32)
            if SCORE == "softmax":
                s = tl.exp(x - tl.max(x, 0))
                s = s * (1.0 / tl.sum(s, 0))
            else:
                s = tl.where(inside, pointwise_score(x, SCORE), 0.0)
                if K > 1:
                    s = s * (1.0 / (tl.sum(s, 0) + 1e-20))
            if padding_ptr is not None:
                s = tl.where(tl.load(padding_ptr + row) == 0, s, 0.0)
            sums += tl.where(s == s, s, 0.0)
    if logits_ptr is not None:
        tl.atomic_add(scores_ptr + col, sums.to(tl.float64), mask=inside, sem="relaxed")


def balance_sums(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor | None,
    padding: torch.Tensor | None,
    score: str,
) -> None:
    """Changes ``tokens`` int64 [E] and ``scores`` float64 [E]; no host sync, capturable."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return
    if logits is not None and logits.stride(1) != 1:
        logits = logits.contiguous()
    num_experts = tokens.numel()
    width = max(8, triton.next_power_of_2(num_experts))
    _balance_sums_kernel[(min(num_tokens, 4 * sm_count(tokens.device)),)](
        ids.contiguous(), logits, padding, tokens, scores, num_tokens,
        0 if logits is None else logits.stride(0),
        E=num_experts, K=top_k, KP=triton.next_power_of_2(top_k), SCORE=score, WIDTH=width,
        num_warps=warps_of_row(width),
    )  # fmt: skip
