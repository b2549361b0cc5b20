# SPDX-License-Identifier: Apache-2.0
"""Progress without a terminal: a line for each change and now and then, no flood."""

import io

from rich.console import Console

from moe_backend.cli import progress as module
from moe_backend.cli.progress import LiveProgress


def lines_of(monkeypatch, terminal: bool, calls) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    monkeypatch.setattr(module, "progress_console", console)
    with LiveProgress() as progress:
        for call in calls:
            progress(*call)
    return out.getvalue()


def test_one_line_for_each_change(monkeypatch):
    calls = [("server", "loading weights", i, None) for i in range(50)]
    calls += [("load", "round 1", i, 8) for i in range(8)] + [("server", "ready", 1, 1)]
    said = lines_of(monkeypatch, False, calls).splitlines()
    assert len(said) == 3
    assert "server: loading weights" in said[0] and "(0 of 8)" in said[1]


def test_a_long_stage_is_repeated_now_and_then(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.0)
    said = lines_of(monkeypatch, False, [("server", "compiling", 1, None)] * 3)
    assert len(said.splitlines()) == 3


def test_words_with_brackets_are_not_markup(monkeypatch):
    for terminal in (False, True):
        said = lines_of(monkeypatch, terminal, [("a", "loading [bold]x[/y]", 1, 2)])
        assert "[bold]x[/y]" in said


def test_bars_on_a_terminal(monkeypatch):
    said = lines_of(monkeypatch, True, [("load", "round 1", 1, 2), ("load", "done", 2, 2)])
    assert "load" in said and "done" in said and "✓" in said
