# SPDX-License-Identifier: Apache-2.0
"""Where each route's row goes when rows are ordered by expert, from a mask or from ids.

Rows of one expert keep the tokens' order. Three launches, no host sync:

    count    routes of each expert in each block of tokens           [E, blocks]
    scan     their exclusive sums over the blocks; the last program to finish sums over experts
    assign   row of a route = start of its expert + its block's offset + rank within the block

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

from .launch_counter import zeroed_line

_SCANNED = 1024  # blocks a step of the scan
_IDS_PER_BLOCK = 128


class RowMap(NamedTuple):
    row_map: torch.Tensor  # see above
    offsets: torch.Tensor  # [num_experts + 1] first row of each expert without padding, and the end
    pad_offsets: torch.Tensor  # [num_experts + 1] padding rows before each expert, and all of them
    targets: torch.Tensor  # [num_experts] int64, rows of each expert with its padding


@triton.jit
def _count_mask_kernel(
    mask_ptr, counts_ptr, num_tokens, row_stride, num_blocks,
    E: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    at = mask_ptr + token.to(tl.int64)[:, None] * row_stride + expert[None, :]
    routed = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    out = counts_ptr + expert.to(tl.int64) * num_blocks + tl.program_id(0)
    tl.store(out, tl.sum(routed, 0), mask=expert < E)


@triton.jit
def _count_ids_kernel(
    ids_ptr, counts_ptr, num_routes, num_blocks,
    E: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    route = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + route, mask=route < num_routes, other=-1).to(tl.int32)
    expert = tl.arange(0, WIDTH)
    counts = tl.histogram(tl.where(ids < 0, E, ids), WIDTH, mask=(ids >= 0) & (ids < E))
    out = counts_ptr + expert.to(tl.int64) * num_blocks + tl.program_id(0)
    tl.store(out, counts, mask=expert < E)


@triton.jit
def _scan_kernel(
    counts_ptr, totals_ptr, offsets_ptr, pads_ptr, targets_ptr, ticket_ptr, num_blocks, align,
    E: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (expert < E)[:, None] & (block < num_blocks)[None, :]
        at = counts_ptr + expert.to(tl.int64)[:, None] * num_blocks + block[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, before[:, None] + tl.cumsum(counts, 1) - counts, mask=inside)
        before += tl.sum(counts, 1)
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
def _assign_mask_kernel(
    mask_ptr, counts_ptr, offsets_ptr, map_ptr, num_tokens, row_stride, num_blocks,
    E: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    token = token.to(tl.int64)
    at = mask_ptr + token[:, None] * row_stride + expert[None, :]
    routed = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    block = counts_ptr + expert.to(tl.int64) * num_blocks + tl.program_id(0)
    start = tl.load(block, mask=expert < E, other=0)
    start += tl.load(offsets_ptr + expert, mask=expert < E, other=0)
    row = start[None, :] + tl.cumsum(routed, 0) - routed
    place = tl.cumsum(routed, 1) - routed
    out = map_ptr + token[:, None] * (2 * E + 1) + place
    tl.store(out, row, mask=routed != 0)
    tl.store(out + E, tl.broadcast_to(expert[None, :], [TOKENS, WIDTH]), mask=routed != 0)
    count = tl.sum(routed, 1)
    tl.store(map_ptr + token * (2 * E + 1) + 2 * E, count, mask=token < num_tokens)


@triton.jit
def _assign_ids_kernel(
    ids_ptr, counts_ptr, offsets_ptr, pads_ptr, map_ptr, num_routes, num_blocks,
    E: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROUTES
    mine = first + tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + mine, mask=mine < num_routes, other=-1).to(tl.int32)
    other = first + tl.arange(0, ROUTES)[None, :]
    others = tl.load(ids_ptr + other, mask=other < num_routes, other=-1).to(tl.int32)
    earlier = (others == ids[:, None]) & (other < mine[:, None])
    valid = (ids >= 0) & (ids < E)
    block = counts_ptr + ids.to(tl.int64) * num_blocks + tl.program_id(0)
    row = tl.load(block, mask=valid, other=0) + tl.load(offsets_ptr + ids, mask=valid, other=0)
    row += tl.load(pads_ptr + ids, mask=valid, other=0) + tl.sum(earlier.to(tl.int32), 1)
    tl.store(map_ptr + mine, tl.where(valid, row, -1), mask=mine < num_routes)


def _scan(counts: torch.Tensor, num_experts: int, align: int) -> tuple[torch.Tensor, ...]:
    device, num_blocks = counts.device, counts.shape[1]
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    pads = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    targets = torch.empty(num_experts, dtype=torch.int64, device=device)
    blocks = min(_SCANNED, triton.next_power_of_2(max(1, num_blocks)))
    experts = max(1, 4096 // blocks // 2)
    _scan_kernel[(triton.cdiv(num_experts, experts),)](
        counts, totals, offsets, pads, targets, zeroed_line(device, 1), num_blocks, align,
        E=num_experts, WIDTH=triton.next_power_of_2(num_experts), EXPERTS=experts, BLOCKS=blocks,
    )  # fmt: skip
    return offsets, pads, targets


def row_map_of_mask(mask: torch.Tensor, align: int = 1) -> RowMap:
    """Rows by expert from a map [num_tokens, num_experts], bool or any integer, not 0 = routed."""
    num_tokens, num_experts = mask.shape
    if mask.stride(1) != 1:
        mask = mask.contiguous()
    width = triton.next_power_of_2(num_experts)
    tokens = max(4, min(64, 8192 // width))
    num_blocks = triton.cdiv(num_tokens, tokens)
    device = mask.device
    counts = torch.empty((num_experts, num_blocks), dtype=torch.int32, device=device)
    row_map = torch.empty((num_tokens, 2 * num_experts + 1), dtype=torch.int32, device=device)
    cols = min(width, 256)
    if num_tokens:
        _count_mask_kernel[(num_blocks, triton.cdiv(num_experts, cols))](
            mask, counts, num_tokens, mask.stride(0), num_blocks,
            E=num_experts, TOKENS=tokens, COLS=cols,
        )  # fmt: skip
    offsets, pads, targets = _scan(counts, num_experts, align)
    if num_tokens:
        _assign_mask_kernel[(num_blocks,)](
            mask, counts, offsets, row_map, num_tokens, mask.stride(0), num_blocks,
            E=num_experts, WIDTH=width, TOKENS=tokens, num_warps=8,
        )  # fmt: skip
    return RowMap(row_map, offsets, pads, targets)


def row_map_of_ids(ids: torch.Tensor, num_experts: int, align: int = 1) -> RowMap:
    """Rows by expert from ids [num_tokens, top_k]; an id out of range, like -1, has no row."""
    ids = ids.contiguous()
    num_routes = ids.numel()
    num_blocks = triton.cdiv(num_routes, _IDS_PER_BLOCK)
    counts = torch.empty((num_experts, num_blocks), dtype=torch.int32, device=ids.device)
    row_map = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if num_routes:
        _count_ids_kernel[(num_blocks,)](
            ids, counts, num_routes, num_blocks,
            E=num_experts, WIDTH=triton.next_power_of_2(num_experts), ROUTES=_IDS_PER_BLOCK,
        )  # fmt: skip
    offsets, pads, targets = _scan(counts, num_experts, align)
    if num_routes:
        _assign_ids_kernel[(num_blocks,)](
            ids, counts, offsets, pads, row_map, num_routes, num_blocks,
            E=num_experts, ROUTES=_IDS_PER_BLOCK,
        )  # fmt: skip
    return RowMap(row_map, offsets, pads, targets)
