# SPDX-License-Identifier: Apache-2.0
"""Runs one command and sees to it that nothing of it outlives its owner.

``python -m moe_backend.measure.guard [--grace SECONDS] [--remove FOLDER]… -- COMMAND ARG…``

The owner holds the other end of standard input. When that pipe closes, however the owner ended
(return, exception, Ctrl-C, SIGTERM, even SIGKILL), or when a signal comes, the command is asked to
stop with SIGTERM, and after the grace every descendant is killed. Descendants cannot escape by a
new session or a double fork: the guard adopts orphans (a "child subreaper"). Helpers that unlink
shared memory (Python's resource tracker) are let live until they have done so; segments that a
killed process still leaves in /dev/shm are removed by name, only those its own processes had open.
Folders named with ``--remove`` go when the owner does; while it lives, it may still read them.

Standard library only: it must start at once and work when everything else is broken. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SHM = "/dev/shm/"
TRACKER = b"resource_tracker"
TRACKER_PATIENCE_S = 3.0
SNAPSHOT_EVERY_S = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def children_of(root: int) -> list[int]:
    """Ids of all living descendants of ``root``, parents before their children."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command in parentheses may hold anything; fields are counted after its end.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        for child in parents.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def segments_of(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if SHM in line and not line.endswith("(deleted)"):
                    found.add(line[line.index(SHM) :])
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith(SHM) and not target.endswith("(deleted)"):
                        found.add(target)
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _reap() -> None:
    """Collects adopted orphans that have ended, so that they do not stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(segments: set[str], foreign: set[str]) -> None:
    """Kills all descendants of this process and removes what they leave in shared memory.

    ``foreign`` are the names that were there before the command: never removed.
    """
    me, deadline = os.getpid(), time.monotonic() + TRACKER_PATIENCE_S
    while living := children_of(me):
        segments |= segments_of(living)
        patient = time.monotonic() < deadline
        _kill([pid for pid in living if not (patient and _is_tracker(pid))])
        time.sleep(0.05)
        _reap()
    for path in segments:
        if path.removeprefix(SHM) not in foreign:
            with contextlib.suppress(OSError):
                os.unlink(path)


class Guard:
    """The loop between the owner's pipe, the signals and the command."""

    def __init__(self, command: list[str], grace: float) -> None:
        self.grace = grace
        self.segments: set[str] = set()
        self._foreign = set(os.listdir(SHM)) if os.path.isdir(SHM) else set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._asked = self.owner_gone = False
        for number in ENDING:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _on_signal(self, *_: object) -> None:
        self._asked = True

    def _events(self) -> Iterator[None]:
        """Returns after each wake-up until the command has ended or somebody wants it ended."""
        while self.child.poll() is None and not self._asked:
            yield
            ready, _, _ = select.select([0, self._wake_read], [], [], SNAPSHOT_EVERY_S)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if 0 in ready and not os.read(0, 4096):
                self._asked = self.owner_gone = True

    def run(self) -> int:
        for _ in self._events():
            self.segments |= segments_of(children_of(os.getpid()))
        if self.child.poll() is None:
            self.segments |= segments_of(children_of(os.getpid()))
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.grace)
        code = self.child.poll()
        sweep(self.segments, self._foreign)
        # The owner may have gone meanwhile; then nobody else removes its folders.
        if select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            self.owner_gone = True
        return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description="run a command; end all of it with its owner")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds before the kill")
    parser.add_argument("--remove", action="append", default=[], help="folder of the command's own")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print("guard: cannot adopt orphans on this kernel", file=sys.stderr)
    guard = Guard(arguments.command, arguments.grace)
    code = guard.run()
    for folder in arguments.remove if guard.owner_gone else []:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
