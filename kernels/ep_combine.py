# SPDX-License-Identifier: Apache-2.0
"""Results back to their tokens' ranks: one row per (token, expert's rank), weighted there.

    part[t, r] = bf16( sum over the slots of t on rank r, in slot order, of weight * row )    fp32
    out[t]     = bf16( sum over ranks r, in rank order, of part[t, r] )                       fp32

    send_back  sums each payload's routes, writes the part into its source's memory   (publishes)
    collect    adds the parts; rows are NaN once the exchange has failed              (waits)

Shapes: rows [capacity, H] bf16 in the dispatched order; out [T, H]. Grids: ``programs``.
"""

import torch
import triton
import triton.language as tl

from .ep_buffers import RESULTS, Endpoint, power_of_2
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

PHASE_RESULTS = tl.constexpr(RESULTS)


_BLOCK = 1024  # columns of an item


@triton.jit
def _send_back_kernel(
    rows_ptr, row_ptr, weight_ptr, counts_ptr, control_ptr, status_ptr, peers_ptr,
    parts_at, flags_at, hidden, max_tokens, me,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    chunks = tl.cdiv(hidden, BLOCK)
    done = 0
    for source in range(W):
        items = tl.load(counts_ptr + source * (E + W + 1) + E + me) * chunks
        parts = peer_ptr(peers_ptr, source, parts_at, tl.bfloat16)
        for item in range(my_first(done), items, tl.num_programs(0)):
            payload = item // chunks
            col = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
            inside = col < hidden
            meta = (wide(source) * max_tokens + payload) * K
            part = tl.zeros((BLOCK,), tl.float32)
            for slot in tl.static_range(K):
                row = wide(tl.load(row_ptr + meta + slot))
                weight = tl.load(weight_ptr + meta + slot)
                y = tl.load(rows_ptr + row * hidden + col, mask=inside & (row >= 0), other=0.0)
                part += tl.where(row >= 0, weight, 0.0) * y.to(tl.float32)
            out = parts + (wide(me) * max_tokens + payload) * hidden + col
            tl.store(out, part.to(tl.bfloat16), mask=inside)
        done += items
    if last_program(control_ptr + 3):
        publish(peers_ptr, flags_at, PHASE_RESULTS, me, tl.load(control_ptr + EPOCH), W, W_PAD)


def send_back(ep: Endpoint, slot: int, rows: torch.Tensor) -> None:
    """First step. rows: [capacity, hidden] bf16."""
    lay, mine = ep.layout, ep.slots[slot]
    block = min(_BLOCK, power_of_2(lay.hidden))
    items = lay.world * lay.max_tokens * triton.cdiv(lay.hidden, block)
    _send_back_kernel[(min(ep.programs, items),)](
        rows, ep.view("row", slot, torch.int32, lay.world, lay.max_tokens, lay.top_k),
        ep.view("weight", slot, torch.float32, lay.world, lay.max_tokens, lay.top_k),
        ep.view("counts", slot, torch.int32, lay.world, lay.words), mine.control, ep.status,
        ep.peers, lay.at("parts", slot), lay.at("flags", slot), lay.hidden, lay.max_tokens, ep.me,
        W=lay.world, W_PAD=power_of_2(lay.world), E=lay.num_experts, K=lay.top_k,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation for all batches
def _collect_kernel(
    parts_ptr, payload_ptr, out_ptr, control_ptr, status_ptr, alarm_ptr, flags_ptr,
    num_tokens, hidden, max_tokens, patience,
    W: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    failed = tl.load(status_ptr)
    if failed == 0:
        late = wait_for_all(flags_ptr, tl.load(control_ptr + EPOCH), patience, W, W_PAD, CLOCK)
        if late >= 0:
            report(status_ptr, alarm_ptr, STATUS_TIMEOUT, PHASE_RESULTS, late)
            failed = 1
    chunks = tl.cdiv(hidden, BLOCK)
    for item in range(tl.program_id(0), num_tokens * chunks, tl.num_programs(0)):
        token = item // chunks
        col = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
        inside = col < hidden
        total = tl.zeros((BLOCK,), tl.float32) + tl.where(failed == 0, 0.0, float("nan"))
        for rank in tl.static_range(W):
            i = tl.load(payload_ptr + token * W + rank)
            there = inside & (i >= 0) & (failed == 0)
            at = parts_ptr + (wide(rank) * max_tokens + i) * hidden + col
            total += tl.load(at, mask=there, other=0.0).to(tl.float32)
        out = out_ptr + wide(token) * hidden + col
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def collect(ep: Endpoint, slot: int, out: torch.Tensor) -> torch.Tensor:
    """Second step. Fills out [T, hidden]."""
    lay, mine = ep.layout, ep.slots[slot]
    block = min(_BLOCK, power_of_2(lay.hidden))
    items = out.shape[0] * triton.cdiv(lay.hidden, block)
    _collect_kernel[(max(1, min(ep.programs, items)),)](
        ep.view("parts", slot, torch.bfloat16, lay.world, lay.max_tokens, lay.hidden),
        mine.payload, out, mine.control, ep.status, ep.alarm,
        ep.view("flags", slot, torch.int32, 3, lay.world)[RESULTS],
        out.shape[0], lay.hidden, lay.max_tokens, ep.patience,
        W=lay.world, W_PAD=power_of_2(lay.world), BLOCK=block, CLOCK=ep.clock, num_warps=4,
    )  # fmt: skip
    return out
