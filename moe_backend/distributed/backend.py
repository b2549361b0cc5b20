# SPDX-License-Identifier: Apache-2.0
"""The transports behind one interface, chosen by name: gloo, nccl, symm."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_backend import envs
from moe_backend.distributed import rollcall
from moe_backend.distributed.errors import EPError, EPTimeout

HEADER = 16  # integers of a message before its counts
NAMES = ("gloo", "nccl", "symm")


class Backend(ABC):
    """One rank's end of a transport over one group.

    All ranks call the same methods in the same order. After an EPError the transport is broken and
    refuses further use: what a peer has or has not received is unknown.
    """

    name: str

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.words = HEADER + self.world_size + 1
        self.step = 0
        self._broken: EPError | None = None

    def reserve(self, counts: int) -> None:
        """Makes room for ``counts`` integers per rank; all ranks reserve the same."""
        self.words = max(self.words, HEADER + counts)

    @abstractmethod
    def gather(self, words: Sequence[int], phase: str) -> list[list[int]]:
        """Everybody's integers, by rank. At most ``self.words`` of them."""

    @abstractmethod
    def exchange(
        self,
        send: torch.Tensor,
        send_rows: Sequence[int],
        recv: torch.Tensor,
        recv_rows: Sequence[int],
        phase: str,
    ) -> None:
        """Sends consecutive rows of bytes ``[rows, row_bytes]`` to each rank; receives likewise."""

    def alltoallv(self, send, send_counts, recv, recv_counts) -> None:
        """See :func:`moe_backend.distributed.alltoallv`."""
        from moe_backend.distributed.alltoall import through_host

        through_host(self, send, send_counts, recv, recv_counts)

    def destroy(self) -> None:  # noqa: B027  (most transports hold nothing of their own)
        """Gives resources back. Local: waits for nobody."""

    def check(self) -> None:
        """Raises the error that broke this transport."""
        if self._broken is not None:
            raise EPError(f"this exchange broke earlier: {self._broken}")

    def fail(self, error: EPError) -> EPError:
        """Remembers ``error`` as what broke the transport."""
        self._broken = self._broken or error
        return error

    @property
    def patience(self) -> float:
        """Seconds that a transfer may take; the rest of the bound is for the roll call."""
        return self.timeout_s - rollcall.grace(self.timeout_s)

    def lost(self, waited_for: Sequence[int], phase: str, began: float, detail: str) -> EPError:
        """The error for a wait that failed, naming the ranks that are really gone."""
        left = max(began + self.timeout_s - time.monotonic(), rollcall.grace(self.timeout_s) / 2)
        missing = rollcall.missing_ranks(self.group, waited_for, left)
        ranks = missing or waited_for
        detail = detail.strip().splitlines()[0][:160] if detail.strip() else ""
        return self.fail(EPTimeout(ranks, phase, time.monotonic() - began, detail))


def open_backend(
    name: str,
    group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float | None = None,
    capacity_bytes: int = 0,
) -> Backend:
    """Opens a transport. Collective: every rank of ``group`` calls it with the same arguments.

    Args:
        name: "gloo" (CPU tensors), "nccl" (CUDA tensors, also across nodes) or "symm" (CUDA
            tensors of one host with peer access, no host synchronisation).
        group: defaults to the world.
        timeout_s: bound on every wait; MOE_BACKEND_EP_TIMEOUT_S by default.
        capacity_bytes: for symm, bytes of staging per source rank.

    Raises:
        ValueError: for an unknown name, or a transport this group cannot use, with the reason.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group: call torch.distributed.init_process_group first")
    timeout_s = envs.load().ep_timeout_s if timeout_s is None else timeout_s
    if name == "gloo":
        from moe_backend.distributed.gloo import GlooBackend

        return GlooBackend(group, timeout_s)
    if name == "nccl":
        from moe_backend.distributed.nccl import NcclBackend

        return NcclBackend(group, timeout_s)
    if name == "symm":
        from moe_backend.distributed.symm import SymmBackend

        return SymmBackend(group, timeout_s, capacity_bytes=capacity_bytes)
    raise ValueError(f"backend: expected one of {', '.join(NAMES)}, found {name!r}")


_opened: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def shared_backend(name: str, group: dist.ProcessGroup | None) -> Backend:
    """The transport of that name which :func:`alltoallv` keeps for ``group``."""
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group: call torch.distributed.init_process_group first")
    of_group = _opened.setdefault(group, {})
    if name not in of_group:
        of_group[name] = open_backend(name, group)
    return of_group[name]
