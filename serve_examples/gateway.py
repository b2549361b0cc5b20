# SPDX-License-Identifier: Apache-2.0
"""A gateway of your own on vLLM's OpenAI application: the shipped pages plus two more routes.

    python serve_examples/gateway.py MODEL [any vLLM argument…]

It starts the same server as ``moe-backend serve`` with this file's ``Gateway`` as vLLM's
middleware. Nothing of vLLM is re-implemented: completions, chat, streaming and ``/metrics`` are
vLLM's own; this application is mounted beside them under ``/moe``:

    /moe/status   which layer runs where and why, versions (shipped)
    /moe/metrics  the same for Prometheus, also in vLLM's /metrics (shipped)
    /moe/ready    200 only when every MoE layer runs on our kernels: for a load balancer
    /moe/         the status as a page for people
"""

from __future__ import annotations

import os
import sys
from html import escape
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from moe_backend.vllm_plugin.gateway import (
    MoEGateway,
    StatusCollector,
    StatusReader,
    StatusUnavailable,
)

MIDDLEWARE = "gateway.Gateway"  # this file, found through PYTHONPATH


class Gateway(MoEGateway):
    """The shipped gateway with two routes added."""

    def build(self, reader: StatusReader, collector: StatusCollector) -> FastAPI:
        gateway = super().build(reader, collector)

        @gateway.get("/ready")
        async def ready() -> JSONResponse:
            try:
                status = await reader.read()
            except StatusUnavailable as error:
                return JSONResponse({"ready": False, "error": str(error)}, status_code=503)
            code = 200 if status["active"] else 503
            return JSONResponse({"ready": status["active"], "layers": status["layers"]}, code)

        @gateway.get("/")
        async def page() -> HTMLResponse:
            try:
                return HTMLResponse(render(await reader.read()))
            except StatusUnavailable as error:
                return HTMLResponse(f"<p>{escape(str(error))}</p>", status_code=503)

        return gateway


def render(status: dict) -> str:
    """A table of the layers."""
    rows = "".join(
        f"<tr><td>{worker['rank']}<td>{escape(row['layer'])}<td>{escape(row['backend'])}"
        f"<td>{escape(row['reason'])}"
        for worker in status["workers"]
        for row in worker["layers"]
    )
    versions = ", ".join(f"{k} {v}" for k, v in status["versions"].items())
    return (
        '<!doctype html><meta charset="utf-8"><title>moe-backend</title>'
        "<style>body{font:15px system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:left}"
        f"</style><h1>MoE layers</h1><p>{escape(versions)}; {escape(status['device'])}</p>"
        f"<table><tr><th>rank<th>layer<th>runs on<th>why{rows}</table>"
    )


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if words else 2)
    from moe_backend.measure.server import (
        GATEWAY_ARGS,
        PLUGIN_ARGS,
        server_command,
        server_environment,
    )

    shipped = dict(zip(GATEWAY_ARGS[::2], GATEWAY_ARGS[1::2], strict=True))
    arguments = [*PLUGIN_ARGS, "--worker-extension-cls", shipped["--worker-extension-cls"]]
    command = server_command(["--model", *words, *arguments, "--middleware", MIDDLEWARE])
    environment = server_environment()
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
