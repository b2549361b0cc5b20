# SPDX-License-Identifier: Apache-2.0
"""Memory that every rank of a host can address, and what devices report through it."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_backend.distributed.agreement import agree
from moe_backend.distributed.backend import Backend
from moe_backend.distributed.errors import EPError, EPMismatch, EPOverflow, EPTimeout
from moe_backend.support import Support, supports_device


def require_peer_access(control: Backend) -> None:
    """Raises EPMismatch on every rank unless all of them can address each other's GPU."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.current_device() if cuda else -1
    host = zlib.crc32(_host_identity().encode())
    every = agree(control, "peer access", {}, extra=[host, device])
    unreachable = []
    for rank, (theirs_host, theirs) in enumerate(every):
        known = cuda and theirs_host == host and theirs not in (-1, device)
        if known and theirs < torch.cuda.device_count():
            reachable = torch.cuda.can_device_access_peer(device, theirs)
            unreachable += [] if reachable else [rank]
    capability = torch.cuda.get_device_capability(device) if cuda else None
    verdict = supports_symmetric_memory(capability, len({h for h, _ in every}), unreachable)
    agree(control, "peer access verdict", {}, problem=verdict.reason)


def supports_symmetric_memory(
    capability: tuple[int, int] | None, num_hosts: int, unreachable: Sequence[int]
) -> Support:
    """What this rank needs for the symm transport.

    ``unreachable`` are the group's ranks whose GPU this rank's GPU cannot address.
    """
    remedy = "Use MOE_BACKEND_EP=nccl or engine"
    if capability is None:
        return Support(False, f"symm writes into other GPUs' memory, and here is no GPU. {remedy}")
    if num_hosts > 1:
        return Support(
            False, f"symm works within one host, and the group spans {num_hosts}. {remedy}"
        )
    if unreachable:
        ranks = ", ".join(map(str, unreachable))
        return Support(False, f"this GPU has no peer access to those of ranks {ranks}. {remedy}")
    return supports_device(capability)


def _host_identity() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


class SymmetricBuffer:
    """``nbytes`` on every rank, zeroed, mapped by all. Collective; never inside a graph capture.

    Attributes:
        local: this rank's memory, uint8.
        peers: int64 ``[world_size]`` addresses of all ranks' memory, on the device.
    """

    def __init__(self, nbytes: int, control: Backend) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "symmetric memory is set up before a CUDA graph is captured, not in it"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        local = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(local, control.group)
        local.zero_()
        torch.cuda.synchronize(device)
        self.local: torch.Tensor | None = local
        self._handle: Any = handle
        self.peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        agree(control, "symmetric memory is ready", {"bytes": nbytes})

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory as this rank sees it."""
        assert self.local is not None
        return self._handle.get_buffer(rank, (self.local.numel(),), torch.uint8)

    def destroy(self) -> None:
        """Unmaps. Only once no rank's kernel uses the memory any more."""
        self.local, self._handle = None, None


class Alarm:
    """The device's status word and its copy that the host reads without waiting."""

    def __init__(self, device: torch.device, phases: tuple[str, ...]) -> None:
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._phases = phases

    def error(self, timeout_s: float) -> EPError | None:
        """What the device has reported, if anything."""
        return decode(int(self.seen[0]), self._phases, timeout_s)


def decode(word: int, phases: tuple[str, ...], timeout_s: float) -> EPError | None:
    """The error behind a status word: code | phase << 8 | rank << 16."""
    from moe_backend.kernels.ep_buffers import OVERFLOW, REFUSED

    code, phase, rank = word & 0xFF, phases[word >> 8 & 0xFF], word >> 16
    if code == 0:
        return None
    if code == REFUSED:
        return EPMismatch(f"{phase}: rank {rank} refused its input; its own error says why")
    if code == OVERFLOW:
        return EPOverflow(
            f"{phase}: rank {rank} would receive more rows than its stated capacity. Nothing was "
            "taken; raise the capacity or lower the number of tokens"
        )
    return EPTimeout([rank], phase, timeout_s)
