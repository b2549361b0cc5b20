# SPDX-License-Identifier: Apache-2.0
"""Tokens' rows, copied to the rows of their routes, in the order of row_map.

    out[row + pad_offsets[expert]] = x[token]  for each route
    out_probs[row ...]             = probs[token, expert]
    out_scale[row ...]             = scale[token]                  FP8: one per 128 columns
    every other row                = 0

Shapes: x [T, H], out [capacity, H]. Grid: first some programs that share the rows without a
route, then one program a token, which assigns the token's rows where that is still to be done,
reads its row once, whatever top-k is, learns the rows of ROUTES routes together and stores one
whole row after the other. FP8 rows travel as bytes. Where more rows are routed than fit, nothing
is written out of bounds and every row becomes NaN: the host, which is not waited for, cannot raise.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch_counter import overlaps, sm_count
from .row_map import Pending, assign_rows

_COLS = 8192  # of a row in registers at a time
_ROUTES = 8  # whose rows are known before the first is stored
_CACHE = ""  # of the stores of rows


class Permuted(NamedTuple):
    out: torch.Tensor  # [capacity, hidden]
    scale: torch.Tensor | None  # [capacity, groups] fp32
    probs: torch.Tensor | None  # [capacity]


@triton.jit
def _zero_rows(
    out_ptr, scale_ptr, probs_ptr, offsets_ptr, pads_ptr, capacity, hidden, groups, NUM_PADS,
    E: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows between an expert's last and the next one's first, and those after the last expert."""
    expert = tl.arange(0, WIDTH)
    col = tl.arange(0, COLS)
    pads_end = tl.where(expert < E - 1, 0, 0x7FFFFFFF)
    if pads_ptr is not None:
        pads_end = tl.load(pads_ptr + 1 + expert, mask=expert < E - 1, other=0x7FFFFFFF)
    spare = capacity - tl.load(offsets_ptr + E)
    for pad in range(tl.program_id(0), spare, NUM_PADS):
        owner = tl.sum((pads_end <= pad).to(tl.int32), 0)
        row = (tl.load(offsets_ptr + 1 + owner) + pad).to(tl.int64)
        for first in range(0, hidden, COLS):
            at = first + col
            zero = tl.zeros([COLS], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * hidden + at, zero, mask=at < hidden)
        if probs_ptr is not None:
            tl.store(probs_ptr + row, tl.zeros([], probs_ptr.dtype.element_ty))
        if scale_ptr is not None:
            group = tl.arange(0, GROUPS)
            zero = tl.zeros([GROUPS], tl.float32)
            tl.store(scale_ptr + row * groups + group, zero, mask=group < groups)


