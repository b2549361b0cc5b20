# SPDX-License-Identifier: Apache-2.0
"""The symm transport: kernels that write into the peers' memory, no host synchronisation.

Errors that the device finds (a late rank, an overflow, a rank's refusal) are raised by the next
call or by ``check()``; until then results are NaN, and nothing waits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_backend.distributed.agreement import agree
from moe_backend.distributed.alltoall import DTYPES, problem_of, row_bytes
from moe_backend.distributed.backend import Backend
from moe_backend.distributed.config import EPConfig
from moe_backend.distributed.errors import EPMismatch
from moe_backend.distributed.handle import ExpertRows
from moe_backend.distributed.symm_memory import Alarm, SymmetricBuffer, require_peer_access
from moe_backend.kernels.ep_buffers import PHASES, Endpoint, Layout, make_slot
from moe_backend.types import Routing

DEFAULT_PROGRAMS = 528  # that move rows: four on each of an H200's SMs
DEFAULT_STAGING = 64 << 20
CLOCK = True  # waits look at the GPU's clock; Triton's interpreter has none


def layout_of(config: EPConfig, world_size: int) -> Layout:
    return Layout(
        world_size, config.num_experts, config.hidden, config.top_k, config.max_tokens,
        config.rows(world_size), config.align, config.slots, config.wire == "fp8",
    )  # fmt: skip


class Flight(NamedTuple):
    """A dispatch on its way: its slot and the source's number of tokens."""

    slot: int
    num_tokens: int


class SymmExchange:
    """Dispatch and combine of one rank. Can be captured in CUDA graphs once it is made.

    Slots are taken lowest first and freed by combine, so that captured and eager calls of different
    ranks meet in the same memory whatever ran before.
    """

    def __init__(
        self, config: EPConfig, control: Backend, place: torch.Tensor, programs: int
    ) -> None:
        self.config, self._control = config, control
        wrong = "" if config.dtype is torch.bfloat16 else f"symm carries bf16, not {config.dtype}"
        agree(control, "symm exchange", {"programs": programs}, problem=wrong)
        require_peer_access(control)
        layout = layout_of(config, control.world_size)
        self._buffer = SymmetricBuffer(layout.nbytes, control)
        device = self._buffer.peers.device
        self._alarm = Alarm(device, PHASES)
        assert self._buffer.local is not None
        self._end: Endpoint | None = Endpoint(
            layout, control.rank, self._buffer.local, self._buffer.peers, place.to(device),
            self._alarm.status, self._alarm.seen, int(control.timeout_s * 1e9), programs, CLOCK,
            tuple(make_slot(layout, device) for _ in range(config.slots)),
        )  # fmt: skip
        self._free = list(range(config.slots))

    def dispatch(
        self, x: torch.Tensor, routing: Routing, problem: str
    ) -> tuple[ExpertRows, Flight]:
        from moe_backend.kernels import ep_dispatch, ep_plan

        end = self._ready()
        if not self._free:
            raise ValueError(
                f"{self.config.slots} dispatches are in flight; combine one of them first"
            )
        slot = min(self._free)
        if problem:
            nothing = torch.empty(
                (0, self.config.top_k), dtype=torch.int32, device=end.peers.device
            )
            ep_plan.count(end, slot, nothing, refusal=1)
            ep_plan.arrange(end, slot)
            raise EPMismatch(f"dispatch: rank {end.me}: {problem}")
        self._free.remove(slot)
        ids, weights = routing.topk_ids.contiguous(), routing.topk_weights.contiguous()
        ep_plan.count(end, slot, ids)
        ep_plan.arrange(end, slot)
        ep_dispatch.send(end, slot, x, ids, weights)
        data, mine = ep_dispatch.receive(end, slot), end.slots[slot]
        scale = mine.scale if self.config.wire == "fp8" else None
        tiles = mine.tile_expert, mine.tile_rows, mine.num_tiles
        rows = ExpertRows(data, scale, *tiles, self.config.align)
        return rows, Flight(slot, x.shape[0])

    def combine(self, rows: torch.Tensor, flight: Flight) -> torch.Tensor:
        from moe_backend.kernels import ep_combine

        end, want = self._ready(), (self._layout.rows, self.config.hidden)
        if tuple(rows.shape) != want or rows.dtype is not torch.bfloat16:
            raise ValueError(
                f"rows: expected bfloat16 of shape {want}, found {rows.dtype} of shape "
                f"{tuple(rows.shape)}"
            )
        ep_combine.send_back(end, flight.slot, rows.contiguous())
        out = torch.empty(
            (flight.num_tokens, self.config.hidden), dtype=torch.bfloat16, device=rows.device
        )
        ep_combine.collect(end, flight.slot, out)
        self.release(flight)
        return out

    def release(self, flight: Flight) -> None:
        """Frees a dispatch's slot. Without its combine only while nothing else but the very same
        tokens is dispatched there: for timing."""
        self._free.append(flight.slot)

    def move_experts(self, place: torch.Tensor) -> None:
        self._ready().place.copy_(place)

    def check(self) -> None:
        self._control.check()
        error = self._alarm.error(self._control.timeout_s)
        if error is not None:
            raise error

    def destroy(self) -> None:
        """Waits for this rank's kernels, then unmaps. For all ranks, after their last combine."""
        if self._end is not None:
            torch.cuda.synchronize(self._end.peers.device)
        self._end = None
        self._buffer.destroy()

    @property
    def _layout(self) -> Layout:
        return self._ready().layout

    def _ready(self) -> Endpoint:
        if self._end is None:
            raise ValueError("this exchange was destroyed")
        if not torch.cuda.is_current_stream_capturing():
            self.check()
        return self._end


