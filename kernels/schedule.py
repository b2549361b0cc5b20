# SPDX-License-Identifier: Apache-2.0
"""Where routed rows go: an expert-contiguous order, padded so that no tile has two experts.

Expert e owns ``ceil(count[e] / align)`` tiles of ``align`` rows. Tiles of all experts follow each
other without gaps; a tile index at or beyond the last one has expert -1, and so has a route that
is absent (id -1, out of range, or mapped to -1). The host never reads a count: everything is
sized by the worst case ``max_tiles``.

    ids [routes] -> route_row [routes]   row of the route, or -1
                    row_route [rows]     the inverse; -1 in padding rows
                    tile_expert [tiles]  expert of the tile, or -1
                    tile_rows [tiles]    valid rows in the tile, 0 ... align

Up to 2,048 routes: one launch, in which each program counts all routes and ranks a few of them.
Beyond: count (per block of routes), scan (over blocks), place. The order within an expert is that
of the routes, so results do not depend on timing.

With PDL the last launch lets its successor start at once, while counts are still being made: a
successor waits before it reads anything of the schedule, and at the latest at its end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SINGLE_LAUNCH_ROUTES = 2048
_BLOCK = 128  # routes ranked by one program of the three-launch form


class Schedule(NamedTuple):
    route_row: torch.Tensor  # [num_tokens, top_k] int32
    row_route: torch.Tensor  # [max_tiles * align] int32
    tile_expert: torch.Tensor  # [max_tiles] int32
    tile_rows: torch.Tensor  # [max_tiles] int32
    num_tiles: torch.Tensor  # [1] int32, live tiles
    align: int
    scratch: torch.Tensor | None = None  # keeps memory of running kernels from being given away

    @property
    def num_rows(self) -> int:
        return self.row_route.shape[0]


def max_tiles(num_routes: int, num_experts: int, align: int) -> int:
    """Tiles needed by the worst routing: every live expert may waste almost a tile."""
    live = min(num_routes, num_experts)
    return min(num_routes, (num_routes + live * (align - 1)) // align)


@triton.jit
def load_experts(
    ids_ptr, map_ptr, index, num_routes, num_global, E: tl.constexpr, MAPPED: tl.constexpr
):
    """Local expert of each route, or -1."""
    e = tl.load(ids_ptr + index, mask=index < num_routes, other=-1)
    e = tl.where((e >= 0) & (e < num_global), e, -1)
    if MAPPED:
        e = tl.load(map_ptr + e, mask=e >= 0, other=-1)
    return tl.where(e < E, e, -1)


@triton.jit
def earlier_equal(e, index, others, other_index):
    """How many earlier routes among ``others`` have the same expert."""
    same = (e[:, None] == others[None, :]) & (other_index[None, :] < index[:, None])
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit
def write_tiles(
    counts,
    tile_end,
    tile_expert_ptr,
    tile_rows_ptr,
    tiles,
    num_tiles,
    align,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """Expert and valid rows of the tiles numbered ``tiles``."""
    experts = tl.arange(0, E_PAD)
    last = tl.where(experts < E, tile_end, 2147483647)
    e = tl.sum(
        (last[None, :] <= tiles[:, None]).to(tl.int32), axis=1
    )  # the first whose end lies beyond
    hit = experts[None, :] == e[:, None]
    end = tl.sum(tl.where(hit, tile_end[None, :], 0), axis=1)
    count = tl.sum(tl.where(hit, counts[None, :], 0), axis=1)
    left = count - (tiles - (end - (count + align - 1) // align)) * align
    live = e < E
    tl.store(tile_expert_ptr + tiles, tl.where(live, e, -1), mask=tiles < num_tiles)
    tl.store(
        tile_rows_ptr + tiles, tl.where(live, tl.minimum(left, align), 0), mask=tiles < num_tiles
    )


@triton.jit
def put_rows(e, index, rank, tile_start, route_row_ptr, row_route_ptr, num_routes, align):
    live = e >= 0
    row = tl.gather(tile_start, tl.where(live, e, 0), 0) * align + rank
    tl.store(route_row_ptr + index, tl.where(live, row, -1), mask=index < num_routes)
    tl.store(row_route_ptr + row, index, mask=live)
    return tl.where(live, row, -1)


@triton.jit
def _schedule_kernel(
    ids_ptr, map_ptr, route_row_ptr, row_route_ptr, tile_expert_ptr, tile_rows_ptr, tile_count_ptr,
    num_routes, num_global, num_tiles, align,
    E: tl.constexpr, E_PAD: tl.constexpr, R_PAD: tl.constexpr, CHUNK: tl.constexpr,
    RANKED: tl.constexpr, TILES: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One launch: program p counts all routes, places routes and tiles of its share."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    e = load_experts(ids_ptr, map_ptr, index, num_routes, num_global, E, MAPPED)
    everyone = load_experts(
        ids_ptr, map_ptr, tl.arange(0, R_PAD), num_routes, num_global, E, MAPPED
    )
    counts = tl.histogram(everyone, E_PAD, mask=everyone >= 0)
    rank = tl.zeros((RANKED,), tl.int32)
    for start in range(0, tl.minimum(R_PAD, (tl.program_id(0) + 1) * RANKED), CHUNK):
        other_index = start + tl.arange(0, CHUNK)
        others = load_experts(ids_ptr, map_ptr, other_index, num_routes, num_global, E, MAPPED)
        rank += earlier_equal(e, index, others, other_index)
    needed = (counts + align - 1) // align
    tile_end = tl.cumsum(needed, 0)
    put_rows(e, index, rank, tile_end - needed, route_row_ptr, row_route_ptr, num_routes, align)
    tl.store(tile_count_ptr, tl.sum(needed, 0), mask=tl.program_id(0) == 0)
    for start in range(tl.program_id(0) * TILES, num_tiles, tl.num_programs(0) * TILES):
        write_tiles(
            counts,
            tile_end,
            tile_expert_ptr,
            tile_rows_ptr,
            start + tl.arange(0, TILES),
            num_tiles,
            align,
            E,
            E_PAD,
        )


@triton.jit
def _count_kernel(
    ids_ptr, map_ptr, rank_ptr, block_count_ptr, num_routes, num_global,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rank of each route within its block, and the block's histogram."""
    if PDL:  # only now may others start: what they read without waiting is complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK
    index = first + tl.arange(0, BLOCK)
    e = load_experts(ids_ptr, map_ptr, index, num_routes, num_global, E, MAPPED)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, CHUNK):
        other_index = first + start + tl.arange(0, CHUNK)
        others = load_experts(ids_ptr, map_ptr, other_index, num_routes, num_global, E, MAPPED)
        rank += earlier_equal(e, index, others, other_index)
    tl.store(rank_ptr + index, rank, mask=index < num_routes)
    at = block_count_ptr + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD)
    tl.store(at, tl.histogram(e, E_PAD, mask=e >= 0))


