# SPDX-License-Identifier: Apache-2.0
"""Reads a vLLM server's log: how far the start has come, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# In the order of a start; the last one whose words appeared is where the server is.
STAGES = (
    ("Resolved architecture", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing weights"),
    ("Warming up model for the compilation", "compiling and warming up"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("KV cache size", "creating the KV cache"),
    ("Starting vLLM server", "opening the port"),
    ("Application startup complete", "ready"),
)
# "(Worker pid=12) ERROR 11-20 18:46:07 [file.py:944] text": only the text says something.
_PREFIX = re.compile(
    r"^(?:\((?:\w|[ =:])+\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+\d\d-\d\d [\d:]+\s+"
    r"\[[^\]]+\]\s?)?"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Refused)\b"
)
_USAGE = re.compile(r"^[\w.]+\.py: error: |^error: ")
# True, but they only pass on that something else failed.
_ECHOES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
    "cancelled",
    "KeyboardInterrupt",
    "SystemExit",
    "CancelledError",
)
MAX_CAUSE_LINES = 8


def plain(line: str) -> str:
    """The line without colours, process name, level, time and source."""
    return _PREFIX.sub("", _ANSI.sub("", line).rstrip())


def stage_of(text: str) -> str:
    """How far the start has come, in words for a person."""
    found = "starting Python"
    for words, stage in STAGES:
        if words in text:
            found = stage
    return found


def causes(lines: Iterable[str]) -> list[str]:
    """The message of the first real failure, with its continuation lines; empty if none is found.

    A failed start prints the same failure several times (worker, engine, front end), and the last
    ones only say that another process failed. Plugins that failed to load are not fatal.
    """
    texts = [plain(line) for line in lines]
    harmless = False
    for i, text in enumerate(texts):
        if text.startswith("Failed to load plugin"):
            harmless = True
        found = _USAGE.match(text) or _EXCEPTION.match(text)
        if not found:
            continue
        if harmless or any(echo in text for echo in _ECHOES):
            harmless = False
            continue
        return [text, *_continuation(texts[i + 1 :])]
    return []


def _continuation(texts: list[str]) -> list[str]:
    """The further lines of a message that spans several."""
    taken: list[str] = []
    for text in texts[: MAX_CAUSE_LINES - 1]:
        if not text.strip() or text.startswith(("Traceback", "During handling", "The above")):
            break
        if _EXCEPTION.match(text) or text.lstrip().startswith(("File ", "^", "~")):
            break
        taken.append(text)
    return taken


def describe_failure(log: Path) -> str:
    """What to quote of the log: the cause where one is found, else the last lines."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"the log could not be read: {error}"
    found = causes(lines)
    if found:
        return "\n".join(found)
    tail = [plain(line) for line in lines if line.strip()][-MAX_CAUSE_LINES:]
    return "\n".join(tail) or "the log is empty"
