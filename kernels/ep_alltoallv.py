# SPDX-License-Identifier: Apache-2.0
"""All-to-all-v of rows of any size through symmetric staging memory, counts on the device.

    put   copy rows for each rank into its staging, tell every rank all counts          (publishes)
    take  check sizes and capacities, copy from staging to recv, ordered by source      (waits)

Two halves of staging in turn: a half is written again two calls later, after this rank has waited
for everybody's call in between, which each of them made after having read the half. Every rank sees
the counts and capacities of all, so all agree whether anything may be copied out.

Half of a rank's buffer: head [W, W + 4] int64 (counts per rank, capacity of recv, bytes of a row,
dtype, refusal), flags [W] int32 padded to 256 bytes, data [W, capacity] bytes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .ep_buffers import COUNTS, power_of_2
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
    wide,
)

_UNITS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))
_CHUNK = 4096  # units copied at a time
PHASE_COUNTS = tl.constexpr(COUNTS)


@dataclass(frozen=True)
class Staging:
    """One rank's end. ``capacity`` is in bytes per source; see Endpoint for the rest."""

    world: int
    me: int
    capacity: int
    buffer: torch.Tensor  # [nbytes] uint8, symmetric
    peers: torch.Tensor  # [W] int64
    control: torch.Tensor  # [8] int32: epoch, ticket
    status: torch.Tensor
    alarm: torch.Tensor
    patience: int
    programs: int
    clock: bool

    @staticmethod
    def half_bytes(world: int, capacity: int) -> int:
        return Staging.flags_at(world) + 256 + world * (-(-capacity // 256) * 256)

    @staticmethod
    def flags_at(world: int) -> int:
        return -(-8 * world * (world + 4) // 256) * 256


@triton.jit
def _copy(from_ptr, to_ptr, n, CHUNK: tl.constexpr):
    """``n`` units, shared by the programs of the grid."""
    for start in range(tl.program_id(0) * CHUNK, n, tl.num_programs(0) * CHUNK):
        i = start + tl.arange(0, CHUNK)
        tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def _put_kernel(
    send_ptr, counts_ptr, control_ptr, status_ptr, peers_ptr, half, flags_at, capacity, send_rows,
    recv_rows, row_bytes, dtype, refusal, me,
    W: tl.constexpr, W_PAD: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    epoch = tl.load(control_ptr + EPOCH) + 1
    base = wide(epoch & 1) * half
    rank = tl.arange(0, W_PAD)
    count = tl.load(counts_ptr + rank, mask=rank < W, other=0).to(tl.int64)
    first = tl.cumsum(count, 0) - count
    bad = (tl.min(count, axis=0) < 0) | (tl.sum(count, axis=0) > send_rows)
    bad = bad | (tl.max(count, axis=0) * row_bytes > capacity) | (refusal != 0)
    if not bad:
        for peer in range(W):
            n = tl.sum(tl.where(rank == peer, count, 0), axis=0) * row_bytes // SIZE
            start = tl.sum(tl.where(rank == peer, first, 0), axis=0) * row_bytes // SIZE
            start = tl.multiple_of(start, ALIGNED)
            out = peer_ptr(peers_ptr, peer, base + flags_at + 256 + me * capacity, UNIT)
            _copy(send_ptr + start, out, n, CHUNK)
    if last_program(control_ptr + 1):
        tl.store(control_ptr + EPOCH, epoch)
        for peer in range(W):
            head = peer_ptr(peers_ptr, peer, base, tl.int64) + me * (W + 4)
            tl.store(head + rank, count, mask=rank < W)
            tl.store(head + W, wide(recv_rows))
            tl.store(head + W + 1, wide(row_bytes))
            tl.store(head + W + 2, wide(dtype))
            tl.store(head + W + 3, bad.to(tl.int64))
        publish(peers_ptr, base + flags_at, 0, me, epoch, W, W_PAD)


@triton.jit
def _verdict(head_ptr, status_ptr, alarm_ptr, row_bytes, dtype, W: tl.constexpr):
    """0 when every rank's rows may be copied out; else reports, with the rank to blame."""
    wrong = 0
    for source in range(W):
        theirs = head_ptr + source * (W + 4)
        same = (tl.load(theirs + W + 1) == row_bytes) & (tl.load(theirs + W + 2) == dtype)
        if (tl.load(theirs + W + 3) != 0) | (same == 0):
            report(status_ptr, alarm_ptr, STATUS_REFUSED, PHASE_COUNTS, source)
            wrong = 1
    for rank in range(W):
        total = tl.full((), 0, tl.int64)
        for source in range(W):
            total += tl.load(head_ptr + source * (W + 4) + rank)
        if total > tl.load(head_ptr + rank * (W + 4) + W):
            report(status_ptr, alarm_ptr, STATUS_OVERFLOW, PHASE_COUNTS, rank)
            wrong = 1
    return wrong


@triton.jit
def _take_kernel(
    recv_ptr, recv_counts_ptr, buffer_ptr, control_ptr, status_ptr, alarm_ptr, half, flags_at,
    capacity, row_bytes, dtype, me, patience,
    W: tl.constexpr, W_PAD: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(status_ptr) != 0:
        return
    epoch = tl.load(control_ptr + EPOCH)
    base = buffer_ptr + wide(epoch & 1) * half
    flags_ptr = (base + flags_at).to(tl.pointer_type(tl.int32))
    late = wait_for_all(flags_ptr, epoch, patience, W, W_PAD, CLOCK)
    if late >= 0:
        report(status_ptr, alarm_ptr, STATUS_TIMEOUT, PHASE_COUNTS, late)
        return
    head_ptr = base.to(tl.pointer_type(tl.int64))
    if _verdict(head_ptr, status_ptr, alarm_ptr, row_bytes, dtype, W) != 0:
        return
    first = tl.full((), 0, tl.int64)
    for source in range(W):
        rows = tl.load(head_ptr + source * (W + 4) + me)
        staged = (base + flags_at + 256 + source * capacity).to(tl.pointer_type(UNIT))
        n = rows * row_bytes // SIZE
        first = tl.multiple_of(first, ALIGNED)
        _copy(tl.multiple_of(staged, 16), recv_ptr + first, n, CHUNK)
        if tl.program_id(0) == 0:
            tl.store(recv_counts_ptr + source, rows.to(recv_counts_ptr.dtype.element_ty))
        first += n


def _unit(end: Staging, row_bytes: int, *tensors: torch.Tensor) -> dict:
    """The widest unit that divides rows and addresses."""
    odd = row_bytes
    for t in tensors:
        odd |= t.data_ptr()
    size, unit = next((s, u) for s, u in _UNITS if odd % s == 0)
    return {
        "W": end.world, "W_PAD": power_of_2(end.world), "UNIT": unit, "SIZE": size,
        "ALIGNED": 16 // size if odd % 16 == 0 else 1, "CHUNK": _CHUNK, "num_warps": 8,
    }  # fmt: skip


def _as_units(rows: torch.Tensor, sizes: dict) -> torch.Tensor:
    """The rows' memory as a pointer to units."""
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    unit = ints[sizes["SIZE"]]
    if rows.numel() == 0:
        return torch.empty(1, dtype=unit, device=rows.device)
    return rows.reshape(-1).view(torch.uint8).view(unit)


def put(
    end: Staging, send: torch.Tensor, counts: torch.Tensor, recv: torch.Tensor, row_bytes: int,
    dtype: int, *, refusal: bool = False,
) -> None:  # fmt: skip
    """First step. send, recv: contiguous rows; counts [W] int32 or int64 on the device."""
    sizes = _unit(end, row_bytes, send)
    _put_kernel[(end.programs,)](
        _as_units(send, sizes), counts, end.control, end.status, end.peers,
        end.half_bytes(end.world, end.capacity), end.flags_at(end.world), end.capacity,
        send.shape[0], recv.shape[0], row_bytes, dtype, int(refusal), end.me, **sizes,
    )  # fmt: skip


def take(
    end: Staging, recv: torch.Tensor, recv_counts: torch.Tensor, row_bytes: int, dtype: int
) -> None:
    """Second step. Fills recv from its first row, and recv_counts [W]."""
    sizes = _unit(end, row_bytes, recv)
    _take_kernel[(end.programs,)](
        _as_units(recv, sizes), recv_counts, end.buffer, end.control, end.status, end.alarm,
        end.half_bytes(end.world, end.capacity), end.flags_at(end.world), end.capacity, row_bytes,
        dtype, end.me, end.patience, CLOCK=end.clock, **sizes,
    )  # fmt: skip
