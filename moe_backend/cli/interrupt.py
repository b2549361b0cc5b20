# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end a command in order: every ``with`` is left, one line is said."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from moe_backend.cli.console import fail


class Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt, no handler of errors may swallow it."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextlib.contextmanager
def ending(what_was_done: str) -> Iterator[None]:
    """Turns an interruption into a message and the exit code 130 or 143, after the clean-up."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _raise) if main else None
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {what_was_done}", code=130)
    except Terminated:
        fail(f"terminated; {what_was_done}", code=143)
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