@triton.jit
def _scan_kernel(
    block_count_ptr,
    counts_ptr,
    num_blocks,
    E_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exclusive sums over blocks in place, and the totals, for ``EXPERTS`` experts a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        at = block_count_ptr + blocks[:, None] * E_PAD + experts[None, :]
        inside = blocks[:, None] < num_blocks
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(counts_ptr + experts, total)


@triton.jit
def _place_kernel(
    ids_ptr, map_ptr, rank_ptr, block_base_ptr, counts_ptr, row_route_ptr,
    tile_expert_ptr, tile_rows_ptr, tile_count_ptr,
    num_routes, num_global, num_tiles, align,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows from ranks, block bases and padded totals (in place of the ranks), and the tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = load_experts(ids_ptr, map_ptr, index, num_routes, num_global, E, MAPPED)
    experts = tl.arange(0, E_PAD)
    counts = tl.load(counts_ptr + experts)
    needed = (counts + align - 1) // align
    tile_end = tl.cumsum(needed, 0)
    rank = tl.load(rank_ptr + index, mask=index < num_routes, other=0)
    rank += tl.load(block_base_ptr + tl.program_id(0) * E_PAD + e, mask=e >= 0, other=0)
    put_rows(e, index, rank, tile_end - needed, rank_ptr, row_route_ptr, num_routes, align)
    tl.store(tile_count_ptr, tl.sum(needed, 0), mask=tl.program_id(0) == 0)
    for start in range(tl.program_id(0) * TILES, num_tiles, tl.num_programs(0) * TILES):
        write_tiles(
            counts,
            tile_end,
            tile_expert_ptr,
            tile_rows_ptr,
            start + tl.arange(0, TILES),
            num_tiles,
            align,
            E,
            E_PAD,
        )


def empty_schedule(
    topk_ids: torch.Tensor, num_local_experts: int, align: int, expert_map: torch.Tensor | None
) -> Schedule:
    """Checked arguments and buffers for the worst case."""
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous():
        raise ValueError(
            f"topk_ids: expected contiguous int32, found {topk_ids.dtype}, "
            f"strides {topk_ids.stride()}"
        )
    if expert_map is not None and expert_map.dtype != torch.int32:
        raise ValueError(f"expert_map: expected int32, found {expert_map.dtype}")
    num_routes, dev = topk_ids.numel(), topk_ids.device
    num_tiles = max_tiles(num_routes, num_local_experts, align)
    route_row = torch.empty(topk_ids.shape, dtype=torch.int32, device=dev)
    row_route = torch.empty(num_tiles * align, dtype=torch.int32, device=dev)
    tiles = torch.empty(2 * num_tiles + 1, dtype=torch.int32, device=dev)
    tiles = tiles[:num_tiles], tiles[num_tiles:-1], tiles[-1:]
    return Schedule(route_row, row_route, *tiles, align)


def schedule(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    align: int,
    *,
    expert_map: torch.Tensor | None = None,
    pdl: bool = False,
) -> Schedule:
    """Order the routes by expert.

    Args:
        topk_ids: [num_tokens, top_k] int32, contiguous; -1 is absent.
        num_local_experts: experts held here.
        align: rows of a tile, a power of two.
        expert_map: int32, global id -> local id or -1; without it ids are local.
    """
    out = empty_schedule(topk_ids, num_local_experts, align, expert_map)
    tiles = out.tile_expert, out.tile_rows, out.num_tiles
    num_routes, num_tiles = topk_ids.numel(), out.tile_expert.numel()
    route_row, row_route, dev = out.route_row, out.row_route, topk_ids.device
    if num_routes == 0:
        return out
    num_global = num_local_experts if expert_map is None else expert_map.shape[0]
    e_pad = triton.next_power_of_2(max(num_local_experts, 16))
    sizes = {"E": num_local_experts, "E_PAD": e_pad, "MAPPED": expert_map is not None, "TILES": 16}
    overlap = {"PDL": pdl, "launch_pdl": pdl}
    if num_routes <= SINGLE_LAUNCH_ROUTES:
        r_pad = max(32, triton.next_power_of_2(num_routes))
        _schedule_kernel[(triton.cdiv(num_routes, 16),)](
            topk_ids, expert_map, route_row, row_route, *tiles,
            num_routes, num_global, num_tiles, align,
            R_PAD=r_pad, CHUNK=min(r_pad, 512), RANKED=16, **sizes, **overlap,
        )  # fmt: skip
        return out
    blocks = triton.cdiv(num_routes, _BLOCK)
    block_count = torch.empty((blocks + 1, e_pad), dtype=torch.int32, device=dev)
    counts = block_count[blocks]
    tiles_per_program = sizes.pop("TILES")
    _count_kernel[(blocks,)](
        topk_ids,
        expert_map,
        route_row,
        block_count,
        num_routes,
        num_global,
        BLOCK=_BLOCK,
        CHUNK=min(e_pad, 128),
        num_warps=8,
        **sizes,
        **overlap,
    )
    experts = min(8, e_pad)
    _scan_kernel[(e_pad // experts,)](
        block_count, counts, blocks, E_PAD=e_pad, BLOCKS=128, EXPERTS=experts, **overlap
    )
    _place_kernel[(blocks,)](
        topk_ids, expert_map, route_row, block_count, counts, row_route, *tiles,
        num_routes, num_global, num_tiles, align,
        BLOCK=_BLOCK, TILES=tiles_per_program, **sizes, **overlap,
    )  # fmt: skip
    return out._replace(scratch=block_count)