class SymmBackend(Backend):
    """All-to-all-v through symmetric staging memory of ``capacity_bytes`` per source rank."""

    name = "symm"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, *, capacity_bytes: int = 0):
        from moe_backend.distributed.api import control_transport
        from moe_backend.kernels.ep_alltoallv import Staging

        super().__init__(group, timeout_s)
        self._control = control_transport("symm", group, timeout_s)
        require_peer_access(self._control)
        capacity = -(-(capacity_bytes or DEFAULT_STAGING) // 256) * 256
        self.nbytes = 2 * Staging.half_bytes(self.world_size, capacity)
        self._buffer = SymmetricBuffer(self.nbytes, self._control)
        device = self._buffer.peers.device
        self._alarm = Alarm(device, ("all-to-all-v",))
        assert self._buffer.local is not None
        self._end = Staging(
            self.world_size, self.rank, capacity, self._buffer.local, self._buffer.peers,
            torch.zeros(8, dtype=torch.int32, device=device), self._alarm.status, self._alarm.seen,
            int(timeout_s * 1e9), DEFAULT_PROGRAMS, CLOCK,
        )  # fmt: skip

    def gather(self, words: Sequence[int], phase: str) -> list[list[int]]:
        return self._control.gather(words, phase)

    def exchange(self, send, send_rows, recv, recv_rows, phase) -> None:
        device = self._buffer.peers.device
        counts = torch.tensor(list(send_rows), device=device)
        self.alltoallv(send, counts, recv, torch.empty_like(counts))

    def alltoallv(self, send, send_counts, recv, recv_counts) -> None:
        from moe_backend.kernels import ep_alltoallv

        if not torch.cuda.is_current_stream_capturing():
            self.check()
        problem = problem_of(send, send_counts, recv, recv_counts, self.world_size)
        if problem:
            none = torch.zeros(self.world_size, dtype=torch.int64, device=self._end.peers.device)
            empty = torch.empty((0, 1), dtype=torch.uint8, device=none.device)
            ep_alltoallv.put(self._end, empty, none, empty, 1, 0, refusal=True)
            ep_alltoallv.take(self._end, empty, none, 1, 0)  # this rank breaks off like the others
            raise EPMismatch(f"alltoallv: rank {self.rank}: {problem}")
        size, dtype = row_bytes(send), DTYPES.index(send.dtype)
        ep_alltoallv.put(self._end, send, send_counts, recv, size, dtype)
        ep_alltoallv.take(self._end, recv, recv_counts, size, dtype)

    def check(self) -> None:
        super().check()
        error = self._alarm.error(self.timeout_s)
        if error is not None:
            raise error

    def destroy(self) -> None:
        torch.cuda.synchronize(self._buffer.peers.device)
        self._buffer.destroy()
