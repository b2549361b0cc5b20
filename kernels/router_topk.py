# SPDX-License-Identifier: Apache-2.0
"""Top-k routing for serving: ids, weights and the per-expert histogram in one launch.

    score = softmax | sigmoid | sqrt(softplus) of the logits          fp32
    key   = score + bias                                              steers the selection only
    group = sum of its best `group_candidates` keys; the best `top_groups` groups stay
    ids   = the k largest keys, falling; ties go to the lowest id; NaN counts as -inf
    w     = score[ids] / (sum + 1e-20 if renormalised) * scale

Shapes: logits [T, E] (rows may be strided), bias [E]; ids, weights [T, k]; counts [E].
Grid: persistent, one warp a program and ROWS tokens at a time, so that no reduction leaves the
warp. Experts stand at column group * GROUP + member of the tile (GROUP a power of two), hence
column order is id order. The chosen experts' logits are read again (from L1) for the weights: that
is cheaper than carrying scores through k reductions.

The histogram of one block is stored outright; more blocks add into a zeroed line, and the last one
moves the sums out and leaves zeros behind. With a caller's ``counts`` the blocks add into those.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch_counter import sm_count, zeroed_line
from .router_math import EXCLUDED, TAKEN, keep_best_groups, pointwise_score, sortable

_PROGRAMS_PER_SM = 16
_CPU_PROGRAMS = 4  # in the interpreter: few, but enough to meet every branch


class RouterOutput(NamedTuple):
    topk_ids: torch.Tensor  # [num_tokens, top_k] int32, by falling key
    topk_weights: torch.Tensor  # [num_tokens, top_k] fp32
    counts: torch.Tensor  # [num_experts] int32


@triton.jit
def _take_max(keys, ids):
    """Largest key of each row, its (lowest) id, and the keys with that one taken."""
    best = tl.max(keys, 1)
    at = tl.min(tl.where(keys == best[:, None], ids, 0x7FFFFFFF), 1)
    return best, at, tl.where(ids == at[:, None], TAKEN, keys)


@triton.jit
def _router_topk_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, line_ptr,
    num_tokens, num_experts, num_groups, row_stride, scale,
    SCORE: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, COUNTS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, TOP_GROUPS: tl.constexpr, CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = GROUPS * GROUP
    col = tl.arange(0, WIDTH)
    if GROUPS == 1:
        expert = col
        inside = col < num_experts
    else:
        per_group = num_experts // num_groups
        expert = (col // GROUP) * per_group + col % GROUP
        inside = (col % GROUP < per_group) & (col // GROUP < num_groups)
    bias = tl.zeros([WIDTH], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    slot = tl.arange(0, KP)[None, :]
    taken = tl.zeros([ROWS, WIDTH], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        live = row < num_tokens
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        x = tl.load(
            row_ptr[:, None] + expert[None, :],
            mask=live[:, None] & inside[None, :], other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        if SCORE == "softmax":
            peak = tl.max(x, 1)
            e = tl.exp(x - peak[:, None])
            inverse = 1.0 / tl.sum(e, 1)
            key = e * inverse[:, None]
        else:
            key = pointwise_score(x, SCORE)
        if HAS_BIAS:
            key += bias[None, :]
        keys = tl.where(inside[None, :], sortable(key), EXCLUDED)
        if GROUPS > 1:
            keys = keep_best_groups(keys, num_groups, TOP_GROUPS, CANDIDATES, GROUPS, GROUP)

        columns = tl.zeros([ROWS, KP], tl.int32)
        for j in range(K):
            _, at, keys = _take_max(keys, col[None, :])
            columns = tl.where(slot == j, at[:, None], columns)
        if COUNTS != "none":
            taken += ((keys == TAKEN) & live[:, None]).to(tl.int32)

        ids = columns
        if GROUPS > 1:
            ids = (columns // GROUP) * per_group + columns % GROUP
        wanted = live[:, None] & (slot < K)
        chosen = tl.load(row_ptr[:, None] + ids, mask=wanted, other=0.0).to(tl.float32)
        if SCORE == "softmax":
            weights = tl.exp(chosen - peak[:, None]) * inverse[:, None]
        else:
            weights = pointwise_score(chosen, SCORE)
        if RENORMALIZE:
            total = tl.sum(tl.where(slot < K, weights, 0.0), 1)
            weights = weights / (total + 1e-20)[:, None]
        out = row.to(tl.int64)[:, None] * K + slot
        tl.store(ids_ptr + out, ids, mask=wanted)
        tl.store(weights_ptr + out, weights * scale, mask=wanted)

    if COUNTS != "none":
        histogram = tl.sum(taken, 0)
        if COUNTS == "store":
            tl.store(counts_ptr + expert, histogram, mask=inside)
        if COUNTS == "add":
            tl.atomic_add(
                counts_ptr + expert, histogram, mask=inside & (histogram > 0), sem="relaxed"
            )
        if COUNTS == "last":
            some = inside & (histogram > 0)
            tl.atomic_add(line_ptr + 1 + expert, histogram, mask=some, sem="relaxed")
            tl.debug_barrier()  # the ticket below releases what every thread has added
            if tl.atomic_add(line_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                total = tl.atomic_xchg(line_ptr + 1 + expert, 0, mask=inside, sem="relaxed")
                tl.store(counts_ptr + expert, total, mask=inside)
                tl.atomic_xchg(line_ptr, 0, sem="relaxed")


def _check(logits: torch.Tensor, spec, bias, counts) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            "logits: expected a floating [num_tokens, num_experts] tensor, "
            f"found shape {tuple(logits.shape)} of {logits.dtype}"
        )
    num_experts = logits.shape[1]
    reachable = num_experts // spec.num_groups * spec.top_groups
    if num_experts % spec.num_groups:
        raise ValueError(
            f"num_groups: expected a divisor of {num_experts}, found {spec.num_groups}"
        )
    if not 1 <= spec.top_k <= reachable:
        raise ValueError(f"top_k: expected 1 to {reachable}, found {spec.top_k}")
    if bias is not None and (bias.shape != (num_experts,) or bias.device != logits.device):
        raise ValueError(
            f"bias: expected shape ({num_experts},) on {logits.device}, "
            f"found {tuple(bias.shape)} on {bias.device}"
        )
    if counts is not None and (counts.dtype is not torch.int32 or counts.shape != (num_experts,)):
        raise ValueError(
            f"counts: expected int32 of shape ({num_experts},), "
            f"found {counts.dtype} of {tuple(counts.shape)}"
        )


def _rows_per_program(num_tokens: int, width: int) -> int:
    """Several tokens a warp hide the reductions' latency once every SM has enough warps."""
    if width > 512 or num_tokens <= 132 * 8:
        return 1
    return 2 if num_tokens <= 132 * 32 or width == 512 else 4


