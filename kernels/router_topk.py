# SPDX-License-Identifier: Apache-2.0
"""Top-k routing for serving: ids, weights and the per-expert histogram in one launch.

    score = softmax | sigmoid | sqrt(softplus) of the logits          fp32
    key   = score + bias                                              steers the selection only
    group = sum of its best `group_candidates` keys; the best `top_groups` groups stay
    ids   = the k largest keys, falling; ties go to the lowest id; NaN counts as -inf
    w     = score[ids] / (sum + 1e-20 if renormalised) * scale

Shapes: logits [T, E] (rows may be strided), bias [E]; ids, weights [T, k]; counts [E].
Grid: one token and one warp a program, so that no reduction leaves the warp. Experts stand at
column group * GROUP + member of the row (GROUP a power of two), hence column order is id order.
The k ids are found by k maximum reductions of integers, which the hardware does in one instruction
a warp. A step that takes out every key equal to the maximum need not wait for the column of that
maximum, so the next one can begin; if more than one key was taken at once the row has ties among
its best and is done again, one column a step. The chosen logits are read again, from L1, for the
weights: cheaper than carrying scores along.

Histogram: every program adds its ids to a line of zeros and leaves. The last program, which is
dispatched last, reads the line until all have arrived (the sums add up to T k, so each is final and
nothing has to be fenced), moves the sums out and leaves zeros. It waits for programs that wait for
nothing. An L2 line takes an atomic every other clock, so many tokens spread theirs over copies of
the sums. With a caller's ``counts`` the programs add into those.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Launches
from .launch_counter import overlaps, zeroed_line
from .router_math import (
    EXCLUDED,
    TAKEN,
    columns,
    keep_best_groups,
    pointwise_score,
    sortable,
)

_CROWD = 128  # tokens from which on the histogram's sums are spread
_COPIES = 8
_UNROLLED = 16  # steps of the choice at most, beyond which they are a loop


class RouterOutput(NamedTuple):
    topk_ids: torch.Tensor  # [num_tokens, top_k] int32, by falling key
    topk_weights: torch.Tensor  # [num_tokens, top_k] fp32
    counts: torch.Tensor | None  # [num_experts] int32


@triton.jit
def _take_steps(keys, K: tl.constexpr, KP: tl.constexpr):
    """Columns of the K largest keys, falling; ties to the lowest column, one a step."""
    col = tl.arange(0, keys.shape[0])
    slot = tl.arange(0, KP)
    found = tl.zeros([KP], tl.int32)
    for j in range(K):
        best = tl.max(keys, 0)
        at = tl.min(tl.where(keys == best, col, 0x7FFFFFFF), 0)
        keys = tl.where(col == at, TAKEN, keys)
        found = tl.where(slot == j, at, found)
    return found


@triton.jit
def _take_largest(keys, K: tl.constexpr, KP: tl.constexpr):
    """Columns of the K largest keys, falling; a step is one maximum where no two keys are alike."""
    col = tl.arange(0, keys.shape[0])
    slot = tl.arange(0, KP)
    found = tl.zeros([KP], tl.int32)
    rest = keys
    best = tl.max(rest, 0)
    for j in tl.static_range(K):
        alike = rest == best
        found = tl.where(slot == j, tl.min(tl.where(alike, col, 0x7FFFFFFF), 0), found)
        rest = tl.where(alike, TAKEN, rest)
        if j + 1 < K:
            best = tl.max(rest, 0)
    taken = tl.sum((rest == TAKEN).to(tl.int32), 0)
    if (taken != K) | (best == TAKEN):
        found = _take_steps(keys, K, KP)
    return found


@triton.jit
def _add_histogram(
    ids, wanted, counts_ptr, line_ptr, row, num_tokens,
    E: tl.constexpr, K: tl.constexpr, COUNTS: tl.constexpr, COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds one token's ids to the histogram; ``COUNTS`` says how it is put together."""
    expert = tl.arange(0, WIDTH)
    if COUNTS == "one":
        tl.store(counts_ptr + expert, tl.zeros([WIDTH], tl.int32), mask=expert < E)
        tl.debug_barrier()
        tl.store(counts_ptr + ids, tl.full(ids.shape, 1, tl.int32), mask=wanted)
    if COUNTS == "add":
        tl.atomic_add(counts_ptr + ids, 1, mask=wanted, sem="relaxed")
    if COUNTS == "last":
        copy = (row % COPIES).to(tl.int32)
        tl.atomic_add(line_ptr + copy * WIDTH + ids, 1, mask=wanted, sem="relaxed")
        if row == num_tokens - 1:
            sums = tl.zeros([WIDTH], tl.int32)
            arrived = 0
            while arrived < num_tokens * K:
                sums = tl.zeros([WIDTH], tl.int32)
                for c in tl.static_range(COPIES):
                    sums += tl.load(line_ptr + c * WIDTH + expert, volatile=True)
                arrived = tl.sum(sums, 0)
            tl.store(counts_ptr + expert, sums, mask=expert < E)
            for c in tl.static_range(COPIES):
                tl.store(line_ptr + c * WIDTH + expert, tl.zeros([WIDTH], tl.int32))


