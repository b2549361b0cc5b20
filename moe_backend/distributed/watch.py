# SPDX-License-Identifier: Apache-2.0
"""Looks after an exchange whose calls nobody sees: replaying a CUDA graph runs no Python."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moe_backend.distributed.errors import EPError


class Watch:
    """Calls ``check`` every ``period_s`` in a thread of its own, and ``on_error`` once with the
    first EPError that it raises. Reads a word of host memory: the GPU is not disturbed."""

    def __init__(
        self,
        check: Callable[[], None],
        on_error: Callable[[EPError], None],
        period_s: float = 1.0,
    ) -> None:
        self._check, self._on_error, self._period_s = check, on_error, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-backend-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._check()
            except EPError as error:
                self._on_error(error)
                return

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
