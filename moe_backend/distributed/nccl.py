# SPDX-License-Identifier: Apache-2.0
"""The transport of NCCL's collectives: for comparison, without peer access, and across nodes.

The host reads the counts, so this cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_backend.distributed.backend import Backend


class NcclBackend(Backend):
    name = "nccl"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        backends = {}
        if torch.cuda.is_available():
            backends = dict(b.split(":") for b in _backend_config(group).split(",") if ":" in b)
        if backends.get("cuda") != "nccl":
            raise ValueError(
                "backend nccl: the group has no NCCL transport for CUDA tensors. Create it with "
                "backend='nccl' on a machine with CUDA, or use gloo on a CPU"
            )
        super().__init__(group, timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, words: Sequence[int], phase: str) -> list[list[int]]:
        self.check()
        mine = torch.zeros(self.words, dtype=torch.int64)
        mine[: len(words)] = torch.tensor(words, dtype=torch.int64)
        out = torch.empty((self.world_size, self.words), dtype=torch.int64, device=self.device)
        mine = mine.to(self.device)
        self._bounded(lambda: dist.all_gather_into_tensor(out, mine, self.group), phase)
        return out[:, : len(words)].tolist()

    def exchange(self, send, send_rows, recv, recv_rows, phase) -> None:
        self.check()
        self._bounded(
            lambda: dist.all_to_all_single(
                recv, send, list(recv_rows), list(send_rows), group=self.group
            ),
            phase,
        )

    def _bounded(self, collective, phase: str) -> None:
        """Runs a collective and polls its completion: NCCL itself would abort the process."""
        began = time.monotonic()
        try:
            collective()
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                if time.monotonic() - began > self.patience:
                    raise RuntimeError("the collective did not complete")
                time.sleep(0)
        except RuntimeError as error:
            others = [p for p in range(self.world_size) if p != self.rank]
            raise self.lost(others, phase, began, str(error)) from None


def _backend_config(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))
