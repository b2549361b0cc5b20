# SPDX-License-Identifier: Apache-2.0
"""Hand-scheduled grouped GEMMs for many rows per expert (Gluon, SM90); same maths as grouped_gemm.

Persistent, 384 threads: a producer warpgroup and two consumer warpgroups. A tile is 128 rows by
2 x 128 columns (for the up projection: 128 gate columns and the 128 up columns that belong to them,
so that a consumer holds whole quantisation groups). Consumer c owns rows 64c ... 64c+63 as two
64x128 accumulators. Each takes a fresh partial sum from four k32 MMAs and promotes it into fp32,
while the other consumer's MMAs run: the two take turns (named barriers 10 and 11).

    B (and A, when it is in the schedule's order) arrives by TMA; with GATHER the producer fetches
    A's rows through the routing index with cp.async, so that no permuted copy is ever written.
    full[stage]:  the stage is loaded        empty[stage]: both consumers have read it

Tiles with at most 64 valid rows are shared the other way: each consumer takes half of the columns.
Tiles are walked in pairs of row tiles, all column blocks of a pair first, for reuse in L2.
Where every token has one route here (SCATTER), rows leave weighted to their token's row of the
output, through shared memory so that each is written whole.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .grouped_gemm import Operands, check_out
from .schedule import Schedule
from .sm90_parts import (
    HALF,
    MMA,
    Pair,
    Ring,
    Target,
    Work,
    pass_turn,
    pin,
    start_beside_the_kernel_in_front,
    take_turn,
)

ALIGN = 128
_FP8 = gl.NVMMASharedLayout(128, 8, 2)
_BF16 = gl.NVMMASharedLayout(128, 16, 2)
_FP32 = gl.NVMMASharedLayout(0, 32, 1)


@gluon.jit
def _load_b(b_desc, ring, work, stage, k, row0, row1):
    full = ring.full.index(stage)
    tma.async_copy_global_to_shared(b_desc, [row0, k * 128], full, ring.b.index(stage * 2))
    tma.async_copy_global_to_shared(b_desc, [row1, k * 128], full, ring.b.index(stage * 2 + 1))


@gluon.jit
def _produce(a_desc, b_desc, s_desc, ring, work, num_rows):
    """A in the schedule's order: everything by TMA (one warp)."""
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row_tile, column_tile = work.place(t)
        expert = work.expert(row_tile)
        block0, block1 = work.blocks(column_tile)
        row = row_tile * 128
        for k in range(work.K // 128):
            mbarrier.wait(ring.empty.index(stage), phase)
            full = ring.full.index(stage)
            mbarrier.expect(full, 3 * 128 * 128 + 512)
            tma.async_copy_global_to_shared(a_desc, [row, k * 128], full, ring.a.index(stage * 2))
            tma.async_copy_global_to_shared(
                a_desc, [row + 64, k * 128], full, ring.a.index(stage * 2 + 1)
            )
            _load_b(
                b_desc,
                ring,
                work,
                stage,
                k,
                expert * work.N + block0 * 128,
                expert * work.N + block1 * 128,
            )
            tma.async_copy_global_to_shared(
                s_desc, [k * num_rows + row], full, ring.scale.index(stage)
            )
            stage, phase = ring.next(stage, phase)


@gluon.jit
def _produce_gathered(a_ptr, b_desc, s_ptr, row_route_ptr, top_k, ring, work):
    """A's rows through the routing index: cp.async by four warps, B by TMA."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    GROUPS: gl.constexpr = work.K // 128
    stage = 0
    phase = 1
    r = gl.arange(0, 64, gl.SliceLayout(1, TILE))
    column = gl.arange(0, 128, gl.SliceLayout(0, TILE))
    line = gl.arange(0, 128, LINE)
    for t in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row_tile, column_tile = work.place(t)
        expert = work.expert(row_tile)
        valid = gl.load(work.tile_rows_ptr + row_tile)
        block0, block1 = work.blocks(column_tile)
        route = row_route_ptr + row_tile * 128
        token0 = gl.load(route + r, mask=r < valid, other=0) // top_k
        token1 = gl.load(route + 64 + r, mask=r + 64 < valid, other=0) // top_k
        tokens = gl.load(route + line, mask=line < valid, other=0) // top_k
        a0 = a_ptr + token0.to(gl.int64)[:, None] * work.K + column[None, :]
        a1 = a_ptr + token1.to(gl.int64)[:, None] * work.K + column[None, :]
        s = s_ptr + tokens.to(gl.int64) * GROUPS
        for k in range(GROUPS):
            mbarrier.wait(ring.empty.index(stage), phase)
            full = ring.full.index(stage)
            mbarrier.expect(full, 2 * 128 * 128)
            _load_b(
                b_desc,
                ring,
                work,
                stage,
                k,
                expert * work.N + block0 * 128,
                expert * work.N + block1 * 128,
            )
            async_copy.async_copy_global_to_shared(ring.a.index(stage * 2), a0 + k * 128)
            if valid > 64:
                async_copy.async_copy_global_to_shared(ring.a.index(stage * 2 + 1), a1 + k * 128)
            async_copy.async_copy_global_to_shared(ring.scale.index(stage), s + k)
            async_copy.mbarrier_arrive(full, increment_count=False)
            stage, phase = ring.next(stage, phase)


@gluon.jit
def _multiply(
    ring,
    stage,
    phase,
    acc0,
    acc1,
    w0,
    w1,
    never,
    dump,
    CONSUMER: gl.constexpr,
    GATHER: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One 128 of K into both accumulators."""
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    zero = gl.zeros([64, 128], gl.float32, MMA)
    mbarrier.wait(ring.full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    a = ring.a.index(stage * 2 + CONSUMER)
    take_turn(CONSUMER, TURNS)
    p = warpgroup_mma(
        a, ring.b.index(stage * 2).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    pass_turn(CONSUMER, TURNS)
    scale = ring.scale.index(stage).slice(CONSUMER * 64, 64).load(ROWS)
    p = warpgroup_mma_wait(0, deps=[p])
    acc0 += p * (scale * w0)[:, None]
    pin(never, dump, acc0)
    take_turn(CONSUMER, TURNS)
    q = warpgroup_mma(
        a, ring.b.index(stage * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    pass_turn(CONSUMER, TURNS)
    q = warpgroup_mma_wait(0, deps=[q])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    acc1 += q * (scale * w1)[:, None]
    return acc0, acc1


@gluon.jit
def _multiply_half(
    ring, stage, phase, acc0, acc1, w0, w1,
    CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One 128 of K of a short tile, fused: each consumer takes half of gate and half of up."""
    zero = gl.zeros([64, 64], gl.float32, HALF)
    mbarrier.wait(ring.full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    a = ring.a.index(stage * 2)
    b0 = ring.b.index(stage * 2).slice(CONSUMER * 64, 64, 0)
    b1 = ring.b.index(stage * 2 + 1).slice(CONSUMER * 64, 64, 0)
    take_turn(CONSUMER, TURNS)
    p = warpgroup_mma(a, b0.permute((1, 0)), zero, use_acc=False, is_async=True)
    q = warpgroup_mma(a, b1.permute((1, 0)), zero, use_acc=False, is_async=True)
    pass_turn(CONSUMER, TURNS)
    scale = ring.scale.index(stage).slice(0, 64).load(gl.SliceLayout(1, HALF))
    p, q = warpgroup_mma_wait(0, deps=[p, q])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    acc0 += p * (scale * w0)[:, None]
    acc1 += q * (scale * w1)[:, None]
    return acc0, acc1


@gluon.jit
def _multiply_block(
    ring, stage, phase, acc, w, CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """One 128 of K of a short tile, plain: each consumer takes one of the column blocks."""
    zero = gl.zeros([64, 128], gl.float32, MMA)
    mbarrier.wait(ring.full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    take_turn(CONSUMER, TURNS)
    b = ring.b.index(stage * 2 + CONSUMER).permute((1, 0))
    p = warpgroup_mma(ring.a.index(stage * 2), b, zero, use_acc=False, is_async=True)
    pass_turn(CONSUMER, TURNS)
    scale = ring.scale.index(stage).slice(0, 64).load(gl.SliceLayout(1, MMA))
    p = warpgroup_mma_wait(0, deps=[p])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return acc + p * (scale * w)[:, None]


@gluon.jit
def _shared_amax(h, pair, CONSUMER: gl.constexpr, turn):
    """Greatest |h| of every row over both consumers' halves."""
    ROWS: gl.constexpr = gl.SliceLayout(1, HALF)
    amax = gl.max(gl.abs(h), axis=1)
    slot = (turn & 1) * 2
    pair.amax.index(slot + CONSUMER).store(amax)
    gl.thread_barrier()
    mbarrier.arrive(pair.ready, count=1)
    mbarrier.wait(pair.ready, turn & 1)
    return gl.maximum(amax, pair.amax.index(slot + 1 - CONSUMER).load(ROWS))


@gluon.jit
def _put(c_desc, buffer, tile, row, column, PENDING: gl.constexpr):
    tma.store_wait(PENDING)
    gl.thread_barrier()
    buffer.store(tile)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(c_desc, [row, column], buffer)


@gluon.jit
def _scatter(dst, buffer, tile, row, column, valid):
    """``valid`` rows of a 64x128 tile, weighted, to the rows of their tokens."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gl.thread_barrier()
    buffer.store(tile.to(gl.bfloat16))
    gl.thread_barrier()
    r = gl.arange(0, 64, gl.SliceLayout(1, LINE))
    cols = column + gl.arange(0, 128, gl.SliceLayout(0, LINE))
    token = gl.load(dst.row_route_ptr + row + r, mask=r < valid, other=0)
    weight = gl.load(dst.weight_ptr + token, mask=r < valid, other=0.0)
    y = buffer.load(LINE).to(gl.float32) * weight[:, None]
    at = dst.ptr + token.to(gl.int64)[:, None] * dst.width + cols[None, :]
    inside = (r < valid)[:, None] & (cols < dst.width)[None, :]
    gl.store(at, y.to(dst.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _quantise(h, amax):
    scale = gl.maximum(amax, 1e-10) * (1.0 / 448.0)
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    q = gl.minimum(gl.maximum(h * inverse[:, None], -448.0), 448.0)
    return q.to(gl.float8e4nv), scale


@gluon.jit
def _whole_tile(
    dst, out, ring, work, stage, phase, row_tile, column_tile, w0, w1, w0_ptr, w1_ptr, valid,
    CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = work.K // 128
    never = dst.num_rows < 0
    acc0 = gl.zeros([64, 128], gl.float32, MMA)
    acc1 = gl.zeros([64, 128], gl.float32, MMA)
    for k in range(GROUPS):
        ahead = gl.minimum(k + 1, GROUPS - 1)
        next_w0 = gl.load(w0_ptr + ahead)
        next_w1 = gl.load(w1_ptr + ahead)
        acc0, acc1 = _multiply(
            ring, stage, phase, acc0, acc1, w0, w1, never, work.b_scale_ptr, CONSUMER, GATHER, TURNS
        )
        w0 = next_w0
        w1 = next_w1
        stage, phase = ring.next(stage, phase)
    row = row_tile * 128 + CONSUMER * 64
    if work.FUSED:
        h = dst.swiglu(acc0, acc1)
        q, scale = _quantise(h, gl.max(gl.abs(h), axis=1))
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, MMA))
        gl.store(dst.scale_ptr + column_tile * dst.num_rows + rows, scale)
        _put(dst.desc, out.index(0), q, row, column_tile * 128, 0)
    elif dst.SCATTER:
        left = valid - CONSUMER * 64
        _scatter(dst, out.index(0), acc0, row, column_tile * 256, left)
        _scatter(dst, out.index(1), acc1, row, column_tile * 256 + 128, left)
    else:
        _put(dst.desc, out.index(0), acc0.to(gl.bfloat16), row, column_tile * 256, 1)
        _put(dst.desc, out.index(1), acc1.to(gl.bfloat16), row, column_tile * 256 + 128, 1)
    return stage, phase


@gluon.jit
def _half_tile(
    dst, pair, ring, work, stage, phase, row_tile, column_tile, w0, w1, w0_ptr, w1_ptr,
    valid, halves, CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = work.K // 128
    acc0 = gl.zeros([64, 64], gl.float32, HALF)
    acc1 = gl.zeros([64, 64], gl.float32, HALF)
    for k in range(GROUPS):
        ahead = gl.minimum(k + 1, GROUPS - 1)
        next_w0 = gl.load(w0_ptr + ahead)
        next_w1 = gl.load(w1_ptr + ahead)
        acc0, acc1 = _multiply_half(ring, stage, phase, acc0, acc1, w0, w1, CONSUMER, GATHER, TURNS)
        w0 = next_w0
        w1 = next_w1
        stage, phase = ring.next(stage, phase)
    h = dst.swiglu(acc0, acc1)
    q, scale = _quantise(h, _shared_amax(h, pair, CONSUMER, halves))
    r = gl.arange(0, 64, gl.SliceLayout(1, HALF))
    rows = row_tile * 128 + r
    cols = column_tile * 128 + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
    at = dst.ptr + rows.to(gl.int64)[:, None] * dst.width + cols[None, :]
    gl.store(at, q, mask=(r < valid)[:, None] & (cols < dst.width)[None, :])
    gl.store(dst.scale_ptr + column_tile * dst.num_rows + rows, scale)
    return stage, phase


@gluon.jit
def _block_tile(
    dst, out, ring, work, stage, phase, row_tile, column_tile, w, w_ptr, valid,
    CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = work.K // 128
    acc = gl.zeros([64, 128], gl.float32, MMA)
    for k in range(GROUPS):
        next_w = gl.load(w_ptr + gl.minimum(k + 1, GROUPS - 1))
        acc = _multiply_block(ring, stage, phase, acc, w, CONSUMER, GATHER, TURNS)
        w = next_w
        stage, phase = ring.next(stage, phase)
    column = column_tile * 256 + CONSUMER * 128
    if dst.SCATTER:
        _scatter(dst, out.index(1), acc, row_tile * 128, column, valid)
    else:
        _put_strips(dst, out.index(1), acc, row_tile, column, valid)
    return stage, phase


@gluon.jit
def _put_strips(dst, buffer, tile, row_tile, column, valid):
    # the second buffer: a whole tile begins with the first and lets one store be pending
    tma.store_wait(0)
    gl.thread_barrier()
    buffer.store(tile.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    for i in gl.static_range(4):
        if valid > i * 16:  # padding is not written: memory traffic is what these tiles cost
            tma.async_copy_shared_to_global(
                dst.strip_desc, [row_tile * 128 + i * 16, column], buffer.slice(i * 16, 16, 0)
            )


@gluon.jit
def _consume(
    dst, out, pair, ring, work, CONSUMER: gl.constexpr, GATHER: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 0
    halves = 0
    if CONSUMER == 1:
        pass_turn(1, TURNS)
    row_tile, column_tile = work.place(gl.program_id(0))
    expert = work.expert(row_tile)
    block0, block1 = work.blocks(column_tile)
    w0_ptr = work.scale_at(expert, block0)
    w1_ptr = work.scale_at(expert, block1)
    w0 = gl.load(w0_ptr)
    w1 = gl.load(w1_ptr)
    for t in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row_tile, column_tile = work.place(t)
        valid = gl.load(work.tile_rows_ptr + row_tile)
        next_row_tile, next_column_tile = work.place(t + gl.num_programs(0))
        next_expert = work.expert(next_row_tile)
        if valid > 64:
            stage, phase = _whole_tile(
                dst, out, ring, work, stage, phase, row_tile, column_tile, w0, w1, w0_ptr, w1_ptr,
                valid, CONSUMER, GATHER, TURNS,
            )  # fmt: skip
        elif work.FUSED:
            stage, phase = _half_tile(
                dst, pair, ring, work, stage, phase, row_tile, column_tile, w0, w1, w0_ptr, w1_ptr,
                valid, halves, CONSUMER, GATHER, TURNS,
            )  # fmt: skip
            halves += 1
        else:
            stage, phase = _block_tile(
                dst, out, ring, work, stage, phase, row_tile, column_tile,
                w0 if CONSUMER == 0 else w1, w0_ptr if CONSUMER == 0 else w1_ptr, valid,
                CONSUMER, GATHER, TURNS,
            )  # fmt: skip
        # The next tile's first scales arrive during this tile's epilogue.
        block0, block1 = work.blocks(next_column_tile)
        w0_ptr = work.scale_at(next_expert, block0)
        w1_ptr = work.scale_at(next_expert, block1)
        w0 = gl.load(w0_ptr)
        w1 = gl.load(w1_ptr)
    if CONSUMER == 0:
        take_turn(0, TURNS)
    tma.store_wait(0)


@gluon.jit
def _sm90_kernel(
    a_desc, a_ptr, b_desc, s_desc, s_ptr, c_desc, strip_desc, c_ptr, c_scale_ptr, b_scale_ptr,
    tile_expert_ptr, tile_rows_ptr, num_tiles_ptr, row_route_ptr, weight_ptr,
    num_rows, width, top_k, first_block, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    FUSED: gl.constexpr, GATHER: gl.constexpr, LIMITED: gl.constexpr, TURNS: gl.constexpr,
    SCATTER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = 1 if FUSED else 2
    LINE: gl.constexpr = (
        gl.SwizzledSharedLayout(1, 1, 1, [0]) if GATHER else gl.NVMMASharedLayout(0, 32, 1)
    )
    ring = Ring(
        gl.allocate_shared_memory(
            gl.float8e4nv, [STAGES * 2, 64, 128], gl.NVMMASharedLayout(128, 8, 2)
        ),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, 128], b_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 128], LINE),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        STAGES,
    )
    out0 = gl.allocate_shared_memory(c_desc.dtype, [OUT, 64, 128], c_desc.layout)
    out1 = gl.allocate_shared_memory(c_desc.dtype, [OUT, 64, 128], c_desc.layout)
    for i in gl.static_range(STAGES):
        # with GATHER each of the producer's 128 threads arrives when its copies are complete
        mbarrier.init(ring.full.index(i), count=129 if GATHER else 1)
        mbarrier.init(ring.empty.index(i), count=2)
    pair = Pair(
        gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(pair.ready, count=2)
    fence_async_shared()
    gl.thread_barrier()
    start_beside_the_kernel_in_front(PDL)
    num_tiles = gl.load(num_tiles_ptr)
    dst = Target(
        c_desc, strip_desc, c_ptr, c_scale_ptr, row_route_ptr, weight_ptr, width, num_rows,
        alpha, limit, LIMITED, SCATTER,
    )  # fmt: skip
    work = Work(
        tile_expert_ptr, tile_rows_ptr, b_scale_ptr, num_tiles, first_block,
        N, K, COLUMN_TILES, FUSED,
    )  # fmt: skip
    if GATHER:
        gl.warp_specialize(
            [
                (_consume, (dst, out0, pair, ring, work, 0, GATHER, TURNS)),
                (_consume, (dst, out1, pair, ring, work, 1, GATHER, TURNS)),
                (_produce_gathered, (a_ptr, b_desc, s_ptr, row_route_ptr, top_k, ring, work)),
            ],
            [4, 4],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (dst, out0, pair, ring, work, 0, GATHER, TURNS)),
                (_consume, (dst, out1, pair, ring, work, 1, GATHER, TURNS)),
                (_produce, (a_desc, b_desc, s_desc, ring, work, num_rows)),
            ],
            [4, 1],
            [232, 40],
        )


@dataclass(frozen=True)
class _Options:
    turns: bool
    pdl: bool
    alpha: float = 1.0
    limit: float | None = None
    first_block: int = 0
    weights: torch.Tensor | None = None


def _num_sms(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


def _launch(
    x: Operands,
    plan: Schedule,
    c: torch.Tensor,
    c_scale: torch.Tensor | None,
    options: _Options,
) -> None:
    _, n, k = x.b.shape
    fused = c_scale is not None
    if plan.align != ALIGN or k % 128 or n % (256 if fused else 128):
        raise ValueError(
            f"grouped_gemm_sm90: expected tiles of {ALIGN} rows and whole blocks of 128, "
            f"found {plan.align} rows, N {n}, K {k}"
        )
    b = TensorDescriptor.from_tensor(x.b.view(-1, k), [128, 128], _FP8)
    scatter = options.weights is not None
    if scatter and c.dtype != torch.bfloat16:  # the descriptor only names the buffers' layout then
        out = strip = TensorDescriptor.from_tensor(c.view(torch.bfloat16), [64, 128], _BF16)
    else:
        out, strip = (
            TensorDescriptor.from_tensor(c, [rows, 128], _FP8 if fused else _BF16)
            for rows in (64, 16)
        )
    a_desc = s_desc = None
    if not x.by_token:
        a_desc = TensorDescriptor.from_tensor(x.a, [64, 128], _FP8)
        s_desc = TensorDescriptor.from_tensor(x.a_scale.view(-1), [128], _FP32)
    width = n // 2 if fused else c.shape[1]
    limit, scales = options.limit or 0.0, c_scale if fused else x.b_scale  # the latter unused
    weights = options.weights if scatter else x.b_scale  # the latter unused
    _sm90_kernel[(_num_sms(x.a.device),)](
        a_desc, x.a, b, s_desc, x.a_scale, out, strip, c, scales, x.b_scale,
        plan.tile_expert, plan.tile_rows, plan.num_tiles, plan.row_route, weights,
        plan.num_rows, c.shape[1], plan.route_row.shape[1], options.first_block,
        options.alpha, limit, N=n, K=k, COLUMN_TILES=triton.cdiv(width, 128 if fused else 256),
        STAGES=4 if fused else 3, FUSED=fused, GATHER=x.by_token,
        LIMITED=options.limit is not None, TURNS=options.turns, SCATTER=scatter,
        PDL=options.pdl, launch_pdl=options.pdl, num_warps=4, maxnreg=168,
    )  # fmt: skip


def grouped_gemm_swiglu(
    x: Operands,
    plan: Schedule,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    turns: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As grouped_gemm.grouped_gemm_swiglu; with ``x.by_token`` A's rows are gathered."""
    rows, inter = plan.num_rows, x.b.shape[1] // 2
    q = torch.empty((rows, inter), dtype=torch.float8_e4m3fn, device=x.a.device)
    qs = torch.empty((inter // 128, rows), dtype=torch.float32, device=x.a.device)
    _launch(x, plan, q, qs, _Options(turns, pdl, alpha, limit))
    return q, qs


def grouped_gemm(
    x: Operands,
    plan: Schedule,
    *,
    first_column: int = 0,
    out: torch.Tensor | None = None,
    turns: bool = True,
    pdl: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """As grouped_gemm.grouped_gemm."""
    if out is None:
        out = torch.empty((plan.num_rows, x.b.shape[1]), dtype=torch.bfloat16, device=x.a.device)
    check_out(plan, out, first_column, 128, weights)
    options = _Options(turns, pdl, first_block=first_column // 128, weights=weights)
    _launch(x, plan, out, None, options)
    return out
