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
    peer_ptr,
    publish,
    report,
    wait_for_all,
    wide,
)

PHASE_RESULTS = tl.constexpr(RESULTS)


@triton.jit
def _send_back_kernel(
    rows_ptr, row_ptr, weight_ptr, counts_ptr, control_ptr, status_ptr, peers_ptr,
    parts_at, flags_at, hidden, max_tokens, me,
    W: tl.constexpr, W_PAD: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    col = tl.arange(0, BLOCK)
    for source in range(W):
        payloads = tl.load(counts_ptr + source * (E + W + 1) + E + me)
        parts = peer_ptr(peers_ptr, source, parts_at, tl.bfloat16)
        for i in range(tl.program_id(0), payloads, tl.num_programs(0)):
            meta = (wide(source) * max_tokens + i) * K
            part = tl.zeros((BLOCK,), tl.float32)
            for slot in range(K):
                row = tl.load(row_ptr + meta + slot).to(tl.int64)
                if row >= 0:
                    weight = tl.load(weight_ptr + meta + slot)
                    y = tl.load(rows_ptr + row * hidden + col, mask=col < hidden, other=0.0)
                    part += weight * y.to(tl.float32)
            out = parts + (wide(me) * max_tokens + i) * hidden + col
            tl.store(out, part.to(tl.bfloat16), mask=col < hidden)
    if last_program(control_ptr + 3):
        publish(peers_ptr, flags_at, PHASE_RESULTS, me, tl.load(control_ptr + EPOCH), W, W_PAD)


def send_back(ep: Endpoint, slot: int, rows: torch.Tensor) -> None:
    """First step. rows: [capacity, hidden] bf16."""
    lay, mine = ep.layout, ep.slots[slot]
    _send_back_kernel[(ep.programs,)](
        rows, ep.view("row", slot, torch.int32, lay.world, lay.max_tokens, lay.top_k),
        ep.view("weight", slot, torch.float32, lay.world, lay.max_tokens, lay.top_k),
        ep.view("counts", slot, torch.int32, lay.world, lay.words), mine.control, ep.status,
        ep.peers, lay.at("parts", slot), lay.at("flags", slot), lay.hidden, lay.max_tokens, ep.me,
        W=lay.world, W_PAD=power_of_2(lay.world), E=lay.num_experts, K=lay.top_k,
        BLOCK=power_of_2(lay.hidden), num_warps=8,
    )  # fmt: skip


@triton.jit
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
    col = tl.arange(0, BLOCK)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        total = tl.zeros((BLOCK,), tl.float32)
        if failed == 0:
            for rank in range(W):
                i = tl.load(payload_ptr + token * W + rank)
                if i >= 0:
                    at = parts_ptr + (wide(rank) * max_tokens + i) * hidden + col
                    total += tl.load(at, mask=col < hidden, other=0.0).to(tl.float32)
        else:
            total += float("nan")
        out = out_ptr + wide(token) * hidden + col
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=col < hidden)


def collect(ep: Endpoint, slot: int, out: torch.Tensor) -> torch.Tensor:
    """Second step. Fills out [T, hidden]."""
    lay, mine = ep.layout, ep.slots[slot]
    _collect_kernel[(ep.programs,)](
        ep.view("parts", slot, torch.bfloat16, lay.world, lay.max_tokens, lay.hidden),
        mine.payload, out, mine.control, ep.status, ep.alarm,
        ep.view("flags", slot, torch.int32, 3, lay.world)[RESULTS],
        out.shape[0], lay.hidden, lay.max_tokens, ep.patience,
        W=lay.world, W_PAD=power_of_2(lay.world), BLOCK=power_of_2(lay.hidden),
        CLOCK=ep.clock, num_warps=8,
    )  # fmt: skip
    return out
