# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a process of its own: gloo, and NCCL with ``cuda``.

Processes are forked from a server that has imported torch once. Functions must be importable by
name (module level) and get ``(rank, world_size, *args)``; what they return is sent back.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "ranks", "moe_backend.reference"])


def _enter(work: bytes, rank, world_size, folder, channel, cuda) -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # pytest calls test modules tests.folder.name
    function, args = pickle.loads(work)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        result = (True, function(rank, world_size, *args))
    except BaseException as error:  # the parent raises it, with this rank's traceback
        result = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    channel.send(result)
    channel.close()
    os._exit(0)  # destroying a group whose peer is dead may hang; not what is tested here


class Ranks:
    """Started ranks. ``results`` waits for those that are still expected to answer."""

    def __init__(
        self, function: Callable[..., Any], world_size: int, *args: Any, cuda: bool = False
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes, self._channels = [], []
        work = pickle.dumps((function, args))
        for rank in range(world_size):
            mine, theirs = _context.Pipe()
            process = _context.Process(
                target=_enter,
                args=(work, rank, world_size, self._folder.name, theirs, cuda),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._channels.append(mine)

    def answer(self, rank: int, timeout: float) -> tuple[bool, Any]:
        """Whether the rank's function returned, and its result or the text of its error."""
        channel = self._channels[rank]
        if not channel.poll(timeout):
            raise TimeoutError(f"rank {rank} did not finish within {timeout:.0f} s")
        try:
            return channel.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} died") from None

    def results(self, timeout: float = 60.0) -> list[Any]:
        end, out = time.monotonic() + timeout, []
        try:
            for rank in range(len(self.processes)):
                ok, value = self.answer(rank, max(0.1, end - time.monotonic()))
                assert ok, f"rank {rank} failed: {value}"
                out.append(value)
        finally:
            self.stop()
        return out

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    cuda: bool = False,
) -> list[Any]:
    """Results of ``function`` by rank; raises if a rank fails."""
    return Ranks(function, world_size, *args, cuda=cuda).results(timeout)
