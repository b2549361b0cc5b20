# SPDX-License-Identifier: Apache-2.0
"""FP8 block-scaled grouped GEMMs over experts, both operands through TMA descriptors (Triton).

    up:    h[r]  = swiglu(A[r] · gate[e]^T, A[r] · up[e]^T);  Q, S = quantise 1x128 of h
    plain: C[r]  = bf16( A[r] · B[e]^T )

A [rows, K] e4m3 with scales [K/128, rows]; B [E, N, K] e4m3 with 128x128 scales; e = tile_expert of
the row's tile. Every 128 of K the tensor cores' sum is promoted into an fp32 accumulator. Tiles
with expert -1 exit at once; padding rows compute garbage that nobody reads, rows never mix. Tails
of N and K need no padding of the weights: TMA fills zeros beyond K, stores are masked beyond N.

Swapped operands (SWAP) put 64 or more weight rows on the MMA's M and 16 to 64 token rows on its N:
the right way round while an expert has few rows. Grid: (tiles x column blocks), columns fastest, so
that the tiles of one expert run together and its weights are read once.

A program that starts while the kernel in front still runs (PDL) asks L2 for its first weights: they
depend on nothing that kernel writes. Of the plain GEMM's rows only those that hold a route are
written. Where every token has one route here, they go straight to the token's row of the output,
weighted, and nothing is left to reduce.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .quant_fp8 import quantise
from .schedule import Schedule, load_experts

LOOKAHEAD_ROUTES = 512  # beyond, finding a tile's expert takes as long as waiting for it
_LINES = 4  # 128-byte lines of each weight row that are asked for ahead


@dataclass(frozen=True)
class Tiles:
    """How a Triton GEMM cuts its work. Rows per tile are the schedule's alignment."""

    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = True
    unroll: int = 1  # steps of 128 of K per iteration of the up projection
    span: int = 1  # column blocks that one program streams in the plain GEMM


@dataclass(frozen=True)
class Operands:
    """A: rows of activations in the schedule's order; B: weights as the checkpoint has them."""

    a: torch.Tensor  # [rows, K] e4m3
    a_scale: torch.Tensor  # [cdiv(K, 128), rows] fp32
    b: torch.Tensor  # [E, N, K] e4m3
    b_scale: torch.Tensor  # [E, blocks of N, cdiv(K, 128)] fp32
    by_token: bool = False  # a holds one row per token, a_scale is [num_tokens, cdiv(K, 128)]

    def __post_init__(self) -> None:
        groups = triton.cdiv(self.b.shape[2], 128)
        rows = self.a.shape[0]
        scale_shape = (rows, groups) if self.by_token else (groups, rows)
        for name, t in (("a", self.a), ("b", self.b)):
            if t.dtype != torch.float8_e4m3fn or not t.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous float8_e4m3fn, found {t.dtype}, "
                    f"strides {t.stride()}"
                )
            if t.data_ptr() % 16 or t.shape[-1] % 16:
                raise ValueError(
                    f"{name}: TMA needs 16-byte aligned rows, found {t.shape[-1]} columns at "
                    f"{t.data_ptr():#x}"
                )
        if self.a.shape[1] != self.b.shape[2]:
            raise ValueError(
                f"a: expected {self.b.shape[2]} columns as b has, found {self.a.shape[1]}"
            )
        if tuple(self.a_scale.shape) != scale_shape:
            raise ValueError(f"a_scale: expected {scale_shape}, found {tuple(self.a_scale.shape)}")
        if self.b_scale.shape[0] != self.b.shape[0] or self.b_scale.shape[2] != groups:
            raise ValueError(
                f"b_scale: expected [{self.b.shape[0]}, ..., {groups}], "
                f"found {tuple(self.b_scale.shape)}"
            )


@triton.jit
def _product(a, b, scale, weight_scale, SWAP: tl.constexpr):
    """One 128 of K: [BLOCK_M, BLOCK_N], or its transpose when swapped, already scaled."""
    if SWAP:
        return tl.dot(b, a.T) * (scale * weight_scale)[None, :]
    else:
        return tl.dot(a, b.T) * (scale * weight_scale)[:, None]