# compiled code must not differ by the number of tokens: a server compiles nothing once it is ready
@triton.jit(do_not_specialize=["num_tokens"])
def _router_topk_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, line_ptr, num_tokens, row_stride, scale,
    E: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, COUNTS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    COPIES: tl.constexpr, COUNTED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PER_GROUP: tl.constexpr = E // NUM_GROUPS
    expert, inside = columns(E, NUM_GROUPS, GROUPS, GROUP)
    slot = tl.arange(0, KP)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(row_ptr + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax":
        peak = tl.max(x, 0)
        e = tl.exp(x - peak)
        inverse = 1.0 / tl.sum(e, 0)
        key = e * inverse
    else:
        key = pointwise_score(x, SCORE)
    if bias_ptr is not None:
        key += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, sortable(key), EXCLUDED)
    if NUM_GROUPS > 1:
        keys = keep_best_groups(keys, NUM_GROUPS, TOP_GROUPS, CANDIDATES, GROUPS, GROUP)

    ids = _take_largest(keys, K, KP) if FAST else _take_steps(keys, K, KP)
    ids = (ids // GROUP) * PER_GROUP + ids % GROUP
    x = tl.load(row_ptr + ids, mask=slot < K, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - peak) * inverse if SCORE == "softmax" else pointwise_score(x, SCORE)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(slot < K, weights, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + row * K + slot, ids, mask=slot < K)
    tl.store(weights_ptr + row * K + slot, weights * scale, mask=slot < K)
    if COUNTS != "none":
        _add_histogram(
            ids, slot < K, counts_ptr, line_ptr, row, num_tokens, E, K, COUNTS, COPIES, COUNTED
        )


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


_launches = Launches()


def _launch(logits: torch.Tensor, spec, mode: str, copies: int, counted: int) -> Launch:
    num_tokens, num_experts = logits.shape
    groups = triton.next_power_of_2(spec.num_groups)
    group = triton.next_power_of_2(num_experts // spec.num_groups)
    pdl = overlaps(logits.device, num_tokens)
    constants = dict(
        E=num_experts, SCORE=spec.score, RENORMALIZE=spec.renormalize, COUNTS=mode,
        K=spec.top_k, KP=triton.next_power_of_2(spec.top_k),
        NUM_GROUPS=spec.num_groups, TOP_GROUPS=spec.top_groups,
        CANDIDATES=spec.group_candidates or max(1, spec.top_k // spec.top_groups),
        GROUPS=groups, GROUP=group, COPIES=copies, COUNTED=counted,
        FAST=spec.top_k <= _UNROLLED and groups * group <= 1024,
        PDL=pdl, launch_pdl=pdl, num_warps=1 if groups * group <= 4096 else 8,
    )  # fmt: skip
    numbers = (num_tokens, logits.stride(0), spec.scale)
    return Launch(_router_topk_kernel, logits.device, (num_tokens,), numbers, constants)


def router_topk(
    logits: torch.Tensor,
    spec,
    bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    want_counts: bool = True,
) -> RouterOutput:
    """Experts of every token.

    Args:
        logits: [num_tokens, num_experts] of any float dtype; rows may be strided.
        spec: ``types.RouterSpec`` or anything with its fields.
        bias: [num_experts], steers the selection and never enters a weight.
        counts: [num_experts] int32 to add this call's histogram to; a new tensor without it.
        want_counts: False leaves the histogram out, and ``counts`` None.

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
    mode, line = "none", None
    if counts is not None:
        mode = "add"
    elif want_counts:
        mode = "last" if num_tokens > 1 else "one"
        make = torch.empty if num_tokens else torch.zeros
        counts = make(num_experts, dtype=torch.int32, device=device)
    if num_tokens == 0:
        return RouterOutput(ids, weights, counts)
    counted = max(32, triton.next_power_of_2(num_experts))
    copies = _COPIES if mode == "last" and num_tokens > _CROWD else 1
    if mode == "last":
        line = zeroed_line(device, copies * counted)
    key = (
        logits.shape, logits.stride(0), logits.dtype, device, spec, mode,
        None if bias is None else bias.dtype,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.add(key, _launch(logits, spec, mode, copies, counted))
    launch(logits, bias, ids, weights, counts, line)
    return RouterOutput(ids, weights, counts)
