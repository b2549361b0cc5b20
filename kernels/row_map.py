# SPDX-License-Identifier: Apache-2.0
"""Where each route's row goes when rows are ordered by expert, from a mask or from ids.

Rows of one expert keep the tokens' order. No host sync. For a mask:

    words    32 tokens of an expert as the bits of one integer            [blocks, E]
    scan     bits set before each block; the last program to finish sums over experts
    assign   row of a route = start of its expert + bits before its block + bits before its token
A permutation assigns each token's rows as it goes, so that the map costs two launches. For ids:
counts of each block of 128 routes, the same scan, and an assignment with the rank in the block.

Layouts, all int32 but ``targets``:
    mask   row_map [T, 2 E + 1]: rows of the token's n routes, from column E their experts, in
           column 2 E n itself; what lies between is never written
    ids    row_map [T, k]: a row, or -1 where the id is not an expert's
A mask's rows are counted without padding: ``pad_offsets[e]`` is to be added where experts start
aligned, or not, with the same map. The rows of ids include it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Launches
from .launch_counter import overlaps, zeroed_line

_SCANNED = 4096  # values that a program of the scan holds
_TOKENS = tl.constexpr(32)  # of a word
_IDS_PER_BLOCK = 128


class RowMap(NamedTuple):
    row_map: torch.Tensor  # see above
    offsets: torch.Tensor  # [num_experts + 1] first row of each expert without padding, and the end
    pad_offsets: torch.Tensor  # [num_experts + 1] padding rows before each expert, and all of them
    targets: torch.Tensor  # [num_experts] int64, rows of each expert with its padding


class Pending(NamedTuple):
    """A mask's map before its rows are assigned."""

    row_map: torch.Tensor  # [num_tokens, 2 * num_experts + 1], nothing in it yet
    words: torch.Tensor  # [blocks, num_experts]
    before: torch.Tensor  # [blocks, num_experts] routes of the expert before the block


