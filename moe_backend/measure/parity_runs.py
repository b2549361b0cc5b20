# SPDX-License-Identifier: Apache-2.0
"""The parity check's engines as guarded subprocesses: started, watched, surely ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from moe_backend.measure import server_log
from moe_backend.measure.server import server_environment

POLL_S = 0.25
GRACE_S = 20.0
OnProgress = Callable[[str, float], None]  # what happens, share done of this engine's run


class ParityError(RuntimeError):
    """The comparison could not be made; the message says why."""


def _environment(side: str, folder: Path) -> dict[str, str]:
    """The default's engine does not even load our plugin."""
    # vLLM leaves a rendezvous file in the temporary folder of every run.
    extra = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NO_COLOR": "1", "TMPDIR": str(folder)}
    if side == "default":
        groups = ("vllm.general_plugins", "vllm.platform_plugins")
        others = {e.name for group in groups for e in entry_points(group=group)} - {"tma_fp8"}
        extra["VLLM_PLUGINS"] = ",".join(sorted(others))
    return server_environment(extra)


def run_engine(
    side: str, job: dict[str, Any], work: Path, timeout: float, on_progress: OnProgress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One engine in a guarded subprocess; its result and its activations."""
    folder = work / side
    folder.mkdir()
    file, log = folder / "job.json", folder / "engine.log"
    file.write_text(json.dumps(job))
    guarded = [sys.executable, "-m", "moe_backend.measure.guard", "--"]
    command = [*guarded, sys.executable, "-m", "moe_backend.measure.parity_engine", str(file)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=_environment(side, folder),
            cwd=folder,
            start_new_session=True,
        )
        try:
            _watch(process, side, folder, timeout, on_progress)
        finally:
            _end(process)
    if process.returncode or not (folder / "result.json").exists():
        cause = server_log.describe_failure(log)
        raise ParityError(f"the {side} engine failed: {cause}\n(whole log: {log})")
    return load_result(folder)


def load_result(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What parity_engine left in ``folder``: its result and its activations."""
    from safetensors.torch import load_file

    result = json.loads((folder / "result.json").read_text())
    return result, load_file(folder / "activations.safetensors")


def _watch(
    process: subprocess.Popen, side: str, folder: Path, timeout: float, on_progress: OnProgress
) -> None:
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((folder / "progress.json").read_text())
            on_progress(f"{side}: {told['words']}", told["done"] / told["total"])
        if time.monotonic() > deadline:
            raise ParityError(
                f"the {side} engine took longer than {timeout:.0f} s (log: {folder}/engine.log); "
                "give a larger --timeout or fewer prompts"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)


def _end(process: subprocess.Popen) -> None:
    """Closing the pipe tells the guard to end the engine and all of its processes."""
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
