# SPDX-License-Identifier: Apache-2.0
"""The whole layer for a handful of tokens in two launches: no ordering by expert, no tensor cores.

At one to four tokens nearly every route has an expert of its own, and reading its weights is all
that costs. So each program streams a few weight rows once, as vectors, for one route:

    up:    H[route, n] = w13[e, n] · quantised x[token]                              fp32 [routes, 2I]
    down:  out[token, c] = sum over slot of weight * bf16( w2[e, c] · quantised swiglu(H[route]) )

Every program quantises the activations it needs itself: cheaper than another launch. Grids: up
(rows of w13, route), down (columns of the output, token). Same rounding as the other path.
"""

import torch
import triton
import triton.language as tl

from .grouped_gemm import swiglu
from .quant_fp8 import quantise


@triton.jit
def _expert(ids_ptr, map_ptr, route, num_global, E: tl.constexpr, MAPPED: tl.constexpr):
    e = tl.load(ids_ptr + route)
    e = tl.where((e >= 0) & (e < num_global), e, -1)
    if MAPPED:
        e = tl.load(map_ptr + e, mask=e >= 0, other=-1)
    return tl.where(e < E, e, -1)


@triton.jit
def _rows_dot(w_ptr, w_scale_ptr, q, scale, row_at, scale_at, col, group, inside, K):
    """Scaled dot of rows [ROWS, K] with one quantised vector: columns ``col`` [GROUPS, 128]."""
    ok = inside[:, None, None] & (col < K)[None, :, :]
    w = tl.load(w_ptr + row_at[:, None, None] + col[None, :, :], mask=ok, other=0.0)
    ok = inside[:, None] & (group * 128 < K)[None, :]
    w_scale = tl.load(w_scale_ptr + scale_at[:, None] + group[None, :], mask=ok, other=0.0)
    product = tl.sum(w.to(tl.float32) * q.to(tl.float32)[None, :, :], axis=2)
    return tl.sum(product * (scale[None, :] * w_scale), axis=1)


@triton.jit
def _decode_up_kernel(
    x_ptr, w_ptr, w_scale_ptr, ids_ptr, map_ptr, h_ptr, K, inter, num_global, top_k,
    E: tl.constexpr, MAPPED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    route = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED)
    if e < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    blocks = tl.cdiv(inter, 128)
    block = tl.where(row < inter, row // 128, blocks + (row - inter) // 128)
    row_at = (e * 2 * inter + row).to(tl.int64) * K
    scale_at = (e * 2 * blocks + block) * tl.cdiv(K, 128)
    acc = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, tl.cdiv(K, 128), GROUPS):
        group = first + tl.arange(0, GROUPS)
        col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + (route // top_k).to(tl.int64) * K + col, mask=col < K, other=0.0)
        q, scale = quantise(x.to(tl.float32), 1)
        acc += _rows_dot(
            w_ptr, w_scale_ptr, q, scale, row_at, scale_at, col, group, row < 2 * inter, K
        )
    tl.store(h_ptr + route * 2 * inter + row, acc, mask=row < 2 * inter)


@triton.jit
def _decode_down_kernel(
    h_ptr, w_ptr, w_scale_ptr, ids_ptr, map_ptr, weight_ptr, shared_ptr, out_ptr,
    hidden, inter, num_global, alpha, limit,
    TOP_K: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
    LIMITED: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    out_col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    groups = tl.cdiv(inter, 128)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((COLS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        route = token * TOP_K + slot
        e = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED)
        live = e >= 0
        row_at = (e * hidden + out_col).to(tl.int64) * inter
        scale_at = (e * tl.cdiv(hidden, 128) + out_col // 128) * groups
        y = tl.zeros((COLS,), tl.float32)
        for first in tl.range(0, groups, GROUPS):
            group = first + tl.arange(0, GROUPS)
            col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            at = h_ptr + route * 2 * inter + col
            gate = tl.load(at, mask=live & (col < inter), other=0.0)
            up = tl.load(at + inter, mask=live & (col < inter), other=0.0)
            q, scale = quantise(swiglu(gate, up, alpha, limit, LIMITED), 1)
            y += _rows_dot(
                w_ptr,
                w_scale_ptr,
                q,
                scale,
                row_at,
                scale_at,
                col,
                group,
                live & (out_col < hidden),
                inter,
            )
        weight = tl.load(weight_ptr + route)
        total += tl.where(live, weight, 0.0) * y.to(tl.bfloat16).to(tl.float32)
    at = token.to(tl.int64) * hidden + out_col
    if SHARED:
        total += tl.load(shared_ptr + at, mask=out_col < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=out_col < hidden)


def decode_up(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, topk_ids: torch.Tensor,
    *, expert_map: torch.Tensor | None = None, rows: int = 16, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """fp32 [num_tokens * top_k, 2I]; rows of absent routes stay uninitialised."""
    experts, two_inter, k = w13.shape
    routes = topk_ids.numel()
    h = torch.empty((routes, two_inter), dtype=torch.float32, device=x.device)
    _decode_up_kernel[(triton.cdiv(two_inter, rows), routes)](
        x, w13, w13_scale, topk_ids, expert_map, h, k, two_inter // 2,
        experts if expert_map is None else expert_map.shape[0], topk_ids.shape[1],
        E=experts, MAPPED=expert_map is not None, ROWS=rows, GROUPS=min(8, triton.next_power_of_2(triton.cdiv(k, 128))),
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return h


def decode_down(
    h: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    out: torch.Tensor, *, expert_map: torch.Tensor | None = None, shared: torch.Tensor | None = None,
    alpha: float = 1.0, limit: float | None = None, cols: int = 16, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Writes ``out`` [num_tokens, hidden] from decode_up's rows."""
    experts, hidden, inter = w2.shape
    num_tokens, top_k = topk_ids.shape
    _decode_down_kernel[(triton.cdiv(hidden, cols), num_tokens)](
        h, w2, w2_scale, topk_ids, expert_map, topk_weights, shared, out,
        hidden, inter, experts if expert_map is None else expert_map.shape[0], alpha, limit or 0.0,
        TOP_K=top_k, E=experts, MAPPED=expert_map is not None, COLS=cols,
        GROUPS=min(8, triton.next_power_of_2(triton.cdiv(inter, 128))), LIMITED=limit is not None,
        SHARED=shared is not None, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out
