# SPDX-License-Identifier: Apache-2.0
"""Status and metrics of the plugin, mounted under ``/moe`` on vLLM's own OpenAI application.

    vllm serve MODEL --quantization tma_fp8 \\
        --worker-extension-cls moe_backend.vllm_plugin.status.StatusExtension \\
        --middleware moe_backend.vllm_plugin.gateway.MoEGateway

``/moe/status`` says which layer runs where and why; ``/moe/metrics`` holds the same as Prometheus
metrics, which also appear in vLLM's ``/metrics`` (with one API server process; with several, vLLM
collects from files and only ``/moe/metrics`` has them). With MOE_BACKEND_BALANCE=1 ``/moe/balance``
and ``/moe/balance.html`` show the experts' load. No endpoint of vLLM is re-implemented.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

import moe_backend
from moe_backend.vllm_plugin.balance_pages import BalanceCollector, BalanceReader, add_routes
from moe_backend.vllm_plugin.rpc import StatusUnavailable, ask

PREFIX = "/moe"
OURS = "moe_backend"
MAX_AGE_S = 2.0  # an engine step is not delayed more often than this, however often we are asked


class StatusReader:
    """Asks the engine's workers for their layers, at most once per ``MAX_AGE_S``."""

    def __init__(self, vllm_app: FastAPI) -> None:
        self._app = vllm_app
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self.latest: dict[str, Any] | None = None
        self.failure = "not asked yet"
        self.balance = BalanceReader(vllm_app)

    async def read(self) -> dict[str, Any]:
        async with self._lock:
            if self.latest is None or time.monotonic() - self._read_at > MAX_AGE_S:
                try:
                    self.latest = summarise(await ask(self._app, "moe_status"))
                    self.failure = ""
                except StatusUnavailable as error:
                    self.latest, self.failure = None, str(error)
                    raise
                self._read_at = time.monotonic()
            return self.latest


def versions() -> dict[str, str]:
    """What runs in this process; triton is absent where it is not installed."""
    import torch
    import vllm

    found = {
        "moe_backend": moe_backend.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


def device() -> str:
    """The accelerator's name; never opens a context on it."""
    from vllm.platforms import current_platform

    try:
        return current_platform.get_device_name()
    except (NotImplementedError, RuntimeError):
        return str(getattr(current_platform, "device_type", "unknown"))


def summarise(workers: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The answer of ``/moe/status`` from what every worker says of its layers."""
    backends = Counter(row["backend"] for rows in workers for row in rows)
    total = sum(backends.values())
    return {
        "active": total > 0 and backends[OURS] == total,
        "layers": dict(backends),
        "versions": versions(),
        "device": device(),
        "workers": [{"rank": rank, "layers": rows} for rank, rows in enumerate(workers)],
    }


class StatusCollector:
    """Prometheus metrics of the status that was read last."""

    def __init__(self, reader: StatusReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Any]:
        status = self._reader.latest
        up = GaugeMetricFamily(
            "moe_backend_status_up", "1 when the workers' status could be read, else 0"
        )
        up.add_metric([], float(status is not None))
        yield up
        if status is None:
            return
        info = InfoMetricFamily("moe_backend", "versions and device of this server")
        info.add_metric([], {**status["versions"], "device": status["device"]})
        yield info
        layers = GaugeMetricFamily(
            "moe_backend_layers", "MoE layers by who runs them", labels=["rank", "backend"]
        )
        each = GaugeMetricFamily(
            "moe_backend_layer_info",
            "1 for every MoE layer, with who runs it and why",
            labels=["rank", "layer", "backend", "reason"],
        )
        for worker in status["workers"]:
            rank = str(worker["rank"])
            counts = Counter({OURS: 0, "engine": 0})
            for row in worker["layers"]:
                counts[row["backend"]] += 1
                each.add_metric([rank, row["layer"], row["backend"], row["reason"]], 1.0)
            for backend, count in counts.items():
                layers.add_metric([rank, backend], float(count))
        yield layers
        yield each


class MoEGateway:
    """ASGI middleware for vLLM's ``--middleware``: mounts the gateway when the server starts.

    Subclass it and extend ``build`` to add routes of your own; see ``serve_examples/gateway.py``.
    """

    def __init__(self, app: Any) -> None:
        self._next = app
        self._reader: StatusReader | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" and self._reader is None:
            self._mount(scope["app"])
        elif scope.get("path") == "/metrics" and self._reader is not None:
            await _refresh(self._reader)
        await self._next(scope, receive, send)

    def _mount(self, vllm_app: FastAPI) -> None:
        self._reader = StatusReader(vllm_app)
        collector = StatusCollector(self._reader)
        REGISTRY.register(collector)  # type: ignore[arg-type]
        vllm_app.mount(PREFIX, self.build(self._reader, collector))
        self._reader.balance.begin()

    def build(self, reader: StatusReader, collector: StatusCollector) -> FastAPI:
        """The FastAPI application that stands under ``/moe``."""
        gateway = FastAPI(title="moe-backend gateway", version=moe_backend.__version__)
        registry = CollectorRegistry()
        registry.register(collector)  # type: ignore[arg-type]
        registry.register(BalanceCollector(reader.balance))  # type: ignore[arg-type]
        add_routes(gateway, reader.balance)

        @gateway.get("/status")
        async def status() -> Response:
            """Which layer runs where and why, chosen configurations, versions."""
            try:
                return JSONResponse(await reader.read())
            except StatusUnavailable as error:
                return JSONResponse({"active": False, "error": str(error)}, status_code=503)

        @gateway.get("/metrics")
        async def metrics() -> Response:
            """Status and balance as Prometheus metrics."""
            await _refresh(reader)
            await reader.balance.refresh()
            text = await asyncio.to_thread(generate_latest, registry)  # a line for every expert
            return Response(text, media_type=CONTENT_TYPE_LATEST)

        return gateway


async def _refresh(reader: StatusReader) -> None:
    """Reads the status; a failure shows as moe_backend_status_up 0, not as an error page."""
    with contextlib.suppress(StatusUnavailable):
        await reader.read()