def router_topk(
    logits: torch.Tensor, spec, bias: torch.Tensor | None = None, counts: torch.Tensor | None = None
) -> RouterOutput:
    """Experts of every token.

    Args:
        logits: [num_tokens, num_experts] of any float dtype; rows may be strided.
        spec: ``types.RouterSpec`` or anything with its fields.
        bias: [num_experts], steers the selection and never enters a weight.
        counts: [num_experts] int32 to add this call's histogram to; a new tensor without it.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check(logits, spec, bias, counts)
    num_tokens, num_experts = logits.shape
    device, top_k = logits.device, spec.top_k
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    mode = "store" if counts is None else "add"
    if counts is None:
        counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    if num_tokens == 0:
        return RouterOutput(ids, weights, counts.zero_() if mode == "store" else counts)
    groups = triton.next_power_of_2(spec.num_groups)
    group = triton.next_power_of_2(num_experts // spec.num_groups)
    rows = _rows_per_program(num_tokens, groups * group)
    blocks = triton.cdiv(num_tokens, rows)
    programs = min(blocks, _PROGRAMS_PER_SM * sm_count(device) if logits.is_cuda else _CPU_PROGRAMS)
    line = counts
    if mode == "store" and programs > 1:
        mode, line = "last", zeroed_line(device, num_experts + 1)
    _router_topk_kernel[(programs,)](
        logits, bias, ids, weights, counts, line,
        num_tokens, num_experts, spec.num_groups, logits.stride(0), spec.scale,
        SCORE=spec.score, HAS_BIAS=bias is not None, RENORMALIZE=spec.renormalize, COUNTS=mode,
        K=top_k, KP=triton.next_power_of_2(top_k), TOP_GROUPS=spec.top_groups,
        CANDIDATES=spec.group_candidates or max(1, top_k // spec.top_groups),
        GROUPS=groups, GROUP=group, ROWS=rows, num_warps=1 if groups * group <= 1024 else 4,
    )  # fmt: skip
    return RouterOutput(ids, weights, counts)
