# SPDX-License-Identifier: Apache-2.0
"""1x128 activation quantisation to e4m3, alone or fused into the permutation by expert.

    amax  = max(|x[group]|, 1e-10)        group: 128 neighbouring columns of one row
    scale = amax * fp32(1/448)
    q     = e4m3(clamp(x * (1 / scale), -448, 448))      1 / scale is an IEEE division

Permuted rows have transposed scales, ``[groups, rows]``: a GEMM tile reads 128 neighbouring values.
A GEMM that gathers rows itself wants them by token instead; that needs no schedule, and can run
while one is made (OVERLAP): the kernels of the schedule let it start, it waits for them at its end.
Grid: (token, chunk of 8 groups). Reads every token once, whatever top-k is.
"""

import torch
import triton
import triton.language as tl

GROUP = 128
_GROUPS_PER_PROGRAM = 8  # 1,024 columns


@triton.jit
def quantise(x, axis: tl.constexpr):
    """fp32 tile whose ``axis`` is one group of 128 -> (e4m3 tile, fp32 scales)."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=axis), 1e-10)
    scale = amax * (1.0 / 448.0)
    inverse = tl.div_rn(1.0, scale)
    q = tl.minimum(tl.maximum(x * tl.expand_dims(inverse, axis), -448.0), 448.0)
    return q.to(tl.float8e4nv), scale


@triton.jit
def _quant_kernel(
    x_ptr, q_ptr, s_ptr, route_row_ptr, absent_ptr, hidden, num_rows, top_k,
    COPIES: tl.constexpr, BY_TOKEN: tl.constexpr, GROUPS: tl.constexpr, ZERO_ABSENT: tl.constexpr,
    PDL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if PDL:
        if not OVERLAP:  # before the loads: the kernel in front may be the one that makes x
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + token * hidden + col, mask=col < hidden, other=0.0).to(tl.float32)
    q, scale = quantise(x, 1)
    inside = group * 128 < hidden
    if COPIES == 0:
        tl.store(q_ptr + token * hidden + col, q, mask=col < hidden)
        if BY_TOKEN:
            tl.store(s_ptr + token * tl.cdiv(hidden, 128) + group, scale, mask=inside)
        else:
            tl.store(s_ptr + group.to(tl.int64) * num_rows + token, scale, mask=inside)
    for slot in tl.static_range(COPIES):
        row = tl.load(route_row_ptr + token * top_k + slot).to(tl.int64)
        tl.store(q_ptr + row * hidden + col, q, mask=(col < hidden) & (row >= 0))
        tl.store(s_ptr + group.to(tl.int64) * num_rows + row, scale, mask=inside & (row >= 0))
        if ZERO_ABSENT:
            tl.store(absent_ptr + token * hidden + col, 0.0, mask=(col < hidden) & (row < 0))
    if PDL and OVERLAP:  # so that this kernel's end is also the schedule's
        tl.extra.cuda.gdc_wait()


def _launch(
    x: torch.Tensor, num_rows: int, route_row: torch.Tensor | None, by_token: bool, pdl: bool,
    *, overlap: bool = False, zero_absent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if x.dim() != 2 or x.stride(-1) != 1 or not x.is_contiguous():
        raise ValueError(
            f"x: expected a contiguous [num_tokens, hidden] tensor, found {tuple(x.shape)}, "
            f"strides {x.stride()}"
        )
    num_tokens, hidden = x.shape
    groups = triton.cdiv(hidden, GROUP)
    q = torch.empty((num_rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(
        (num_rows, groups) if by_token else (groups, num_rows), dtype=torch.float32, device=x.device
    )
    copies = 0 if route_row is None else route_row.shape[1]
    width = _GROUPS_PER_PROGRAM * (
        4 if num_tokens >= 512 else 1
    )  # bytes in flight against programs
    if num_tokens and num_rows:
        _quant_kernel[(num_tokens, triton.cdiv(groups, width))](
            x, q, scale, route_row, zero_absent, hidden, num_rows, copies,
            COPIES=copies, BY_TOKEN=by_token, GROUPS=width, ZERO_ABSENT=zero_absent is not None,
            PDL=pdl, OVERLAP=overlap, launch_pdl=pdl,
        )  # fmt: skip
    return q, scale


def quant_fp8(
    x: torch.Tensor, *, by_token: bool = True, pdl: bool = False, overlap: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, hidden] -> e4m3 of the same shape; scales [num_tokens, groups], or transposed
    when not ``by_token``. ``overlap``: directly behind schedule() with PDL, run beside it; the
    schedule's buffers must all be alive, as x and the results have to be disjoint from them."""
    return _launch(x, x.shape[0], None, by_token, pdl, overlap=overlap)


def quant_permute(
    x: torch.Tensor, route_row: torch.Tensor, num_rows: int, *, pdl: bool = False,
    zero_absent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Quantise each token and write it to the rows of its routes.

    Args:
        x: [num_tokens, hidden] bf16.
        route_row: [num_tokens, top_k] int32, a row or -1.
        num_rows: rows of the result; those that no route names stay uninitialised.
        zero_absent: like x, for top-k 1; rows of tokens without a route are written with zeros.
    Returns:
        q [num_rows, hidden] e4m3, scales [groups, num_rows] fp32.
    """
    if zero_absent is not None and route_row.shape[1] != 1:
        raise ValueError(f"zero_absent: expected one route a token, found {route_row.shape[1]}")
    return _launch(x, num_rows, route_row, False, pdl, zero_absent=zero_absent)
