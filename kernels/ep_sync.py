# SPDX-License-Identifier: Apache-2.0
"""How ranks wait for each other on the device: epoch-valued flags, release and acquire.

A kernel that writes to peers ends with ``last_program``; the program that finds itself last
publishes the epoch to every peer (``publish``). Cumulativity makes the whole grid's stores visible:
each program's stores → its barrier → the ticket (acquire-release) → the last program's flag
(release, system scope) → the peer's look at the flag (acquire, system scope).

A wait ends after ``patience`` and reports the late rank; nobody waits for ever.
"""

import triton
import triton.language as tl

from .ep_buffers import OVERFLOW, REFUSED, TIMEOUT

EPOCH = tl.constexpr(0)  # places in a slot's control words; tickets follow
STATUS_TIMEOUT = tl.constexpr(TIMEOUT)
STATUS_REFUSED = tl.constexpr(REFUSED)
STATUS_OVERFLOW = tl.constexpr(OVERFLOW)


@triton.jit
def wide(n):
    """64 bits for addresses, whatever ``n`` is: a loop's number, an argument that is always 1."""
    return tl.full((), 0, tl.int64) + n


@triton.jit
def peer_ptr(peers_ptr, peer, offset, DTYPE: tl.constexpr):
    """Pointer into a peer's buffer; parts begin on multiples of 256 bytes."""
    base = tl.load(peers_ptr + peer) + offset
    return tl.multiple_of(base.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _slack(flags_ptr, epoch, W: tl.constexpr, W_PAD: tl.constexpr):
    """By how much each rank's flag is ahead of ``epoch``; a difference, so that epochs may wrap."""
    rank = tl.arange(0, W_PAD)
    none = tl.zeros((W_PAD,), tl.int32)
    seen = tl.atomic_add(flags_ptr + rank, none, mask=rank < W, sem="acquire", scope="sys")
    return tl.where(rank < W, seen - epoch, 0)


@triton.jit
def wait_for_all(
    flags_ptr, epoch, patience, W: tl.constexpr, W_PAD: tl.constexpr, CLOCK: tl.constexpr
):
    """Waits until every rank's flag has reached ``epoch``; the first rank that is late, or −1."""
    began = tl.full((), 0, tl.int64)
    if CLOCK:
        began = tl.extra.cuda.globaltimer().to(tl.int64)
    waited = tl.full((), 0, tl.int64)
    behind = tl.min(_slack(flags_ptr, epoch, W, W_PAD), axis=0)
    while (behind < 0) & (waited <= patience):  # carries scalars only: a tensor breaks Triton 3.6
        if CLOCK:
            waited = tl.extra.cuda.globaltimer().to(tl.int64) - began
        else:
            waited += 1
        behind = tl.min(_slack(flags_ptr, epoch, W, W_PAD), axis=0)
    late = -1
    if behind < 0:
        late = tl.argmin(_slack(flags_ptr, epoch, W, W_PAD), axis=0)
    tl.debug_barrier()  # what any thread has acquired, all of them may read
    return late


@triton.jit
def report(status_ptr, alarm_ptr, code, phase, rank):
    """The first thing that goes wrong is kept, and shown to the host."""
    word = code | (phase << 8) | (rank << 16)
    if tl.atomic_cas(status_ptr, 0, word, sem="relaxed", scope="gpu") == 0:
        tl.store(alarm_ptr, word)


@triton.jit
def last_program(ticket_ptr):
    """Whether all other programs of the grid have got here; resets the ticket for next time."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def publish(peers_ptr, flags_at, phase, me, epoch, W: tl.constexpr, W_PAD: tl.constexpr):
    """Tells every rank that all this rank has written for it so far is there."""
    tl.debug_barrier()
    peer = tl.arange(0, W_PAD)
    base = tl.load(peers_ptr + peer, mask=peer < W, other=0) + flags_at
    flag = base.to(tl.pointer_type(tl.int32)) + phase * W + me
    value = tl.zeros((W_PAD,), tl.int32) + epoch
    tl.atomic_xchg(flag, value, mask=peer < W, sem="release", scope="sys")


@triton.jit
def my_first(done):
    """This program's first item of a list that follows ``done`` items shared out in turn."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - done % programs) % programs
