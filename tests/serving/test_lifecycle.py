# SPDX-License-Identifier: Apache-2.0
"""Failed starts, signals and restarts of the real server leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leaks import Traces, alive, hear_interrupts, traces_of

from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.guard import children_of
from moe_backend.measure.server import PLUGIN_ARGS, ServerError, VllmServer

pytest.importorskip("vllm")
pytestmark = pytest.mark.serving
sys.path.insert(0, str(Path(__file__).parent))

from soak import turn  # noqa: E402


def failed_start(model, args) -> tuple[str, Traces]:
    """The message of a start that must fail, and the traces of its processes."""
    server = VllmServer(model, args).start()
    traces = Traces([], set(), server.port, [server.log.parent])
    try:
        with pytest.raises(ServerError) as caught:
            while not server.advance():
                seen = traces_of(server.pid, server.port)
                traces.pids = sorted({*traces.pids, *seen.pids})
                traces.segments |= seen.segments
                time.sleep(0.2)
    finally:
        server.stop()
    return str(caught.value), traces


def test_a_wrong_argument_is_named(checkpoint):
    message, traces = failed_start(checkpoint, ["--no-such-argument"])
    assert "unrecognized arguments: --no-such-argument" in message
    assert len(traces.pids) >= 2 and not traces.left_after()


def test_a_checkpoint_we_refuse_is_refused_with_the_reason(tmp_path):
    model = write_checkpoint(tmp_path / "bf16", weights="bf16")
    message, traces = failed_start(model, PLUGIN_ARGS)
    assert "tma_fp8" in message and "Traceback" not in message
    assert not traces.left_after()


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_demo_starts_leaves_nothing(tmp_path, demo_cache, number):
    """Ctrl-C in the middle of two starting servers."""
    environment = {**os.environ, "MOE_BACKEND_CACHE_DIR": demo_cache}
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_backend.cli.main", "demo", "--out", str(tmp_path / "out")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    for line in process.stderr:
        if "tma_fp8 server: reading" in line or "tma_fp8 server: starting the engine" in line:
            break
    pids = children_of(process.pid)
    process.send_signal(number)
    said = process.stderr.read()
    code = process.wait(60)
    assert len(pids) >= 4, "two guards and two servers were running"
    assert code == 128 + number
    assert "every server is stopped" in said and "Traceback" not in said
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("end", ["stop", "kill while starting"])
def test_restarts_do_not_leak(checkpoint, end):
    """Three ways of ending, twenty times: ``make soak``."""
    found = turn(checkpoint, end)
    assert found["processes"] >= 3, "front end and engine were running"
    assert found["left"] == []


def test_serve_is_the_server_itself_and_ends_on_ctrl_c(checkpoint):
    """``moe-backend serve`` becomes vLLM's process: no wrapper stands between it and signals."""
    shown = [sys.executable, "-m", "moe_backend.cli.main", "serve", str(checkpoint)]
    command = json.loads(subprocess.run([*shown, "--json"], capture_output=True).stdout)["command"]
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    process = subprocess.Popen(
        [*shown, "--port", "0", "--enforce-eager"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    for line in process.stdout:
        if b"Resolved architecture" in line:
            break
    assert b"vllm.entrypoints" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    pids = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.stdout.read()
    process.wait(60)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]
