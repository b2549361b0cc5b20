# SPDX-License-Identifier: Apache-2.0
"""The layer for a handful of tokens: no ordering by expert, the weights' bytes spread over all SMs.

At one to eight tokens nearly every route has an expert of its own, and reading its weights is all
that costs. Each route is a tile of one row, so nothing is sorted; the up projection is cut along N
and K until every SM streams weights:

    quantise x -> up:    P[split, route, n] = w13[e, n, part of K] . q[token, part of K]      fp32
               -> act:   Q[route], S[route] = quantise(swiglu(sum of P over splits))
               -> down:  out[token] = sum over slot of weight * bf16(w2[e] . Q[route]), slot order

Weight rows stand on the MMA's M; its N holds 16 rows of which one counts (TMA brings neighbours or
zeros). A program that starts before the kernel in front is done (PDL) asks L2 for its weights: the
ids that choose them are older than that kernel. The down projection either walks all slots of a
token and reduces on the way, or, where columns are too few to fill the GPU, writes one row per
route for unpermute_reduce.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .grouped_gemm import prefetch, swiglu
from .quant_fp8 import quant_fp8, quantise
from .unpermute_reduce import unpermute_reduce

_ROWS = 64  # weight rows of a program
_NARROW = 16  # the MMA's smallest N
_PROGRAMS = 264  # two for every SM of an H200
_LINES = 8  # 128-byte lines of each row of w2 that are asked for ahead
_WIDE = 96  # column tiles of a token that fill most SMs


@triton.jit
def _expert(ids_ptr, map_ptr, route, num_global, E: tl.constexpr, MAPPED: tl.constexpr):
    e = tl.load(ids_ptr + route)
    e = tl.where((e >= 0) & (e < num_global), e, -1)
    if MAPPED:
        e = tl.load(map_ptr + e, mask=e >= 0, other=-1)
    return tl.where(e < E, e, -1)


@triton.jit
def _decode_up_kernel(
    x_desc, w_desc, w_ptr, x_scale_ptr, w_scale_ptr, ids_ptr, map_ptr, part_ptr,
    K, inter, num_routes, num_global, top_k, steps,
    E: tl.constexpr, MAPPED: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of w13 times one token over ``steps`` groups of K (grid: rows, route, split)."""
    route = tl.program_id(1)
    e = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED)
    token = route // top_k
    groups = tl.cdiv(K, 128)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    start = tl.program_id(2) * steps
    stop = tl.minimum(start + steps, groups)
    if PDL:
        if e >= 0:
            mine = w_ptr + (e * 2 * inter + tl.minimum(row, 2 * inter - 1)).to(tl.int64) * K
            for k in range(start, stop):
                prefetch(mine + k * 128, 128, 1)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if e < 0:
        return
    blocks = tl.cdiv(inter, 128)
    block = tl.where(row < inter, row // 128, blocks + (row - inter) // 128)
    block = tl.minimum(block, 2 * blocks - 1)
    w_scale_row = w_scale_ptr + (e * 2 * blocks + block) * groups
    x_scale_row = x_scale_ptr + token.to(tl.int64) * groups
    acc = tl.zeros((ROWS, NARROW), tl.float32)
    scale = tl.load(w_scale_row + start) * tl.load(x_scale_row + start)
    for k in tl.range(start, stop, num_stages=STAGES):
        ahead = tl.minimum(k + 1, groups - 1)
        next_scale = tl.load(w_scale_row + ahead) * tl.load(x_scale_row + ahead)
        x = x_desc.load([token, k * 128])
        w = w_desc.load([e * 2 * inter + first_row, k * 128])
        acc += tl.dot(w, x.T) * scale[:, None]
        scale = next_scale
    mine = tl.sum(tl.where(tl.arange(0, NARROW)[None, :] == 0, acc, 0.0), axis=1)
    at = part_ptr + (tl.program_id(2) * num_routes + route) * 2 * inter
    tl.store(at + row, mine, mask=row < 2 * inter)


@triton.jit
def _decode_act_kernel(
    part_ptr, ids_ptr, map_ptr, q_ptr, s_ptr, row_ptr, inter, num_routes, num_global, alpha, limit,
    SPLITS: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr, GROUPS: tl.constexpr,
    LIMITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum of the splits, SwiGLU and quantisation of one route (grid: route, groups)."""
    route = tl.program_id(0)
    if PDL:  # the down projection may start at once: it only looks at ids and weights
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    live = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED) >= 0
    tl.store(row_ptr + route, tl.where(live, route, -1))
    if not live:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = col < inter
    gate = tl.zeros((GROUPS, 128), tl.float32)
    up = tl.zeros((GROUPS, 128), tl.float32)
    for split in tl.static_range(SPLITS):
        at = part_ptr + (split * num_routes + route) * 2 * inter + col
        gate += tl.load(at, mask=inside, other=0.0)
        up += tl.load(at + inter, mask=inside, other=0.0)
    q, scale = quantise(swiglu(gate, up, alpha, limit, LIMITED), 1)
    tl.store(q_ptr + route.to(tl.int64) * inter + col, q, mask=inside)
    groups = tl.cdiv(inter, 128)
    tl.store(s_ptr + route * groups + group, scale, mask=group < groups)


@triton.jit
def _decode_down_kernel(
    h_desc, w_desc, w_ptr, h_scale_ptr, w_scale_ptr, ids_ptr, map_ptr, weight_ptr, shared_ptr,
    out_ptr,
    hidden, inter, num_global,
    TOP_K: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr, ROWS: tl.constexpr,
    NARROW: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """ROWS columns of a token's output: all of its slots in one loop (grid: columns, token)."""
    token = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    groups = tl.cdiv(inter, 128)
    block = tl.minimum(row, hidden - 1) // 128
    if PDL:
        for slot in tl.static_range(TOP_K):
            e = _expert(ids_ptr, map_ptr, token * TOP_K + slot, num_global, E, MAPPED)
            if e >= 0:
                mine = w_ptr + (e * hidden + tl.minimum(row, hidden - 1)).to(tl.int64) * inter
                prefetch(mine, inter, LINES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((ROWS, NARROW), tl.float32)
    acc = tl.zeros((ROWS, NARROW), tl.float32)
    for i in tl.range(0, TOP_K * groups, num_stages=STAGES):
        k = i % groups
        route = token * TOP_K + i // groups
        e = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED)
        live = e >= 0
        e = tl.maximum(e, 0)
        w_scale = tl.load(w_scale_ptr + (e * tl.cdiv(hidden, 128) + block) * groups + k)
        h_scale = tl.load(h_scale_ptr + route * groups + k)
        weight = tl.load(weight_ptr + route)
        h = h_desc.load([route, k * 128])
        w = w_desc.load([e * hidden + first_row, k * 128])
        acc += tl.where(live, tl.dot(w, h.T) * (w_scale * h_scale)[:, None], 0.0)
        last = k == groups - 1
        y = tl.where(last, acc, 0.0).to(tl.bfloat16).to(tl.float32)
        total += tl.where(live & last, weight, 0.0) * y
        acc = tl.where(last, 0.0, acc)
    out = tl.sum(tl.where(tl.arange(0, NARROW)[None, :] == 0, total, 0.0), axis=1)
    at = token.to(tl.int64) * hidden + row
    if SHARED:
        out += tl.load(shared_ptr + at, mask=row < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=row < hidden)


@triton.jit
def _decode_rows_kernel(
    h_desc, w_desc, w_ptr, h_scale_ptr, w_scale_ptr, ids_ptr, map_ptr, rows_ptr,
    hidden, inter, num_global,
    E: tl.constexpr, MAPPED: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """ROWS columns of one route's row (grid: columns, route). Absent routes write nothing."""
    route = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    groups = tl.cdiv(inter, 128)
    block = tl.minimum(row, hidden - 1) // 128
    e = _expert(ids_ptr, map_ptr, route, num_global, E, MAPPED)
    if PDL:
        if e >= 0:
            mine = w_ptr + (e * hidden + tl.minimum(row, hidden - 1)).to(tl.int64) * inter
            prefetch(mine, inter, LINES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if e < 0:
        return
    # all scales at once: programs are too short to wait for them in every step
    group = tl.arange(0, GROUPS)
    h_scale = tl.load(h_scale_ptr + route * groups + group, mask=group < groups, other=0.0)
    at = (e * tl.cdiv(hidden, 128) + block[:, None]) * groups + group[None, :]
    w_scale = tl.load(w_scale_ptr + at, mask=(group < groups)[None, :], other=0.0)
    scale = w_scale * h_scale[None, :]
    acc = tl.zeros((ROWS, NARROW), tl.float32)
    for k in tl.range(0, groups, num_stages=STAGES):
        h = h_desc.load([route, k * 128])
        w = w_desc.load([e * hidden + first_row, k * 128])
        now = tl.sum(tl.where(group[None, :] == k, scale, 0.0), axis=1)
        acc += tl.dot(w, h.T) * now[:, None]
    out = tl.sum(tl.where(tl.arange(0, NARROW)[None, :] == 0, acc, 0.0), axis=1)
    at = rows_ptr + route.to(tl.int64) * hidden + row
    tl.store(at, out.to(tl.bfloat16), mask=row < hidden)


class Rows(NamedTuple):
    """The intermediate of every route."""

    h: torch.Tensor  # [routes, I] e4m3; rows of absent routes stay uninitialised
    scale: torch.Tensor  # [routes, cdiv(I, 128)] fp32
    route_row: torch.Tensor  # [num_tokens, top_k] int32: the route's own index, or -1


@dataclass(frozen=True)
class Experts:
    """Which weights a decode launch reads, and how ids become their rows."""

    weights: torch.Tensor  # [E, N, K] e4m3
    scale: torch.Tensor
    topk_ids: torch.Tensor  # [num_tokens, top_k] int32, contiguous
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ids = self.topk_ids
        if ids.dtype != torch.int32 or not ids.is_contiguous():
            raise ValueError(
                f"topk_ids: expected contiguous int32, found {ids.dtype}, strides {ids.stride()}"
            )

    def descriptor(self) -> TensorDescriptor:
        rows = self.weights.view(-1, self.weights.shape[2])
        return TensorDescriptor.from_tensor(rows, [_ROWS, 128])

    def common(self, pdl: bool) -> dict:
        return {
            "E": self.weights.shape[0],
            "MAPPED": self.expert_map is not None,
            "PDL": pdl,
            "launch_pdl": pdl,
        }

    @property
    def num_global(self) -> int:
        return (self.weights if self.expert_map is None else self.expert_map).shape[0]


def decode_up(
    x: torch.Tensor,
    w13: Experts,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    pdl: bool = False,
) -> Rows:
    """``x`` [num_tokens, hidden] bf16 to the quantised intermediate of every route."""
    two_inter, k = w13.weights.shape[1:]
    inter, routes, groups = two_inter // 2, w13.topk_ids.numel(), triton.cdiv(k, 128)
    programs = triton.cdiv(two_inter, _ROWS) * routes
    splits = min(8, max(1, _PROGRAMS // programs), max(1, groups // 4))
    steps = triton.cdiv(groups, splits)
    splits = triton.cdiv(groups, steps)
    stages = 8 if programs * splits <= _PROGRAMS else 5  # bytes in flight: deep or many
    q, scale = quant_fp8(x, pdl=pdl)
    part = torch.empty((splits, routes, two_inter), dtype=torch.float32, device=x.device)
    _decode_up_kernel[(triton.cdiv(two_inter, _ROWS), routes, splits)](
        TensorDescriptor.from_tensor(q, [_NARROW, 128]), w13.descriptor(), w13.weights,
        scale, w13.scale,
        w13.topk_ids, w13.expert_map, part, k, inter, routes, w13.num_global,
        w13.topk_ids.shape[1], steps, ROWS=_ROWS, NARROW=_NARROW, STAGES=stages,
        num_stages=stages, **w13.common(pdl),
    )  # fmt: skip
    groups = triton.cdiv(inter, 128)
    h = torch.empty((routes, inter), dtype=torch.float8_e4m3fn, device=x.device)
    h_scale = torch.empty((routes, groups), dtype=torch.float32, device=x.device)
    route_row = torch.empty_like(w13.topk_ids)
    wide = min(8, triton.next_power_of_2(groups))
    _decode_act_kernel[(routes, triton.cdiv(groups, wide))](
        part, w13.topk_ids, w13.expert_map, h, h_scale, route_row, inter, routes, w13.num_global,
        alpha, limit or 0.0, SPLITS=splits, GROUPS=wide, LIMITED=limit is not None,
        **w13.common(pdl),
    )  # fmt: skip
    return Rows(h, h_scale, route_row)


def decode_down(
    rows: Rows,
    w2: Experts,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Writes ``out`` [num_tokens, hidden] from decode_up's rows."""
    hidden, inter = w2.weights.shape[1:]
    num_tokens, top_k = w2.topk_ids.shape
    columns, groups = triton.cdiv(hidden, _ROWS), triton.cdiv(inter, 128)
    h_desc = TensorDescriptor.from_tensor(rows.h, [_NARROW, 128])
    if columns >= _WIDE and num_tokens <= 2:
        _decode_down_kernel[(columns, num_tokens)](
            h_desc, w2.descriptor(), w2.weights, rows.scale, w2.scale, w2.topk_ids, w2.expert_map,
            topk_weights, shared, out, hidden, inter, w2.num_global,
            TOP_K=top_k, ROWS=_ROWS, NARROW=_NARROW, SHARED=shared is not None,
            LINES=min(groups, _LINES),
            STAGES=14, num_stages=14, **w2.common(pdl),  # half of them wait for the expert's id
        )  # fmt: skip
        return out
    routes = out.new_empty(num_tokens * top_k, hidden, dtype=torch.bfloat16)
    _decode_rows_kernel[(columns, num_tokens * top_k)](
        h_desc, w2.descriptor(), w2.weights, rows.scale, w2.scale, w2.topk_ids, w2.expert_map,
        routes,
        hidden, inter, w2.num_global, ROWS=_ROWS, NARROW=_NARROW,
        GROUPS=max(2, triton.next_power_of_2(groups)), LINES=min(groups, _LINES), STAGES=4,
        num_stages=4, **w2.common(pdl),
    )  # fmt: skip
    return unpermute_reduce(routes, rows.route_row, topk_weights, out, shared=shared, pdl=pdl)
