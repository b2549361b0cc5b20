# SPDX-License-Identifier: Apache-2.0
"""Load-balance loss of a router and its gradient.

    loss = c * sum over (t, e) of probs[t, e] * tokens_per_expert[e]
    c    = coeff * E / (top_k * T^2),   T = total_num_tokens, a number or a device scalar
    d loss / d probs[t, e] = c * tokens_per_expert[e]

``probs`` [tokens, columns] may have a multiple of E columns (sequences side by side).

Forward: about four blocks an SM stride over the rows with fp32 sums in registers. Each leaves its
partial sum in one 64-bit word, beside a bit that says it is there, and goes; the last block reads
the words until all are there, adds them in fixed order and leaves zeros. So the loss is the same
bit by bit every time, which one atomic addition a block into an accumulator is not, and nothing is
fenced, counted or zeroed by a launch of its own. The last block is dispatched last and waits for
blocks that wait for nothing. It also leaves c on the device for the backward pass.
Both directions start while the kernel in front ends, and read nothing before it has.
"""

import torch
import triton
import triton.language as tl

from .launch import Launch, Launches
from .launch_counter import overlaps, sm_count, zeroed_line

_COLS = 256  # wide enough to coalesce, narrow enough to waste little of 2,304
_MAX_PARTIALS = 1024
_THERE = tl.constexpr(1 << 32)


@triton.jit
def _forward_kernel(
    probs_ptr, tokens_ptr, total_ptr, partial_ptr, loss_ptr,
    num_rows, num_cols, row_stride, factor, total,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTIALS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_programs = tl.num_programs(0)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, num_cols, COLS):
        col = first + tl.arange(0, COLS)
        tokens = tl.load(tokens_ptr + col, mask=col < num_cols, other=0).to(tl.float32)
        for block in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), num_programs):
            row = block * ROWS + tl.arange(0, ROWS)
            at = probs_ptr + row.to(tl.int64)[:, None] * row_stride + col[None, :]
            inside = (row < num_rows)[:, None] & (col < num_cols)[None, :]
            sums += tl.load(at, mask=inside, other=0.0).to(tl.float32) * tokens[None, :]
    mine = tl.sum(sums).to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(partial_ptr + tl.program_id(0), (mine & 0xFFFFFFFF) | _THERE, sem="relaxed")
    if tl.program_id(0) == num_programs - 1:
        index = tl.arange(0, PARTIALS)
        if total_ptr is not None:
            total = tl.load(total_ptr).to(tl.float32)
        coefficient = factor / total / total
        words = tl.zeros([PARTIALS], tl.int64)
        there = 0
        while there < num_programs:
            words = tl.load(partial_ptr + index, mask=index < num_programs, other=0, volatile=True)
            there = tl.sum((words >= _THERE).to(tl.int32), 0)
        partials = words.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(loss_ptr, tl.sum(partials, 0) * coefficient)
        tl.store(loss_ptr + 1, coefficient)
        tl.store(partial_ptr + index, tl.zeros([PARTIALS], tl.int64), mask=index < num_programs)


@triton.jit
def _backward_kernel(
    grad_ptr, loss_ptr, tokens_ptr, out_ptr, num_rows, num_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    scale = tl.load(grad_ptr).to(tl.float32) * tl.load(loss_ptr + 1)
    value = tl.load(tokens_ptr + col, mask=col < num_cols, other=0).to(tl.float32) * scale
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = out_ptr + row.to(tl.int64)[:, None] * num_cols + col[None, :]
    inside = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    value = tl.broadcast_to(value[None, :], [ROWS, COLS])
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


def _tile(num_cols: int, values: int) -> tuple[int, int]:
    cols = min(triton.next_power_of_2(max(1, num_cols)), _COLS)
    return values // cols, cols


_forwards, _backwards = Launches(), Launches()


def aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """The loss and its coefficient, fp32 [2] on the device.

    Args:
        probs: [num_rows, num_cols] fp32, bf16 or fp16; rows may be strided.
        tokens_per_expert: [num_cols] of any integer or float dtype.
        total_num_tokens: T; a device scalar is read when the kernel runs.
        factor: coeff * E / top_k.
    """
    num_rows, num_cols = probs.shape
    device = probs.device
    if probs.stride(1) != 1:
        probs = probs.contiguous()
    out = torch.empty(2, dtype=torch.float32, device=device)
    on_device = isinstance(total_num_tokens, torch.Tensor)
    total = total_num_tokens if on_device else None
    number = 1.0 if on_device else float(total_num_tokens)
    key = (
        probs.shape, probs.stride(0), probs.dtype, device, tokens_per_expert.dtype,
        None if total is None else total.dtype, factor, number,
    )  # fmt: skip
    launch = _forwards.get(key)
    if launch is None:
        rows, cols = _tile(num_cols, 4096)
        programs = max(1, min(triton.cdiv(num_rows, rows), 4 * sm_count(device), _MAX_PARTIALS))
        pdl = overlaps(device, programs)
        constants = dict(
            ROWS=rows, COLS=cols, PARTIALS=triton.next_power_of_2(programs), PDL=pdl,
            launch_pdl=pdl, num_warps=8,
        )  # fmt: skip
        numbers = (num_rows, num_cols, probs.stride(0), factor, number)
        launch = Launch(_forward_kernel, device, (programs,), numbers, constants)
        _forwards.add(key, launch)
    words = zeroed_line(device, 2 * launch.grid[0]).view(torch.int64)
    launch(probs, tokens_per_expert, total, words, out)
    return out


def aux_loss_backward(
    grad: torch.Tensor, loss: torch.Tensor, tokens_per_expert: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Gradient of probs, shaped and typed ``like`` them; ``loss`` is what aux_loss returned."""
    num_rows, num_cols = like.shape
    out = torch.empty((num_rows, num_cols), dtype=like.dtype, device=like.device)
    if out.numel():
        key = (like.shape, like.dtype, like.device, tokens_per_expert.dtype, grad.dtype)
        launch = _backwards.get(key)
        if launch is None:
            rows, cols = _tile(num_cols, 8192)
            grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_cols, cols))
            pdl = overlaps(like.device, grid[0] * grid[1])
            constants = dict(ROWS=rows, COLS=cols, PDL=pdl, launch_pdl=pdl, num_warps=8)
            numbers = (num_rows, num_cols)
            launch = Launch(_backward_kernel, like.device, grid, numbers, constants)
            _backwards.add(key, launch)
        launch(grad, loss, tokens_per_expert, out)
    return out
