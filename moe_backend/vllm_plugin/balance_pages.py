# SPDX-License-Identifier: Apache-2.0
"""``/moe/balance`` and ``/moe/balance.html``: how evenly the experts are loaded, layer by layer.

The workers count since load (see live_balance.py); here readings are put together over ranks and a
window of them is kept. Nobody asks the workers when MOE_BACKEND_BALANCE is off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moe_backend import balance, envs
from moe_backend.vllm_plugin.rpc import StatusUnavailable, ask, sleeping

WINDOW_S = 60.0
MAX_AGE_S = 2.0  # an engine step is not delayed more often than this, however often we are asked
OFF = "statistics are off; start the server with MOE_BACKEND_BALANCE=1"


class BalanceReader:
    """Reads the workers' counters and keeps the window."""

    def __init__(self, vllm_app: FastAPI) -> None:
        self._app = vllm_app
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._first: asyncio.Task[None] | None = None
        self.enabled = envs.load().balance
        self.asleep = False
        self.failure = ""
        self.window = balance.Window(WINDOW_S)

    def begin(self) -> None:
        """Takes the first reading when the server starts, which leaves warm-up out of windows."""
        self._first = asyncio.create_task(self.refresh())

    async def refresh(self) -> None:
        """Reads when the last reading is old; a failure is kept in ``failure``."""
        async with self._lock:
            if not self.enabled or time.monotonic() - self._asked_at < MAX_AGE_S:
                return
            try:
                self.asleep = await sleeping(self._app)
                if not self.asleep:  # nothing has changed, and memory may be gone
                    rows = await ask(self._app, "moe_balance")
                    reading = balance.merge(row for found in rows for row in found)
                    self.window.add(time.monotonic(), reading)
                self.failure = ""
            except StatusUnavailable as error:
                self.failure = str(error)
            self._asked_at = time.monotonic()

    def answer(self) -> dict[str, Any]:
        """The JSON of ``/moe/balance``; numbers of the window, ``null`` where it saw no token."""
        if not self.enabled:
            return {"enabled": False, "reason": OFF, "layers": []}
        newest, loads = self.window.newest, self.window.loads()
        return {
            "enabled": True,
            "asleep": self.asleep,
            "complete": all(found.complete for found in newest.values()),
            "window_s": round(self.window.length, 1),
            "layers": [
                {
                    "layer": name,
                    "tokens": load.num_tokens,
                    "imbalance": load.imbalance,
                    "aux_loss": load.aux_loss,
                    "physical": newest[name].physical,
                    "tokens_per_expert": load.tokens.tolist(),
                }
                for name, load in loads.items()
            ],
        }


class BalanceCollector:
    """Prometheus metrics of the reading taken last; none when statistics are off."""

    def __init__(self, reader: BalanceReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Any]:
        reader = self._reader
        if not reader.enabled:
            return
        up = GaugeMetricFamily(
            "moe_backend_balance_up", "1 when the workers' counters could be read, else 0"
        )
        up.add_metric([], float(not reader.failure and not reader.asleep))
        yield up
        window = GaugeMetricFamily(
            "moe_backend_balance_window_seconds", "time that imbalance and aux loss are taken over"
        )
        window.add_metric([], reader.window.length)
        yield window
        experts = CounterMetricFamily(
            "moe_backend_expert_tokens",
            "tokens routed to an expert since load, warm-up included",
            labels=["layer", "expert"],
        )
        for name, found in reader.window.newest.items():
            for expert, count in enumerate(found.load.tokens.tolist()):
                experts.add_metric([name, str(expert)], count)
        yield experts
        imbalance = GaugeMetricFamily(
            "moe_backend_expert_imbalance",
            "tokens of the fullest expert against the mean, 1 when even",
            labels=["layer"],
        )
        loss = GaugeMetricFamily(
            "moe_backend_aux_loss", "load-balance loss with coefficient 1", labels=["layer"]
        )
        for name, load in reader.window.loads().items():
            for family, value in ((imbalance, load.imbalance), (loss, load.aux_loss)):
                if value is not None:
                    family.add_metric([name], value)
        yield imbalance
        yield loss


def add_routes(gateway: FastAPI, reader: BalanceReader) -> None:
    page = resources.files(__package__).joinpath("balance.html").read_text(encoding="utf-8")

    @gateway.get("/balance")
    async def balance_() -> Response:
        """Tokens per expert, imbalance and aux loss of every layer over the last minute."""
        await reader.refresh()
        if reader.failure:
            return JSONResponse({"enabled": True, "error": reader.failure}, status_code=503)
        return JSONResponse(reader.answer())

    @gateway.get("/balance.html", include_in_schema=False)
    async def balance_page() -> Response:
        return HTMLResponse(page)
