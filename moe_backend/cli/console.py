# SPDX-License-Identifier: Apache-2.0
"""How every command speaks: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()  # results for people
progress_console = Console(stderr=True)  # progress, notes and errors


def emit_json(obj: Any) -> None:
    """One JSON document on stdout; paths and other plain objects become strings."""
    json.dump(obj, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with a message that says what, why and what to do; no traceback."""
    # Escaped: "[rows, columns]" in a message is text, not a style.
    # Wrapped for a terminal only: a log or a script gets the message in one piece.
    wrap = not progress_console.is_terminal
    line = f"[bold red]error:[/] {escape(message)}"
    progress_console.print(line, highlight=False, soft_wrap=wrap)
    raise typer.Exit(code)
