# SPDX-License-Identifier: Apache-2.0
"""One real vLLM server with the plugin and the example gateway for the whole session."""

import os
from pathlib import Path

import pytest

from moe_backend import envs
from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.server import GATEWAY_ARGS, PLUGIN_ARGS, VllmServer

ROOT = Path(__file__).parents[2]
GATEWAY = (*GATEWAY_ARGS[:2], "--middleware", "gateway.Gateway")  # serve_examples/gateway.py
MODEL = "tiny"
SMALL = ("--max-model-len", "512", "--served-model-name", MODEL)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """In a lasting place: what vLLM compiles is kept by the model's path."""
    folder = envs.load().cache_dir / "tests" / "tiny-deepseek"
    return write_checkpoint(folder, weights="fp8")


@pytest.fixture(scope="session")
def server(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    paths = os.pathsep.join(filter(None, [str(ROOT / "serve_examples"), os.getenv("PYTHONPATH")]))
    args = [*PLUGIN_ARGS, *GATEWAY, *SMALL]
    env = {"PYTHONPATH": paths, "MOE_BACKEND_BALANCE": "1"}
    with VllmServer(checkpoint, args, env=env, log=log) as running:
        yield running


@pytest.fixture
def client(server):
    import httpx

    with httpx.Client(base_url=server.base_url, timeout=120) as opened:
        yield opened
        assert opened.get("/health").status_code == 200, "the test left the server ill"
