# SPDX-License-Identifier: Apache-2.0
"""Rows in expert order merged back into tokens, and the gradients of that.

    out[token]         = sum over the token's routes of weight * rows[row + pad_offsets[expert]]
    grad_rows[row ...] = weight * grad[token]
    grad_weight[token, expert] = sum over columns of grad[token] * rows[row ...]

Sums are fp32 in the order of the routes, so the same every time. A token without routes gives
zeros. ``moved`` [rows], the gradient of probabilities that travelled with the rows, is brought
back to [T, E] or [T, k] by the same launch.

Shapes: rows [capacity, H], out [T, H]. Grid: one program a token, which finds its rows once and
then reads ROUTES of them at a time, COLS columns wide, all in flight.
"""

import torch
import triton
import triton.language as tl

from .permute import slots

_ROUTES = 8


@triton.jit
def _find_routes(
    map_ptr, pads_ptr, weight_ptr, token, first, count, capacity, weight_stride,
    E: tl.constexpr, K: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    """Row, expert (slot for ids), weight and validity of ROUTES routes of a token."""
    slot = first + tl.arange(0, ROUTES)
    if K == 0:
        at = map_ptr + token * (2 * E + 1) + slot
        row = tl.load(at, mask=slot < count, other=-1)
        expert = tl.load(at + E, mask=slot < count, other=0)
        if pads_ptr is not None:
            row += tl.load(pads_ptr + expert, mask=slot < count, other=0)
    else:
        row = tl.load(map_ptr + token * K + slot, mask=slot < K, other=-1)
        expert = slot
    valid = (row >= 0) & (row < capacity)
    weight = tl.full([ROUTES], 1.0, tl.float32)
    if weight_ptr is not None:
        at = weight_ptr + token * weight_stride + expert
        weight = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    return row.to(tl.int64), expert, weight, valid


@triton.jit
def _weighted_sum(rows_ptr, row, weight, valid, col, hidden):
    at = rows_ptr + row[:, None] * hidden + col[None, :]
    rows = tl.load(at, mask=valid[:, None] & (col < hidden)[None, :], other=0).to(tl.float32)
    return tl.sum(rows * weight[:, None], 0)


@triton.jit
def _fill_probs(ptr, row, values, expert, valid, width, WIDTH: tl.constexpr, FIRST):
    """One row of [T, width]: zeros, then the values at their experts."""
    if FIRST:
        at = tl.arange(0, WIDTH)
        zero = tl.zeros([WIDTH], ptr.dtype.element_ty)
        tl.store(ptr + row * width + at, zero, mask=at < width)
        tl.debug_barrier()
    tl.store(ptr + row * width + expert, values.to(ptr.dtype.element_ty), mask=valid)


@triton.jit
def _unpermute_kernel(
    rows_ptr, weight_ptr, moved_ptr, out_ptr, probs_ptr, map_ptr, pads_ptr,
    capacity, hidden, weight_stride, num_probs,
    E: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    count = K
    if K == 0:
        count = tl.load(map_ptr + token * (2 * E + 1) + 2 * E)
    row, expert, weight, valid = _find_routes(
        map_ptr, pads_ptr, weight_ptr, token, 0, count, capacity, weight_stride, E, K, ROUTES
    )
    for start in range(0, hidden, COLS):
        col = start + tl.arange(0, COLS)
        total = _weighted_sum(rows_ptr, row, weight, valid, col, hidden)
        for first in range(ROUTES, count, ROUTES):  # tokens of more routes than one step takes
            more, _, by, there = _find_routes(
                map_ptr, pads_ptr, weight_ptr, token, first, count, capacity, weight_stride,
                E, K, ROUTES,
            )  # fmt: skip
            total += _weighted_sum(rows_ptr, more, by, there, col, hidden)
        tl.store(out_ptr + token * hidden + col, total, mask=col < hidden)
    if moved_ptr is not None:
        moved = tl.load(moved_ptr + row, mask=valid, other=0.0)
        _fill_probs(probs_ptr, token, moved, expert, valid, num_probs, WIDTH, True)
        for first in range(ROUTES, count, ROUTES):
            more, whose, _, there = _find_routes(
                map_ptr, pads_ptr, None, token, first, count, capacity, 0, E, K, ROUTES
            )
            values = tl.load(moved_ptr + more, mask=there, other=0.0)
            _fill_probs(probs_ptr, token, values, whose, there, num_probs, WIDTH, False)


@triton.jit
def _backward_kernel(
    grad_ptr, rows_ptr, weight_ptr, grad_rows_ptr, grad_weight_ptr, map_ptr, pads_ptr,
    capacity, hidden, weight_stride, num_probs,
    E: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    count = K
    if K == 0:
        count = tl.load(map_ptr + token * (2 * E + 1) + 2 * E)
    for first in range(0, tl.maximum(count, 1), ROUTES):
        row, expert, weight, valid = _find_routes(
            map_ptr, pads_ptr, weight_ptr, token, first, count, capacity, weight_stride,
            E, K, ROUTES,
        )  # fmt: skip
        dots = tl.zeros([ROUTES, COLS], tl.float32)
        for start in range(0, hidden, COLS):
            col = start + tl.arange(0, COLS)[None, :]
            grad = tl.load(grad_ptr + token * hidden + col, mask=col < hidden, other=0)
            grad = grad.to(tl.float32)
            inside = valid[:, None] & (col < hidden)
            place = row[:, None] * hidden + col
            dots += grad * tl.load(rows_ptr + place, mask=inside, other=0).to(tl.float32)
            scaled = grad * weight[:, None]
            tl.store(grad_rows_ptr + place, scaled.to(grad_rows_ptr.dtype.element_ty), mask=inside)
        sums = tl.sum(dots, 1)
        _fill_probs(grad_weight_ptr, token, sums, expert, valid, num_probs, WIDTH, first == 0)


def _weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight if weight is None or weight.stride(1) == 1 else weight.contiguous()


def unpermute(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    num_experts: int,
    *,
    weight: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
    moved: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [T, H] from rows [capacity, H], and ``moved`` [capacity] back at [T, E] or [T, k].

    Args:
        row_map: of row_map_of_mask or row_map_of_ids.
        weight: [T, E] (mask) or [T, k] (ids); without it the rows are added as they are.
        pad_offsets: [num_experts + 1] where the experts start aligned.
    """
    num_tokens, (capacity, hidden) = row_map.shape[0], rows.shape
    rows = rows.contiguous()
    weight, k = _weight(weight), slots(row_map, num_experts)
    out = torch.empty((num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    width = k or num_experts
    probs = None
    if moved is not None:
        moved = moved.contiguous()
        probs = torch.empty((num_tokens, width), dtype=moved.dtype, device=rows.device)
    if num_tokens:
        cols = min(2048 // rows.itemsize, triton.next_power_of_2(max(1, hidden)))
        _unpermute_kernel[(num_tokens,)](
            rows, weight, moved, out, probs, row_map, pad_offsets,
            capacity, hidden, 0 if weight is None else weight.stride(0), width,
            E=num_experts, K=k, WIDTH=triton.next_power_of_2(width), ROUTES=_ROUTES, COLS=cols,
            num_warps=4,
        )  # fmt: skip
    return out, probs


def unpermute_backward(
    grad: torch.Tensor,
    rows: torch.Tensor,
    row_map: torch.Tensor,
    num_experts: int,
    weight: torch.Tensor,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows [capacity, H], zero where no route leads, and of weight."""
    capacity, hidden = rows.shape
    grad, rows, weight = grad.contiguous(), rows.contiguous(), _weight(weight)
    grad_rows = torch.zeros_like(rows)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    num_tokens, k = row_map.shape[0], slots(row_map, num_experts)
    if num_tokens:
        width = k or num_experts
        _backward_kernel[(num_tokens,)](
            grad, rows, weight, grad_rows, grad_weight, row_map, pad_offsets,
            capacity, hidden, weight.stride(0), width,
            E=num_experts, K=k, WIDTH=triton.next_power_of_2(width), ROUTES=_ROUTES,
            COLS=min(2048 // rows.itemsize, triton.next_power_of_2(max(1, hidden))), num_warps=4,
        )  # fmt: skip
    return grad_rows, grad_weight
