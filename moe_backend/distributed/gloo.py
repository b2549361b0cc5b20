# SPDX-License-Identifier: Apache-2.0
"""The transport of the CPU: point-to-point messages over gloo, each wait with a bound.

Collectives of gloo fail as a whole; messages tell which peer was being waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_backend.distributed.backend import Backend

_abandoned: list = []  # buffers of failed transfers: gloo may still write into them


class GlooBackend(Backend):
    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError:
            raise ValueError(
                "backend gloo: the group has no CPU transport. Create it with backend='gloo' or "
                "'cpu:gloo,cuda:nccl'"
            ) from None
        super().__init__(group, timeout_s)

    def gather(self, words: Sequence[int], phase: str) -> list[list[int]]:
        out = torch.zeros((self.world_size, self.words), dtype=torch.int64)
        out[self.rank, : len(words)] = torch.tensor(words, dtype=torch.int64)
        mine = out[self.rank].clone()
        self._swap(dict.fromkeys(self._peers(), mine), {p: out[p] for p in self._peers()}, phase)
        return out[:, : len(words)].tolist()

    def exchange(self, send, send_rows, recv, recv_rows, phase) -> None:
        outgoing = dict(enumerate(send.split(list(send_rows))))
        incoming = dict(enumerate(recv.split(list(recv_rows))))
        incoming.pop(self.rank).copy_(outgoing.pop(self.rank))
        self._swap(
            {p: t for p, t in outgoing.items() if t.numel()},
            {p: t for p, t in incoming.items() if t.numel()},
            phase,
        )

    def _peers(self) -> list[int]:
        return [p for p in range(self.world_size) if p != self.rank]

    def _swap(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], phase: str
    ) -> None:
        self.check()
        began, pending, waiting_for = time.monotonic(), [], -1
        try:
            for peer, buffer in incoming.items():
                pending.append((peer, dist.irecv(buffer, group=self.group, group_src=peer)))
            for peer, buffer in outgoing.items():
                pending.append((peer, dist.isend(buffer, group=self.group, group_dst=peer)))
            for waiting_for, work in pending:  # noqa: B007  (read by the handler)
                left = self.patience - (time.monotonic() - began)
                assert work is not None  # None only for ranks outside the group
                work.wait(timedelta(seconds=max(left, 0.001)))
        except RuntimeError as error:
            _abandoned.append((pending, outgoing, incoming))
            raise self.lost([waiting_for], phase, began, str(error)) from None
