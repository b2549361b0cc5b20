# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows in another order: out = [inp's chunk order[0], chunk order[1], ...].

Shapes: inp, out [rows, H]; split_sizes, order [chunks]; probs [rows] travel along. One launch finds
the source of every row, a second copies; backward copies the other way with the same map. Rows
beyond the last chunk are zero either way.
Grid: (row, COLS columns).
"""

import torch
import triton
import triton.language as tl

_COMPARED = 8192  # rows times chunks that a program of the map holds


@triton.jit
def _map_kernel(
    sizes_ptr, order_ptr, source_ptr, num_rows,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.arange(0, WIDTH)
    inside = chunk < CHUNKS
    sizes = tl.load(sizes_ptr + chunk, mask=inside, other=0).to(tl.int32)
    order = tl.load(order_ptr + chunk, mask=inside, other=0).to(tl.int32)
    moved = tl.load(sizes_ptr + order, mask=inside, other=0).to(tl.int32)
    end = tl.cumsum(moved, 0)
    shift = tl.gather(tl.cumsum(sizes, 0) - sizes, order, 0) - (end - moved)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = (row[:, None] >= (end - moved)[None, :]) & (row[:, None] < end[None, :])
    source = row + tl.sum(tl.where(mine, shift[None, :], 0), 1)
    covered = tl.sum(mine.to(tl.int32), 1) > 0
    tl.store(source_ptr + row, tl.where(covered, source, -1), mask=row < num_rows)


@triton.jit
def _copy_kernel(
    inp_ptr, probs_ptr, out_ptr, out_probs_ptr, source_ptr, hidden,
    BACK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row).to(tl.int64)
    valid = source >= 0
    read, write = source, row
    if BACK:
        read, write = row, tl.where(valid, source, row)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(inp_ptr + read * hidden + col, mask=(col < hidden) & valid, other=0)
    tl.store(out_ptr + write * hidden + col, x, mask=col < hidden)
    if probs_ptr is not None and tl.program_id(1) == 0:
        p = tl.load(probs_ptr + read, mask=valid, other=0.0)
        tl.store(out_probs_ptr + write, p)


def chunk_sources(split_sizes: torch.Tensor, order: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row of inp for each row of out [num_rows] int32; -1 beyond the last chunk."""
    source = torch.empty(num_rows, dtype=torch.int32, device=split_sizes.device)
    chunks = split_sizes.numel()
    if num_rows:
        width = triton.next_power_of_2(max(1, chunks))
        rows = max(1, _COMPARED // width)
        _map_kernel[(triton.cdiv(num_rows, rows),)](
            split_sizes, order, source, num_rows,
            CHUNKS=chunks, WIDTH=width, ROWS=rows, num_warps=8,
        )  # fmt: skip
    return source


def sort_chunks(
    inp: torch.Tensor,
    source: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    back: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows by ``source`` of chunk_sources, or back to where they came from."""
    num_rows, hidden = inp.shape
    inp = inp.contiguous()
    out = torch.empty_like(inp)
    out_probs = None
    if probs is not None:
        probs = probs.contiguous()
        out_probs = torch.empty_like(probs)
    if num_rows and hidden:
        raw = inp.dtype.itemsize == 1
        cols = min(2048, triton.next_power_of_2(hidden))
        _copy_kernel[(num_rows, triton.cdiv(hidden, cols))](
            inp.view(torch.uint8) if raw else inp, probs, out.view(torch.uint8) if raw else out,
            out_probs, source, hidden, BACK=back, COLS=cols, num_warps=4,
        )  # fmt: skip
    return out, out_probs
