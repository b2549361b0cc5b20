# SPDX-License-Identifier: Apache-2.0
"""The plan of a dispatch, made on the device: how many rows go where, and where each one lands.

    count    rank the source's routes, tell every rank how many go where                (publishes)
    arrange  all counts are known everywhere: rows of every route, tiles, overflow      (waits)

Rows land in the padded expert-contiguous order of kernels/schedule.py: by local expert, within it
by (source rank, token, slot). As everybody knows all counts before any row moves, a capacity that
would not suffice is seen by all ranks at once. The host reads nothing; sizes are worst cases.

Shapes: topk_ids [T, k] int32; see ep_buffers.py for the rest. Grids: count one program per block of
tokens, the last of which sums over blocks; arrange a few.
"""

import torch
import triton
import triton.language as tl

from .ep_buffers import COUNTS, Endpoint, power_of_2
from .ep_sync import (
    EPOCH,
    STATUS_OVERFLOW,
    STATUS_REFUSED,
    STATUS_TIMEOUT,
    last_program,
    peer_ptr,
    publish,
    report,
    wait_for_all,
)

PHASE_COUNTS = tl.constexpr(COUNTS)


@triton.jit
def places(ids_ptr, place_ptr, index, mask, E: tl.constexpr):
    """Place of each route's expert; E, one past the last, where it is absent."""
    e = tl.load(ids_ptr + index, mask=mask, other=-1)
    known = (e >= 0) & (e < E)
    at = tl.load(place_ptr + e, mask=known, other=-1)
    return tl.where(at >= 0, at, E)


@triton.jit
def _block_routes(first, num_tokens, R: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr):
    """Routes ``first ... first + R`` counted with K_PAD slots per token: memory index, mask."""
    r = first + tl.arange(0, R)
    return (r // K_PAD) * K + r % K_PAD, (r // K_PAD < num_tokens) & (r % K_PAD < K)


@triton.jit
def _scan_blocks(block_ptr, num_blocks, WIDTH: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr):
    """Columns FIRST ... FIRST + N of the blocks' counts become those of earlier blocks; totals."""
    total = tl.zeros((N,), tl.int32)
    col = FIRST + tl.arange(0, N)
    for start in range(0, num_blocks, 32):
        b = start + tl.arange(0, 32)
        at = block_ptr + b[:, None] * WIDTH + col[None, :]
        count = tl.load(at, mask=(b < num_blocks)[:, None], other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=(b < num_blocks)[:, None])
        total += tl.sum(count, axis=0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "refusal"])  # one compilation for all batches
