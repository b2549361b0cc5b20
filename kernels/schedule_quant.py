# SPDX-License-Identifier: Apache-2.0
"""Schedule and permuting quantisation in one launch, for few routes.

Each program counts all routes, ranks those of its own token and writes the token's quantised rows
where they belong. Counting again in every program costs less than a launch and a trip through
memory between two, as long as programs are few. Same results as schedule() followed by
quant_permute(). Grid: (token, columns).
"""

import torch
import triton
import triton.language as tl

from .quant_fp8 import GROUP, quantise
from .schedule import (
    Schedule,
    earlier_equal,
    empty_schedule,
    load_experts,
    put_rows,
    write_tiles,
)

MAX_ROUTES = 2048


@triton.jit
def _schedule_quant_kernel(
    x_ptr, q_ptr, s_ptr, ids_ptr, map_ptr, route_row_ptr, row_route_ptr,
    tile_expert_ptr, tile_rows_ptr, tile_count_ptr, absent_ptr,
    hidden, num_rows, num_routes, num_global, num_tiles, align,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    R_PAD: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
    MAPPED: tl.constexpr, ZERO_ABSENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    everyone = load_experts(
        ids_ptr, map_ptr, tl.arange(0, R_PAD), num_routes, num_global, E, MAPPED
    )
    slot = tl.arange(0, TOP_K_PAD)
    index = tl.where(slot < TOP_K, token * TOP_K + slot, num_routes)
    e = load_experts(ids_ptr, map_ptr, index, num_routes, num_global, E, MAPPED)
    rank = tl.zeros((TOP_K_PAD,), tl.int32)
    for start in range(0, (token + 1) * TOP_K, CHUNK):
        other_index = start + tl.arange(0, CHUNK)
        others = load_experts(ids_ptr, map_ptr, other_index, num_routes, num_global, E, MAPPED)
        rank += earlier_equal(e, index, others, other_index)
    counts = tl.histogram(everyone, E_PAD, mask=everyone >= 0)
    needed = (counts + align - 1) // align
    tile_end = tl.cumsum(needed, 0)
    row = put_rows(
        e, index, rank, tile_end - needed, route_row_ptr, row_route_ptr, num_routes, align
    )
    row = row.to(tl.int64)
    for first in range(
        tl.program_id(1) * GROUPS, tl.cdiv(hidden, 128), tl.num_programs(1) * GROUPS
    ):
        group = first + tl.arange(0, GROUPS)
        col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64) * hidden + col, mask=col < hidden, other=0.0)
        q, scale = quantise(x.to(tl.float32), 1)
        mask = (row >= 0)[:, None, None] & (col < hidden)[None, :, :]
        copies = tl.broadcast_to(q[None, :, :], (TOP_K_PAD, GROUPS, 128))
        tl.store(q_ptr + row[:, None, None] * hidden + col[None, :, :], copies, mask=mask)
        mask = (row >= 0)[:, None] & (group * 128 < hidden)[None, :]
        if ZERO_ABSENT:
            at = absent_ptr + token.to(tl.int64) * hidden + col
            tl.store(at, 0.0, mask=(col < hidden) & (tl.max(row, 0) < 0))
        copies = tl.broadcast_to(scale[None, :], (TOP_K_PAD, GROUPS))
        tl.store(s_ptr + group[None, :].to(tl.int64) * num_rows + row[:, None], copies, mask=mask)
    program = token * tl.num_programs(1) + tl.program_id(1)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(tile_count_ptr, tl.sum(needed, 0), mask=program == 0)
    for start in range(program * TILES, num_tiles, programs * TILES):
        write_tiles(
            counts, tile_end, tile_expert_ptr, tile_rows_ptr, start + tl.arange(0, TILES),
            num_tiles, align, E, E_PAD,
        )  # fmt: skip


def schedule_quant(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    align: int,
    *,
    expert_map: torch.Tensor | None = None,
    pdl: bool = False,
    zero_absent: torch.Tensor | None = None,
) -> tuple[Schedule, torch.Tensor, torch.Tensor]:
    """The schedule, and x quantised in its order: e4m3 [rows, hidden], scales [groups, rows].

    At most MAX_ROUTES routes. ``zero_absent`` is like x: rows of tokens without any route are
    written with zeros.
    """
    num_routes = topk_ids.numel()
    if not 0 < num_routes <= MAX_ROUTES:
        raise ValueError(f"topk_ids: expected 1 to {MAX_ROUTES} routes, found {num_routes}")
    if not x.is_contiguous():
        raise ValueError(f"x: expected a contiguous tensor, found strides {x.stride()}")
    plan = empty_schedule(topk_ids, num_local_experts, align, expert_map)
    (num_tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    groups = triton.cdiv(hidden, GROUP)
    q = torch.empty((plan.num_rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((groups, plan.num_rows), dtype=torch.float32, device=x.device)
    r_pad = max(32, triton.next_power_of_2(num_routes))
    wide = 8
    chunks = max(1, min(triton.cdiv(groups, wide), 256 // num_tokens))
    _schedule_quant_kernel[(num_tokens, chunks)](
        x, q, scale, topk_ids, expert_map, plan.route_row, plan.row_route,
        plan.tile_expert, plan.tile_rows, plan.num_tiles, zero_absent,
        hidden, plan.num_rows, num_routes,
        num_local_experts if expert_map is None else expert_map.shape[0],
        plan.tile_expert.numel(), align,
        TOP_K=top_k, TOP_K_PAD=max(2, triton.next_power_of_2(top_k)), E=num_local_experts,
        E_PAD=triton.next_power_of_2(max(num_local_experts, 16)), R_PAD=r_pad,
        CHUNK=min(r_pad, 1024), TILES=8, GROUPS=wide, MAPPED=expert_map is not None,
        ZERO_ABSENT=zero_absent is not None, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return plan, q, scale