@triton.jit
def _bits_set(word):
    """Population count of each 32-bit integer."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _words_kernel(
    mask_ptr, words_ptr, num_tokens, row_stride,
    E: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bit = tl.arange(0, _TOKENS)
    token = tl.program_id(0) * _TOKENS + bit
    expert = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    at = mask_ptr + token.to(tl.int64)[:, None] * row_stride + expert[None, :]
    routed = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    words = tl.sum(routed << bit[:, None], 0)
    tl.store(words_ptr + tl.program_id(0).to(tl.int64) * E + expert, words, mask=expert < E)


@triton.jit
def _count_ids_kernel(
    ids_ptr, counts_ptr, num_routes,
    E: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    route = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + route, mask=route < num_routes, other=-1).to(tl.int32)
    expert = tl.arange(0, WIDTH)
    counts = tl.histogram(tl.where(ids < 0, E, ids), WIDTH, mask=(ids >= 0) & (ids < E))
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * E + expert, counts, mask=expert < E)


@triton.jit
def _scan_kernel(
    counts_ptr, before_ptr, totals_ptr, offsets_ptr, pads_ptr, targets_ptr, ticket_ptr,
    num_blocks, align,
    E: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (block < num_blocks)[:, None] & (expert < E)[None, :]
        at = block.to(tl.int64)[:, None] * E + expert[None, :]
        counts = tl.load(counts_ptr + at, mask=inside, other=0)
        if WORDS:
            counts = _bits_set(counts)
        tl.store(before_ptr + at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, before, mask=expert < E)
    tl.debug_barrier()  # the ticket releases the totals
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        every = tl.arange(0, WIDTH)
        total = tl.load(totals_ptr + every, mask=every < E, other=0, volatile=True)
        target = tl.cdiv(total, align) * align
        end, pads = tl.cumsum(total, 0), tl.cumsum(target - total, 0)
        tl.store(offsets_ptr + 1 + every, end, mask=every < E)
        tl.store(pads_ptr + 1 + every, pads, mask=every < E)
        tl.store(targets_ptr + every, target.to(tl.int64), mask=every < E)
        tl.store(offsets_ptr, 0)
        tl.store(pads_ptr, 0)
        tl.atomic_xchg(ticket_ptr, 0, sem="relaxed")


@triton.jit
def assign_rows(
    map_ptr, words_ptr, before_ptr, offsets_ptr, token, E: tl.constexpr, WIDTH: tl.constexpr
):
    """Writes one token's part of a mask's map; returns its number of routes."""
    expert = tl.arange(0, WIDTH)
    inside = expert < E
    at = token // _TOKENS * E + expert
    word = tl.load(words_ptr + at, mask=inside, other=0)
    bit = (token % _TOKENS).to(tl.int32)
    routed = (word >> bit) & 1
    earlier = (tl.full([], 1, tl.int32) << bit) - 1
    row = tl.load(before_ptr + at, mask=inside, other=0) + _bits_set(word & earlier)
    row += tl.load(offsets_ptr + expert, mask=inside, other=0)
    row_map = map_ptr + token * (2 * E + 1)
    place = row_map + tl.cumsum(routed, 0) - routed
    tl.store(place, row, mask=routed != 0)
    tl.store(place + E, expert, mask=routed != 0)
    count = tl.sum(routed, 0)
    tl.store(row_map + 2 * E, count)
    tl.debug_barrier()  # the program reads what its threads have written
    return count


@triton.jit
def _assign_mask_kernel(
    map_ptr, words_ptr, before_ptr, offsets_ptr, E: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    assign_rows(map_ptr, words_ptr, before_ptr, offsets_ptr, token, E, WIDTH)


@triton.jit
def _assign_ids_kernel(
    ids_ptr, before_ptr, offsets_ptr, pads_ptr, map_ptr, num_routes,
    E: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROUTES
    mine = first + tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + mine, mask=mine < num_routes, other=-1).to(tl.int32)
    other = first + tl.arange(0, ROUTES)[None, :]
    others = tl.load(ids_ptr + other, mask=other < num_routes, other=-1).to(tl.int32)
    earlier = (others == ids[:, None]) & (other < mine[:, None])
    valid = (ids >= 0) & (ids < E)
    block = before_ptr + tl.program_id(0).to(tl.int64) * E + ids
    row = tl.load(block, mask=valid, other=0) + tl.load(offsets_ptr + ids, mask=valid, other=0)
    row += tl.load(pads_ptr + ids, mask=valid, other=0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(map_ptr + mine, tl.where(valid, row, -1), mask=mine < num_routes)


_scans, _words = Launches(), Launches()


def _scan(counts: torch.Tensor, align: int, *, words: bool) -> tuple[torch.Tensor, ...]:
    """Exclusive sums over the blocks, and starts, padding and padded sizes of the experts."""
    device, (num_blocks, num_experts) = counts.device, counts.shape
    before = torch.empty_like(counts)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    pads = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    targets = torch.empty(num_experts, dtype=torch.int64, device=device)
    key = (counts.shape, device, align, words)
    launch = _scans.get(key)
    if launch is None:
        blocks = min(512, triton.next_power_of_2(max(1, num_blocks)))
        experts = min(64, _SCANNED // blocks)
        pdl = overlaps(device, 1)
        constants = dict(
            E=num_experts, WORDS=words, WIDTH=triton.next_power_of_2(num_experts), EXPERTS=experts,
            BLOCKS=blocks, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
        grid = (triton.cdiv(num_experts, experts),)
        launch = Launch(_scan_kernel, device, grid, (num_blocks, align), constants)
        _scans.add(key, launch)
    launch(counts, before, totals, offsets, pads, targets, zeroed_line(device, 1))
    return before, offsets, pads, targets


def row_map_of_mask(
    mask: torch.Tensor, align: int = 1, *, assign: bool = True
) -> tuple[RowMap, Pending]:
    """Rows by expert from a map [num_tokens, num_experts], bool or any integer, not 0 = routed.

    Without ``assign`` the rows are left to the permutation that follows.
    """
    num_tokens, num_experts = mask.shape
    if mask.stride(1) != 1:
        mask = mask.contiguous()
    device = mask.device
    words = torch.empty(
        (triton.cdiv(num_tokens, _TOKENS.value), num_experts), dtype=torch.int32, device=device
    )
    row_map = torch.empty((num_tokens, 2 * num_experts + 1), dtype=torch.int32, device=device)
    width = triton.next_power_of_2(num_experts)
    if num_tokens:
        key = (mask.shape, mask.stride(0), mask.dtype, device)
        launch = _words.get(key)
        if launch is None:
            cols = min(width, 256)
            pdl = overlaps(device, words.shape[0])
            constants = dict(E=num_experts, COLS=cols, PDL=pdl, launch_pdl=pdl)
            grid = (words.shape[0], triton.cdiv(num_experts, cols))
            numbers = (num_tokens, mask.stride(0))
            launch = _words.add(key, Launch(_words_kernel, device, grid, numbers, constants))
        launch(mask, words)
    before, offsets, pads, targets = _scan(words, align, words=True)
    if num_tokens and assign:
        _assign_mask_kernel[(num_tokens,)](
            row_map, words, before, offsets, E=num_experts, WIDTH=width,
            num_warps=1 if width <= 512 else 4,
        )  # fmt: skip
    return RowMap(row_map, offsets, pads, targets), Pending(row_map, words, before)


def row_map_of_ids(ids: torch.Tensor, num_experts: int, align: int = 1) -> RowMap:
    """Rows by expert from ids [num_tokens, top_k]; an id out of range, like -1, has no row."""
    ids = ids.contiguous()
    num_routes = ids.numel()
    size = (triton.cdiv(num_routes, _IDS_PER_BLOCK), num_experts)
    counts = torch.empty(size, dtype=torch.int32, device=ids.device)
    row_map = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if num_routes:
        _count_ids_kernel[(size[0],)](
            ids, counts, num_routes,
            E=num_experts, WIDTH=triton.next_power_of_2(num_experts), ROUTES=_IDS_PER_BLOCK,
        )  # fmt: skip
    before, offsets, pads, targets = _scan(counts, align, words=False)
    if num_routes:
        _assign_ids_kernel[(size[0],)](
            ids, before, offsets, pads, row_map, num_routes, E=num_experts, ROUTES=_IDS_PER_BLOCK
        )
    return RowMap(row_map, offsets, pads, targets)
