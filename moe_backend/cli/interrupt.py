# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and a closed terminal end a command in order: every ``with`` is left."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from moe_backend.cli.console import fail


class Terminated(BaseException):
    """A signal came; like KeyboardInterrupt, no handler of errors may swallow it."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


@contextlib.contextmanager
def ending(what_was_done: str) -> Iterator[None]:
    """Turns an interruption into a message and the exit code 128 + signal, after the clean-up."""
    main = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGTERM, signal.SIGHUP) if main else ()
    # What is ignored stays ignored: that is how nohup works.
    heard = [n for n in wanted if signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, _raise) for n in heard}
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {what_was_done}", code=130)
    except Terminated as signalled:
        fail(f"terminated; {what_was_done}", code=128 + signalled.args[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
