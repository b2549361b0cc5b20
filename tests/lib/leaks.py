# SPDX-License-Identifier: Apache-2.0
"""What a server could leave behind: processes, ports, shared memory, private folders."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from moe_backend.measure.guard import children_of


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def hear_interrupts() -> None:
    """For preexec_fn: a suite in the background hands an ignored SIGINT on to its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Traces:
    """Everything that belonged to one server while it ran."""

    pids: list[int]
    segments: set[str]
    port: int
    folders: list[Path] = field(default_factory=list)

    def left(self) -> list[str]:
        """What is still there, in words; empty when all is clean."""
        found = [f"process {pid}" for pid in self.pids if alive(pid)]
        found += [f"/dev/shm/{name}" for name in sorted(self.segments & shared_memory())]
        found += [str(folder) for folder in self.folders if folder.exists()]
        with socket.socket() as probe:
            if self.port and probe.connect_ex(("127.0.0.1", self.port)) == 0:
                found.append(f"port {self.port}")
        return found

    def left_after(self, patience: float = 20.0) -> list[str]:
        deadline = time.monotonic() + patience
        while (found := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def traces_of(pid: int, port: int, folder: Path | None = None) -> Traces:
    """Of a running server under the process ``pid``; segments are those its processes have open."""
    from moe_backend.measure.guard import SHM, segments_of

    pids = [pid, *children_of(pid)]
    segments = {path.removeprefix(SHM) for path in segments_of(pids)}
    return Traces(pids, segments, port, [folder] if folder else [])


def sockets_and_notes() -> set[str]:
    """vLLM's own leftovers in the temporary folder: rendezvous files and sockets."""
    folder = Path(tempfile.gettempdir())
    return {p.name for p in folder.iterdir() if p.is_socket() or p.name.startswith("vllm_dist_")}
