# SPDX-License-Identifier: Apache-2.0
"""Weighted sum of the expert rows of every token, in slot order, in fp32.

    out[t, c] = bf16( sum over slots of weight[t, slot] * rows[route_row[t, slot], c]
                      (+ shared[t, c]) )

Absent routes (row -1) contribute nothing, whatever ``rows`` holds. ``rows`` may be a slab of
columns; ``first_column`` says which of ``out`` it stands for. Grid: (token, chunk of columns).
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _reduce_kernel(
    rows_ptr, route_row_ptr, weight_ptr, shared_ptr, out_ptr, width, hidden, first_column,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(route_row_ptr + token * TOP_K + slot).to(tl.int64)
        weight = tl.load(weight_ptr + token * TOP_K + slot)
        y = tl.load(rows_ptr + row * width + col, mask=inside & (row >= 0), other=0.0)
        acc += tl.where(row >= 0, weight, 0.0) * y.to(tl.float32)
    at = token * hidden + first_column + col
    if SHARED:
        acc += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def unpermute_reduce(
    rows: torch.Tensor, route_row: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
    *, first_column: int = 0, shared: torch.Tensor | None = None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Write columns ``first_column ...`` of ``out`` [num_tokens, hidden] from ``rows``.

    ``rows`` is [num_rows, width].

    Args:
        route_row, weights: [num_tokens, top_k] int32 (-1 absent) and fp32.
        shared: [num_tokens, hidden], added last.
    """
    num_tokens, top_k = route_row.shape
    width, hidden = rows.shape[1], out.shape[1]
    if first_column + width > hidden:
        raise ValueError(
            f"rows: columns {first_column} to {first_column + width} do not fit "
            f"{hidden} columns of out"
        )
    if num_tokens:
        block = min(1024, triton.next_power_of_2(width))
        _reduce_kernel[(num_tokens, triton.cdiv(width, block))](
            rows, route_row, weights, shared, out, width, hidden, first_column,
            TOP_K=top_k, BLOCK=block, SHARED=shared is not None, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return out