@triton.jit
def _zeros(M: tl.constexpr, N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros((N, M), tl.float32)
    else:
        return tl.zeros((M, N), tl.float32)


@triton.jit
def swiglu(gate, up, alpha, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-alpha * gate)) * up


@triton.jit
def prefetch(row_ptr, num_bytes, LINES: tl.constexpr):
    """Ask L2 for the first LINES lines of some rows of ``num_bytes`` bytes each."""
    for i in tl.static_range(LINES):
        at = row_ptr + tl.minimum(i, num_bytes // 128 - 1) * 128
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
        )


@triton.jit
def _expert_of_tile(
    tile, ids_ptr, map_ptr, num_routes, num_global, align,
    E: tl.constexpr, E_PAD: tl.constexpr, R_PAD: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """What the schedule will write in tile_expert; E for a tile beyond the last."""
    index = tl.arange(0, R_PAD)
    e = load_experts(ids_ptr, map_ptr, index, num_routes, num_global, E, MAPPED)
    counts = tl.histogram(e, E_PAD, mask=e >= 0)
    tile_end = tl.cumsum((counts + align - 1) // align, 0)
    last = tl.where(tl.arange(0, E_PAD) < E, tile_end, 2147483647)
    return tl.sum((last <= tile).to(tl.int32), 0)


@triton.jit
def _up_kernel(
    a_desc, b_desc, b_ptr, as_ptr, bs_ptr, tile_expert_ptr, q_ptr, qs_ptr, ids_ptr, map_ptr,
    num_rows, inter, K, alpha, limit, num_routes, num_global,
    BLOCK_M: tl.constexpr, SWAP: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, LOOKAHEAD: tl.constexpr, MAPPED: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(inter, 128)
    tile = tl.program_id(0) // blocks
    pn = tl.program_id(0) % blocks
    if PDL:
        if LOOKAHEAD:
            e = _expert_of_tile(
                tile, ids_ptr, map_ptr, num_routes, num_global, BLOCK_M, E, E_PAD, LOOKAHEAD, MAPPED
            )
            if e < E:
                row = tl.minimum(pn * 128 + tl.arange(0, 128), inter - 1)
                gate_row = b_ptr + (e * 2 * inter + row).to(tl.int64) * K
                prefetch(gate_row, K, LINES)
                prefetch(gate_row + inter.to(tl.int64) * K, K, LINES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.load(tile_expert_ptr + tile)
    if e < 0:
        return
    groups = tl.cdiv(K, 128)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = e * 2 * inter + pn * 128
    gate_scale = bs_ptr + (e * 2 * blocks + pn) * groups
    up_scale = gate_scale + blocks * groups
    gate = _zeros(BLOCK_M, 128, SWAP)
    up = _zeros(BLOCK_M, 128, SWAP)
    # scales are fetched one step ahead: the pipeline carries the tiles, not these
    scale = tl.load(as_ptr + rows)
    g_scale = tl.load(gate_scale)
    u_scale = tl.load(up_scale)
    for first_k in tl.range(0, groups, UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            k = first_k + i
            ahead = k + 1 < groups
            next_scale = tl.load(
                as_ptr + (k + 1) * num_rows + rows, mask=ahead & (rows >= 0), other=0.0
            )
            next_g = tl.load(gate_scale + k + 1, mask=ahead, other=0.0)
            next_u = tl.load(up_scale + k + 1, mask=ahead, other=0.0)
            a = a_desc.load([tile * BLOCK_M, k * 128])
            b0 = b_desc.load([first, k * 128])
            b1 = b_desc.load([first + inter, k * 128])
            gate += _product(a, b0, scale, g_scale, SWAP)
            up += _product(a, b1, scale, u_scale, SWAP)
            scale = next_scale
            g_scale = next_g
            u_scale = next_u
    h = swiglu(gate, up, alpha, limit, LIMITED)
    cols = pn * 128 + tl.arange(0, 128)
    if SWAP:
        h = tl.where((cols < inter)[:, None], h, 0.0)
        q, scale = quantise(h, 0)
        q = q.T
    else:
        h = tl.where((cols < inter)[None, :], h, 0.0)
        q, scale = quantise(h, 1)
    at = q_ptr + rows.to(tl.int64)[:, None] * inter + cols[None, :]
    tl.store(at, q, mask=(cols < inter)[None, :])
    tl.store(qs_ptr + pn * num_rows + rows, scale)


@triton.jit
def _gemm_kernel(
    a_desc, b_desc, b_ptr, as_ptr, bs_ptr, tile_expert_ptr, tile_rows_ptr, row_route_ptr,
    weight_ptr, c_ptr, num_rows, N, K, first_column, width, scale_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr, SPAN: tl.constexpr, SCATTER: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One row tile and SPAN column blocks, as one pipelined loop over (column block, 128 of K)."""
    blocks = tl.cdiv(width, BLOCK_N)
    spans = tl.cdiv(blocks, SPAN)
    tile = tl.program_id(0) // spans
    first = (tl.program_id(0) % spans) * SPAN
    # the schedule is complete: the kernel in front has waited for it
    e = tl.load(tile_expert_ptr + tile)
    if PDL:
        if e >= 0:
            row = tl.minimum(first_column + first * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            prefetch(b_ptr + (e * N + row).to(tl.int64) * K, K, LINES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if e < 0:
        return
    groups = tl.cdiv(K, 128)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = tl.arange(0, BLOCK_M) < tl.load(tile_rows_ptr + tile)
    if SCATTER:  # a token's only route has its number
        target = tl.load(row_route_ptr + rows, mask=valid, other=0)
        weight = tl.load(weight_ptr + target, mask=valid, other=0.0)
    else:
        target = rows
    w_scale = bs_ptr + (e * scale_blocks) * groups
    acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
    steps = tl.minimum(SPAN, blocks - first) * groups
    scale = tl.load(as_ptr + rows)
    b_scale = tl.load(w_scale + (first_column + first * BLOCK_N) // 128 * groups)
    for i in tl.range(0, steps, num_stages=STAGES):
        k = i % groups
        pn = first + i // groups
        column = first_column + pn * BLOCK_N
        # scales are fetched one step ahead: the pipeline carries the tiles, not these
        ahead = tl.minimum(i + 1, steps - 1)
        next_k = ahead % groups
        next_column = first_column + (first + ahead // groups) * BLOCK_N
        next_scale = tl.load(as_ptr + next_k * num_rows + rows)
        next_b = tl.load(w_scale + next_column // 128 * groups + next_k)
        a = a_desc.load([tile * BLOCK_M, k * 128])
        b = b_desc.load([e * N + column, k * 128])
        acc += _product(a, b, scale, b_scale, SWAP)
        scale = next_scale
        b_scale = next_b
        if k == groups - 1:
            c = acc.to(tl.bfloat16)
            if SWAP:
                c = c.T
            if SCATTER:
                c = (c.to(tl.float32) * weight[:, None]).to(c_ptr.dtype.element_ty)
            cols = pn * BLOCK_N + tl.arange(0, BLOCK_N)
            at = c_ptr + target.to(tl.int64)[:, None] * width + cols[None, :]
            inside = (cols < width) & (first_column + cols < N)
            tl.store(at, c, mask=valid[:, None] & inside[None, :])
            acc = _zeros(BLOCK_M, BLOCK_N, SWAP)


@dataclass(frozen=True)
class Ahead:
    """What the schedule is made from: lets the up projection know its experts before it is done."""

    topk_ids: torch.Tensor  # [num_tokens, top_k] int32, contiguous
    expert_map: torch.Tensor | None = None


def check_out(
    plan: Schedule, out: torch.Tensor, first_column: int, block: int, weights: torch.Tensor | None
) -> None:
    """Raises ValueError where the plain GEMM cannot write ``out``."""
    rows = plan.num_rows if weights is None else plan.route_row.shape[0]
    if first_column % block or out.shape[0] != rows or not out.is_contiguous():
        raise ValueError(
            f"out: expected {rows} contiguous rows from a multiple of column {block}, "
            f"found {tuple(out.shape)} from {first_column}"
        )
    if weights is not None and (plan.route_row.shape[1] != 1 or weights.dtype != torch.float32):
        raise ValueError(
            f"weights: expected fp32 and one route a token, found {weights.dtype} and "
            f"{plan.route_row.shape[1]}"
        )


def _descriptors(
    x: Operands, block_m: int, block_n: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    b = x.b.view(-1, x.b.shape[2])
    return TensorDescriptor.from_tensor(x.a, [block_m, 128]), TensorDescriptor.from_tensor(
        b, [block_n, 128]
    )


def grouped_gemm_swiglu(
    x: Operands,
    plan: Schedule,
    tiles: Tiles,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    pdl: bool = False,
    ahead: Ahead | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The up projection with its epilogue: e4m3 [rows, I] and scales [cdiv(I, 128), rows].

    ``x.b`` is w13 [E, 2I, K], gate rows first; its scales have cdiv(I, 128) blocks for each half.
    """
    (experts, two_inter, k), rows = x.b.shape, plan.num_rows
    inter = two_inter // 2
    blocks = triton.cdiv(inter, 128)
    q = torch.empty((rows, inter), dtype=torch.float8_e4m3fn, device=x.a.device)
    qs = torch.empty((blocks, rows), dtype=torch.float32, device=x.a.device)
    ids, expert_map = (ahead.topk_ids, ahead.expert_map) if ahead else (None, None)
    routes = ids.numel() if ids is not None else 0
    lookahead = max(16, triton.next_power_of_2(routes)) if 0 < routes <= LOOKAHEAD_ROUTES else 0
    if rows:
        _up_kernel[(rows // plan.align * blocks,)](
            *_descriptors(x, plan.align, 128), x.b, x.a_scale, x.b_scale, plan.tile_expert, q, qs,
            ids, expert_map, rows, inter, k, alpha, limit or 0.0, routes,
            experts if expert_map is None else expert_map.shape[0],
            BLOCK_M=plan.align, SWAP=tiles.swap,
            LIMITED=limit is not None, PDL=pdl, STAGES=tiles.num_stages, UNROLL=tiles.unroll,
            LOOKAHEAD=lookahead if pdl else 0, MAPPED=expert_map is not None, E=experts,
            E_PAD=triton.next_power_of_2(max(experts, 16)), LINES=_LINES,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return q, qs


def grouped_gemm(
    x: Operands,
    plan: Schedule,
    tiles: Tiles,
    *,
    first_column: int = 0,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """bf16 [rows, width]: columns ``first_column ...`` of A · B^T, all of them without ``out``.

    With the ``weights`` [num_tokens, 1] of routes, ``out`` [num_tokens, N] gets each row at its
    token, weighted; tokens without a route are left alone.
    """
    n, k = x.b.shape[1:]
    if out is None:
        out = torch.empty((plan.num_rows, n), dtype=torch.bfloat16, device=x.a.device)
    width = out.shape[1]
    check_out(plan, out, first_column, tiles.block_n, weights)
    if plan.num_rows:
        spans = triton.cdiv(width, tiles.block_n * tiles.span)
        _gemm_kernel[(plan.num_rows // plan.align * spans,)](
            *_descriptors(x, plan.align, tiles.block_n), x.b, x.a_scale, x.b_scale,
            plan.tile_expert, plan.tile_rows, plan.row_route, weights, out,
            plan.num_rows, n, k, first_column, width, x.b_scale.shape[1], BLOCK_M=plan.align,
            BLOCK_N=tiles.block_n, SWAP=tiles.swap, PDL=pdl, STAGES=tiles.num_stages,
            SPAN=tiles.span, SCATTER=weights is not None, LINES=_LINES,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out
