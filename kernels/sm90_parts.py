# SPDX-License-Identifier: Apache-2.0
"""What the partitions of grouped_gemm_sm90 share: stages, work, target, and the turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
HALF = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
)


@aggregate
class Ring:
    """Stages in shared memory: A in halves of 64 rows, B in two column blocks, row scales."""

    a: gl.shared_memory_descriptor  # [2 * STAGES, 64, 128]
    b: gl.shared_memory_descriptor  # [2 * STAGES, 128, 128]
    scale: gl.shared_memory_descriptor  # [STAGES, 128]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, scale, full, empty, STAGES):
        self.a = a
        self.b = b
        self.scale = scale
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def next(self, stage, phase):
        stage += 1
        wrapped = stage == self.STAGES
        return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@aggregate
class Pair:
    """Where the consumers tell each other the greatest values of a tile that they share."""

    amax: gl.shared_memory_descriptor  # [4, 64]: two tiles deep
    ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, amax, ready):
        self.amax = amax
        self.ready = ready


@aggregate
class Target:
    """Where results go: by TMA, or by plain stores from tiles that the consumers share."""

    desc: tma.tensor_descriptor  # 64 rows
    strip_desc: tma.tensor_descriptor  # 16 rows, plain only
    ptr: gl.tensor
    scale_ptr: gl.tensor  # [width / 128, num_rows], fused only
    row_route_ptr: gl.tensor
    weight_ptr: gl.tensor  # of routes, SCATTER only
    width: gl.tensor
    num_rows: gl.tensor
    alpha: gl.tensor
    limit: gl.tensor
    LIMITED: gl.constexpr
    SCATTER: gl.constexpr  # rows go to their tokens, weighted

    @gluon.constexpr_function
    def __init__(
        self, desc, strip_desc, ptr, scale_ptr, row_route_ptr, weight_ptr, width, num_rows,
        alpha, limit, LIMITED, SCATTER,
    ):  # fmt: skip
        self.desc = desc
        self.strip_desc = strip_desc
        self.ptr = ptr
        self.scale_ptr = scale_ptr
        self.row_route_ptr = row_route_ptr
        self.weight_ptr = weight_ptr
        self.width = width
        self.num_rows = num_rows
        self.alpha = alpha
        self.limit = limit
        self.LIMITED = gl.constexpr(LIMITED)
        self.SCATTER = gl.constexpr(SCATTER)

    @gluon.jit
    def swiglu(self, gate, up):
        if self.LIMITED:
            gate = gl.minimum(gate, self.limit)
            up = gl.minimum(gl.maximum(up, -self.limit), self.limit)
        return gate / (1.0 + gl.exp(-self.alpha * gate)) * up


@aggregate
class Work:
    """Which tiles there are and where B's rows and scales of a tile lie."""

    tile_expert_ptr: gl.tensor
    tile_rows_ptr: gl.tensor
    b_scale_ptr: gl.tensor
    num_tiles: gl.tensor
    first_block: gl.tensor  # first column block (of 128), of a slab
    N: gl.constexpr  # rows of B per expert
    K: gl.constexpr
    COLUMN_TILES: gl.constexpr
    FUSED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tile_expert_ptr, tile_rows_ptr, b_scale_ptr, num_tiles, first_block,
        N, K, COLUMN_TILES, FUSED,
    ):  # fmt: skip
        self.tile_expert_ptr = tile_expert_ptr
        self.tile_rows_ptr = tile_rows_ptr
        self.b_scale_ptr = b_scale_ptr
        self.num_tiles = num_tiles
        self.first_block = first_block
        self.N = gl.constexpr(N)
        self.K = gl.constexpr(K)
        self.COLUMN_TILES = gl.constexpr(COLUMN_TILES)
        self.FUSED = gl.constexpr(FUSED)

    @gluon.jit
    def count(self):
        return self.num_tiles * self.COLUMN_TILES

    @gluon.jit
    def place(self, t):
        """Row tile and column tile of work item t; the last item stands for any beyond it."""
        t = gl.maximum(gl.minimum(t, self.count() - 1), 0)
        first = (t // (2 * self.COLUMN_TILES)) * 2
        height = gl.minimum(self.num_tiles - first, 2)
        height = gl.maximum(height, 1)
        r = t % (2 * self.COLUMN_TILES)
        return first + r % height, r // height

    @gluon.jit
    def expert(self, row_tile):
        return gl.maximum(gl.load(self.tile_expert_ptr + row_tile), 0)

    @gluon.jit
    def blocks(self, column_tile):
        """The two column blocks (of 128) of a tile."""
        if self.FUSED:
            return column_tile, column_tile + self.N // 256
        else:
            first = self.first_block + column_tile * 2
            return first, gl.minimum(first + 1, self.N // 128 - 1)

    @gluon.jit
    def scale_at(self, expert, block):
        return self.b_scale_ptr + (expert * (self.N // 128) + block) * (self.K // 128)


@gluon.jit
def _asm(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_beside_the_kernel_in_front(PDL: gl.constexpr):
    """Programmatic dependent launch: let the next kernel start, wait for the previous one."""
    if PDL:
        _asm("griddepcontrol.wait; mov.u32 $0, 0;")
        _asm("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def take_turn(CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    if not TURNS:
        pass
    elif CONSUMER == 0:
        _asm("bar.sync 10, 256; mov.u32 $0, 0;")
    else:
        _asm("bar.sync 11, 256; mov.u32 $0, 0;")


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    if not TURNS:
        pass
    elif CONSUMER == 0:
        _asm("bar.arrive 11, 256; mov.u32 $0, 0;")
    else:
        _asm("bar.arrive 10, 256; mov.u32 $0, 0;")


@gluon.jit
def pin(never, ptr, acc):
    # A branch that reads acc keeps ptxas from sinking its promotion below the next MMA: a spill.
    if never:
        rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))
        cols = gl.arange(0, 128, gl.SliceLayout(0, MMA))
        gl.store(ptr + rows[:, None] * 128 + cols[None, :], acc)
