# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts' ranks, written by the GPU straight into the peers' memory.

    send     quantise 1x128, one payload per (token, rank) into its first route's row   (publishes)
    receive  copy payloads to their further routes, scales into the GEMM's order        (waits)

They follow count and arrange of ep_plan.py, which know the row of every route. Rows need no further
permutation: they land in the padded expert-contiguous order of the grouped GEMM.

Shapes: x [T, H]; topk_ids, weights [T, k]; see ep_buffers.py for the rest. Grids: ``programs``,
looping over tokens and received payloads.
"""

import torch
import triton
import triton.language as tl

from .ep_buffers import ROWS, Endpoint, power_of_2
from .ep_plan import places
from .ep_sync import (
    EPOCH,
    STATUS_TIMEOUT,
    last_program,
    my_first,
    peer_ptr,
    publish,
    report,
    wait_for_all,
    wide,
)
from .quant_fp8 import quantise

PHASE_ROWS = tl.constexpr(ROWS)


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation for all batches
def _send_kernel(
    x_ptr, ids_ptr, weight_ptr, place_ptr, rank_ptr, nth_ptr, block_ptr, first_row_ptr, payload_ptr,
    control_ptr, status_ptr, peers_ptr, data_at, scale_at, row_at, weight_at, flags_at,
    num_tokens, hidden, max_tokens, me,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    s = tl.arange(0, K_PAD)
    p = tl.arange(0, W_PAD)
    groups = tl.cdiv(hidden, 128)
    chunks = tl.cdiv(groups, GROUPS)
    slots = s < K
    for item in range(tl.program_id(0), num_tokens * chunks, tl.num_programs(0)):
        token = item // chunks
        g = (item % chunks) * GROUPS + tl.arange(0, GROUPS)
        col = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + wide(token) * hidden + col, mask=col < hidden, other=0.0)
        at = places(ids_ptr, place_ptr, token * K + s, slots, E)
        before = block_ptr + (token // TOKENS) * (E_PAD + W_PAD)
        row = tl.load(rank_ptr + token * K + s, mask=slots, other=0)
        row += tl.load(first_row_ptr + at, mask=at < E, other=0)
        row += tl.load(before + at, mask=at < E, other=0)
        weight = tl.load(weight_ptr + token * K + s, mask=slots, other=0.0)
        wanted = (at // (E // W))[:, None] == p[None, :]  # absent routes want rank W
        first_slot = tl.min(tl.where(wanted, s[:, None], K_PAD), axis=0)
        first_row = tl.sum(tl.where(s[:, None] == first_slot[None, :], row[:, None], 0), axis=0)
        nth = tl.load(nth_ptr + token * W + p, mask=p < W, other=0)
        nth += tl.load(before + E_PAD + p, mask=p < W, other=0)
        nth = tl.where(first_slot < K_PAD, nth, -1)
        leads = item % chunks == 0  # writes what is there once per token
        tl.store(payload_ptr + token * W + p, nth, mask=(p < W) & leads)
        if QUANT:
            q, scale = quantise(x.to(tl.float32), 1)
        for peer in range(W):
            payload = tl.sum(tl.where(p == peer, nth, 0), axis=0)
            if payload >= 0:
                to = wide(tl.sum(tl.where(p == peer, first_row, 0), axis=0))
                if QUANT:
                    out = peer_ptr(peers_ptr, peer, data_at, tl.float8e4nv) + to * hidden
                    tl.store(out + col, q, mask=col < hidden)
                    out_scale = peer_ptr(peers_ptr, peer, scale_at, tl.float32) + to * groups
                    tl.store(out_scale + g, scale, mask=g < groups)
                else:
                    out = peer_ptr(peers_ptr, peer, data_at, tl.bfloat16) + to * hidden
                    tl.store(out + col, x, mask=col < hidden)
                meta = (wide(me) * max_tokens + payload) * K + s
                rows_out = peer_ptr(peers_ptr, peer, row_at, tl.int32) + meta
                theirs = tl.where(at // (E // W) == peer, row, -1)
                tl.store(rows_out, theirs, mask=slots & leads)
                weight_out = peer_ptr(peers_ptr, peer, weight_at, tl.float32) + meta
                tl.store(weight_out, weight, mask=slots & leads)
    if last_program(control_ptr + 2):
        publish(peers_ptr, flags_at, PHASE_ROWS, me, tl.load(control_ptr + EPOCH), W, W_PAD)


def _groups_per_item(groups: int) -> int:
    return min(8, power_of_2(groups))


def send(
    ep: Endpoint, slot: int, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """Third step. x: [T, hidden] bf16; topk_ids int32, weights fp32 [T, k]."""
    lay, mine = ep.layout, ep.slots[slot]
    at = [lay.at(name, slot) for name in ("data", "scale", "row", "weight", "flags")]
    groups = _groups_per_item(lay.groups)
    items = x.shape[0] * triton.cdiv(lay.groups, groups)
    _send_kernel[(max(1, min(ep.programs, items)),)](
        x, topk_ids, weights, ep.place, mine.rank, mine.nth, mine.block, mine.first_row,
        mine.payload, mine.control, ep.status, ep.peers, *at,
        x.shape[0], lay.hidden, lay.max_tokens, ep.me,
        W=lay.world, W_PAD=power_of_2(lay.world), E=lay.num_experts,
        E_PAD=power_of_2(lay.num_experts + 1), K=lay.top_k, K_PAD=power_of_2(lay.top_k),
        TOKENS=lay.block_tokens, GROUPS=groups, QUANT=lay.quantised, num_warps=2,
    )  # fmt: skip


@triton.jit
def _receive_kernel(
    control_ptr, status_ptr, alarm_ptr, flags_ptr, counts_ptr, data_ptr, scale_ptr, row_ptr,
    scale_out_ptr, hidden, num_rows, max_tokens, me, patience,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUPS: tl.constexpr, QUANT: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    late = wait_for_all(flags_ptr, tl.load(control_ptr + EPOCH), patience, W, W_PAD, CLOCK)
    if late >= 0:
        report(status_ptr, alarm_ptr, STATUS_TIMEOUT, PHASE_ROWS, late)
        return
    s = tl.arange(0, K_PAD)
    groups = tl.cdiv(hidden, 128)
    chunks = tl.cdiv(groups, GROUPS)
    done = 0
    for source in range(W):
        items = tl.load(counts_ptr + source * (E + W + 1) + E + me) * chunks
        for item in range(my_first(done), items, tl.num_programs(0)):
            g = (item % chunks) * GROUPS + tl.arange(0, GROUPS)
            col = g[:, None] * 128 + tl.arange(0, 128)[None, :]
            at = row_ptr + (wide(source) * max_tokens + item // chunks) * K
            rows = tl.load(at + s, mask=s < K, other=-1)
            first_slot = tl.min(tl.where(rows >= 0, s, K_PAD), axis=0)
            first = wide(tl.sum(tl.where(s == first_slot, rows, 0), axis=0))
            more = tl.sum((rows >= 0).to(tl.int32), axis=0) > 1
            if QUANT:
                scale = tl.load(scale_ptr + first * groups + g, mask=g < groups, other=0.0)
                to = scale_out_ptr + wide(g)[:, None] * num_rows + rows[None, :]
                here = (g < groups)[:, None] & (rows >= 0)[None, :]
                tl.store(to, tl.broadcast_to(scale[:, None], (GROUPS, K_PAD)), mask=here)
            if more:
                x = tl.load(data_ptr + first * hidden + col, mask=col < hidden)
                for slot in range(first_slot + 1, K):
                    row = wide(tl.sum(tl.where(s == slot, rows, 0), axis=0))
                    if row >= 0:
                        tl.store(data_ptr + row * hidden + col, x, mask=col < hidden)
        done += items


def data_dtype(ep: Endpoint) -> torch.dtype:
    return torch.float8_e4m3fn if ep.layout.quantised else torch.bfloat16


def receive(ep: Endpoint, slot: int) -> torch.Tensor:
    """Fourth step: the rows [capacity, hidden]; their scales and tiles are in the slot."""
    lay, mine = ep.layout, ep.slots[slot]
    data = ep.view("data", slot, data_dtype(ep), lay.rows, lay.hidden)
    scale = ep.view("scale", slot, torch.float32, lay.rows if lay.quantised else 0, lay.groups)
    groups = _groups_per_item(lay.groups)
    items = lay.world * lay.max_tokens * triton.cdiv(lay.groups, groups)
    _receive_kernel[(min(ep.programs, items),)](
        mine.control, ep.status, ep.alarm, ep.view("flags", slot, torch.int32, 3, lay.world)[ROWS],
        ep.view("counts", slot, torch.int32, lay.world, lay.words), data, scale,
        ep.view("row", slot, torch.int32, lay.world, lay.max_tokens, lay.top_k), mine.scale,
        lay.hidden, lay.rows, lay.max_tokens, ep.me, ep.patience,
        W=lay.world, W_PAD=power_of_2(lay.world), E=lay.num_experts, K=lay.top_k,
        K_PAD=power_of_2(lay.top_k), GROUPS=groups, QUANT=lay.quantised, CLOCK=ep.clock,
        num_warps=2,
    )  # fmt: skip
    return data