@triton.jit
def _permute_kernel(
    x_ptr, scale_in_ptr, probs_in_ptr, out_ptr, scale_ptr, probs_ptr,
    map_ptr, words_ptr, before_ptr, offsets_ptr, pads_ptr,
    capacity, hidden, groups, row_stride, probs_stride, NUM_PADS,
    E: tl.constexpr, K: tl.constexpr, NAN: tl.constexpr,
    WIDTH: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr, ROUTES: tl.constexpr,
    CACHE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        if TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) < NUM_PADS:
        if offsets_ptr is not None:
            _zero_rows(
                out_ptr, scale_ptr, probs_ptr, offsets_ptr, pads_ptr, capacity, hidden, groups,
                NUM_PADS, E, WIDTH, COLS, GROUPS,
            )  # fmt: skip
    else:
        token = (tl.program_id(0) - NUM_PADS).to(tl.int64)
        row_map = map_ptr + token * (K if K > 0 else 2 * E + 1)
        count = K
        if words_ptr is not None:
            count = assign_rows(map_ptr, words_ptr, before_ptr, offsets_ptr, token, E, WIDTH)
        elif K == 0:
            count = tl.load(row_map + 2 * E)
        needed = 0
        if offsets_ptr is not None:
            needed = tl.load(offsets_ptr + E)
            if pads_ptr is not None:
                needed += tl.load(pads_ptr + E)
        for start in range(0, hidden, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(x_ptr + token * row_stride + col, mask=col < hidden, other=0)
            if needed > capacity:
                x = tl.full([COLS], NAN, x.dtype)
            for first in range(0, count, ROUTES):
                slot = first + tl.arange(0, ROUTES)
                row = tl.load(row_map + slot, mask=slot < count, other=-1)
                expert = slot
                if K == 0:
                    expert = tl.load(row_map + E + slot, mask=slot < count, other=0)
                    if pads_ptr is not None:
                        row += tl.load(pads_ptr + expert, mask=slot < count, other=0)
                valid = (row >= 0) & (row < capacity)
                row = row.to(tl.int64)
                at = out_ptr + row[:, None] * hidden + col[None, :]
                rows = tl.broadcast_to(x[None, :], [ROUTES, COLS])
                inside = valid[:, None] & (col < hidden)[None, :]
                tl.store(at, rows, mask=inside, cache_modifier=CACHE)
                if probs_ptr is not None and start == 0:
                    prob_ptr = probs_in_ptr + token * probs_stride + expert
                    prob = tl.load(prob_ptr, mask=valid, other=0.0)
                    tl.store(probs_ptr + row, prob, mask=valid)
                if scale_ptr is not None and start == 0:
                    group = tl.arange(0, GROUPS)
                    scale = tl.load(scale_in_ptr + token * groups + group, mask=group < groups)
                    out_scale = scale_ptr + row[:, None] * groups + group[None, :]
                    scales = tl.broadcast_to(scale[None, :], [ROUTES, GROUPS])
                    tl.store(out_scale, scales, mask=valid[:, None] & (group < groups)[None, :])


def slots(row_map: torch.Tensor, num_experts: int) -> int:
    """Routes a token of an ids map; 0 for a map of a mask, whose rows say it themselves."""
    return 0 if row_map.shape[1] == 2 * num_experts + 1 else row_map.shape[1]


def permute(
    x: torch.Tensor,
    row_map: torch.Tensor | Pending,
    num_experts: int,
    capacity: int,
    *,
    offsets: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
) -> Permuted:
    """Rows of x [T, H] in expert order; rows without a route are zero.

    Args:
        row_map, offsets: of row_map.py; a Pending map gets its rows on the way. Without offsets
            the kernel cannot tell which rows have no route, and the result is zeroed beforehand.
        capacity: rows of the result.
        pad_offsets: [num_experts + 1], to start every expert at its aligned row.
        scale: [T, groups] fp32 that travel with FP8 rows.
        probs: [T, num_experts] (mask) or [T, k] (ids) to travel with the rows.
    """
    num_tokens, hidden = x.shape
    device = x.device
    words = before = None
    if isinstance(row_map, Pending):
        row_map, words, before = row_map
    if x.stride(1) != 1:
        x = x.contiguous()
    if probs is not None and probs.stride(1) != 1:
        probs = probs.contiguous()
    make = torch.zeros if offsets is None else torch.empty
    out = make((capacity, hidden), dtype=x.dtype, device=device)
    groups = 0 if scale is None else scale.shape[1]
    out_scale = (
        None if scale is None else make((capacity, groups), dtype=scale.dtype, device=device)
    )
    out_probs = None if probs is None else make(capacity, dtype=probs.dtype, device=device)
    pads = 0 if offsets is None else min(capacity, 8 * sm_count(device))
    if num_tokens + pads and hidden:
        raw = x.dtype.itemsize == 1
        cols = min(_COLS, triton.next_power_of_2(hidden))
        small = overlaps(device, num_tokens + pads)
        pdl = small or (words is not None and device.type == "cuda")  # the map ends early
        _permute_kernel[(num_tokens + pads,)](
            x.view(torch.uint8) if raw else x, scale if scale is None else scale.contiguous(),
            probs, out.view(torch.uint8) if raw else out, out_scale, out_probs, row_map,
            words, before, offsets, pad_offsets, capacity, hidden, groups,
            x.stride(0), 0 if probs is None else probs.stride(0), pads,
            E=num_experts, K=slots(row_map, num_experts), NAN=0x7F if raw else float("nan"),
            WIDTH=triton.next_power_of_2(num_experts), COLS=cols,
            GROUPS=triton.next_power_of_2(max(1, groups)),
            ROUTES=_ROUTES, CACHE=_CACHE, PDL=pdl, TRIGGER=small, launch_pdl=pdl,
            num_warps=8 if cols * x.itemsize >= 8192 else 4,
        )  # fmt: skip
    return Permuted(out, out_scale, out_probs)
