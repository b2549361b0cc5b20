# SPDX-License-Identifier: Apache-2.0
"""Live progress of long work: bars on a terminal, one line for each change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from moe_backend.cli.console import progress_console

HEARTBEAT_S = 20.0  # without a terminal, a line at least this often


class LiveProgress:
    """Called with (name, what it does, how far, of how much or None); one bar for each name."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=progress_console,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._began = time.monotonic()

    def __enter__(self) -> LiveProgress:
        if progress_console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if progress_console.is_terminal:
            self._bars.stop()

    def __call__(self, name: str, text: str, done: float, total: float | None) -> None:
        if not progress_console.is_terminal:
            self._line(name, text, done, total)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, text=text)
        # An unknown total is a moving bar: seconds are already in the elapsed column.
        shown = done if total is not None else 0
        self._bars.update(self._tasks[name], completed=int(shown), total=total, text=text)
        if total is not None and done >= total:
            self._bars.stop_task(self._tasks[name])

    def _line(self, name: str, text: str, done: float, total: float | None) -> None:
        now = time.monotonic()
        before, at = self._said.get(name, ("", float("-inf")))
        if text == before and now - at < HEARTBEAT_S:
            return
        self._said[name] = (text, now)
        count = f" ({int(done)} of {int(total)})" if total and total > 1 else ""
        progress_console.print(
            f"[{now - self._began:4.0f} s] {name}: {text}{count}", markup=False, highlight=False
        )