def _count_kernel(
    ids_ptr, place_ptr, rank_ptr, nth_ptr, block_ptr, control_ptr, status_ptr, peers_ptr,
    counts_at, flags_at, num_tokens, me, refusal,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    R: tl.constexpr = TOKENS * K_PAD
    WIDTH: tl.constexpr = E_PAD + W_PAD
    pid = tl.program_id(0)
    index, mask = _block_routes(pid * R, num_tokens, R, K, K_PAD)
    at = places(ids_ptr, place_ptr, index, mask, E)
    r = tl.arange(0, R)
    rank = tl.zeros((R,), tl.int32)
    for start in range(0, R, CHUNK):
        other_index, other_mask = _block_routes(pid * R + start, num_tokens, CHUNK, K, K_PAD)
        other = places(ids_ptr, place_ptr, other_index, other_mask, E)
        earlier = (start + tl.arange(0, CHUNK))[None, :] < r[:, None]
        rank += tl.sum((earlier & (other[None, :] == at[:, None])).to(tl.int32), axis=1)
    tl.store(rank_ptr + index, rank, mask=mask)
    row_ptr = block_ptr + pid * WIDTH
    tl.store(row_ptr + tl.arange(0, E_PAD), tl.histogram(at, E_PAD))
    to = tl.reshape(at, (TOKENS, K_PAD)) // (E // W)
    token = pid * TOKENS + tl.arange(0, TOKENS)
    for peer in tl.static_range(W_PAD):
        goes = tl.max((to == peer).to(tl.int32), axis=1)
        if peer < W:
            earlier_payloads = tl.cumsum(goes, 0) - goes
            tl.store(nth_ptr + token * W + peer, earlier_payloads, mask=token < num_tokens)
            tl.store(row_ptr + E_PAD + peer, tl.sum(goes, axis=0))
        else:
            tl.store(row_ptr + E_PAD + peer, 0)
    if not last_program(control_ptr + 1):
        return
    routes = _scan_blocks(block_ptr, tl.num_programs(0), WIDTH, 0, E_PAD)
    payloads = _scan_blocks(block_ptr, tl.num_programs(0), WIDTH, E_PAD, W_PAD)
    epoch = tl.load(control_ptr + EPOCH) + 1
    tl.store(control_ptr + EPOCH, epoch)
    for peer in range(W):
        out = peer_ptr(peers_ptr, peer, counts_at, tl.int32) + me * (E + W + 1)
        tl.store(out + tl.arange(0, E_PAD), routes, mask=tl.arange(0, E_PAD) < E)
        tl.store(out + E + tl.arange(0, W_PAD), payloads, mask=tl.arange(0, W_PAD) < W)
        tl.store(out + E + W, refusal)
    publish(peers_ptr, flags_at, PHASE_COUNTS, me, epoch, W, W_PAD)


def count(ep: Endpoint, slot: int, topk_ids: torch.Tensor, *, refusal: int = 0) -> None:
    """First step. ``refusal`` tells all ranks that this one cannot go on."""
    lay, mine = ep.layout, ep.slots[slot]
    routes = lay.block_tokens * power_of_2(lay.top_k)
    _count_kernel[(max(1, triton.cdiv(topk_ids.shape[0], lay.block_tokens)),)](
        topk_ids, ep.place, mine.rank, mine.nth, mine.block, mine.control, ep.status, ep.peers,
        lay.at("counts", slot), lay.at("flags", slot), topk_ids.shape[0], ep.me, refusal,
        W=lay.world, W_PAD=power_of_2(lay.world), E=lay.num_experts,
        E_PAD=power_of_2(lay.num_experts + 1), K=lay.top_k, K_PAD=power_of_2(lay.top_k),
        TOKENS=lay.block_tokens, CHUNK=min(32, routes), num_warps=8,
    )  # fmt: skip


@triton.jit
def _write_tiles(
    count, end, tile_expert_ptr, tile_rows_ptr, tiles, num_tiles, align,
    LOCAL: tl.constexpr, LOCAL_PAD: tl.constexpr,
):  # fmt: skip
    """Expert and valid rows of the tiles numbered ``tiles``, as kernels/schedule.py does."""
    experts = tl.arange(0, LOCAL_PAD)
    last = tl.where(experts < LOCAL, end, 2147483647)
    e = tl.sum((last[None, :] <= tiles[:, None]).to(tl.int32), axis=1)
    hit = experts[None, :] == e[:, None]
    e_end = tl.sum(tl.where(hit, end[None, :], 0), axis=1)
    e_count = tl.sum(tl.where(hit, count[None, :], 0), axis=1)
    left = e_count - (tiles - (e_end - (e_count + align - 1) // align)) * align
    live = e < LOCAL
    tl.store(tile_expert_ptr + tiles, tl.where(live, e, -1), mask=tiles < num_tiles)
    valid = tl.where(live, tl.minimum(left, align), 0)
    tl.store(tile_rows_ptr + tiles, valid, mask=tiles < num_tiles)


@triton.jit
def _arrange_kernel(
    control_ptr, status_ptr, alarm_ptr, counts_ptr, flags_ptr, first_row_ptr, tile_expert_ptr,
    tile_rows_ptr, num_tiles_ptr, num_tiles, align, me, patience,
    W: tl.constexpr, W_PAD: tl.constexpr, LOCAL: tl.constexpr, LOCAL_PAD: tl.constexpr,
    TILES: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    late = wait_for_all(flags_ptr, tl.load(control_ptr + EPOCH), patience, W, W_PAD, CLOCK)
    if late >= 0:
        report(status_ptr, alarm_ptr, STATUS_TIMEOUT, PHASE_COUNTS, late)
        return
    WORDS: tl.constexpr = W * LOCAL + W + 1
    rank = tl.arange(0, W_PAD)
    e = tl.arange(0, LOCAL_PAD)
    inside = (rank < W)[:, None] & (e < LOCAL)[None, :]
    rows = tl.zeros((W_PAD, LOCAL_PAD), tl.int32)
    earlier = tl.zeros((W_PAD, LOCAL_PAD), tl.int32)
    refuser = -1
    for source in range(W):
        at = counts_ptr + source * WORDS
        n = tl.load(at + rank[:, None] * LOCAL + e[None, :], mask=inside, other=0)
        rows += n
        earlier += tl.where(source < me, n, 0)
        refuser = tl.where(tl.load(at + W * LOCAL + W) != 0, source, refuser)
    tiles = (rows + align - 1) // align
    end = tl.cumsum(tiles, 1)
    needed = tl.max(end, axis=1)
    if refuser >= 0:
        report(status_ptr, alarm_ptr, STATUS_REFUSED, PHASE_COUNTS, refuser)
    elif tl.max(needed, axis=0) > num_tiles:
        report(status_ptr, alarm_ptr, STATUS_OVERFLOW, PHASE_COUNTS, tl.argmax(needed, axis=0))
    pid = tl.program_id(0)
    if pid == 0:
        first = (end - tiles) * align + earlier
        tl.store(num_tiles_ptr, tl.sum(tl.where(rank == me, needed, 0), axis=0))
        tl.store(first_row_ptr + rank[:, None] * LOCAL + e[None, :], first, mask=inside)
    own = (rank == me)[:, None]
    own_rows = tl.sum(tl.where(own, rows, 0), axis=0)
    own_end = tl.sum(tl.where(own, end, 0), axis=0)
    for start in range(pid * TILES, num_tiles, tl.num_programs(0) * TILES):
        _write_tiles(
            own_rows, own_end, tile_expert_ptr, tile_rows_ptr, start + tl.arange(0, TILES),
            num_tiles, align, LOCAL, LOCAL_PAD,
        )  # fmt: skip


def arrange(ep: Endpoint, slot: int) -> None:
    """Second step: waits for all counts; refusals and overflow are known to all ranks from here."""
    lay, mine = ep.layout, ep.slots[slot]
    tiles = mine.tile_expert.shape[0]
    counts = ep.view("counts", slot, torch.int32, lay.world, lay.words)
    _arrange_kernel[(min(16, triton.cdiv(tiles, 16)),)](
        mine.control, ep.status, ep.alarm, counts,
        ep.view("flags", slot, torch.int32, 3, lay.world)[COUNTS], mine.first_row,
        mine.tile_expert, mine.tile_rows, mine.num_tiles, tiles, lay.align, ep.me, ep.patience,
        W=lay.world, W_PAD=power_of_2(lay.world), LOCAL=lay.local, LOCAL_PAD=power_of_2(lay.local),
        TILES=16, CLOCK=ep.clock, num_warps=8,
    )  # fmt: skip
