# SPDX-License-Identifier: Apache-2.0
"""Restarts the real server many times and looks for what it leaves behind: ``make soak``.

    python tests/serving/soak.py --times 20 [--json]

Turns end in three ways: asked to stop, killed while it answers, killed while it starts. The exit
code is 1 when anything stayed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from leaks import sockets_and_notes, traces_of  # noqa: E402

from moe_backend.measure.checkpoint import write_checkpoint  # noqa: E402
from moe_backend.measure.guard import children_of  # noqa: E402
from moe_backend.measure.server import PLUGIN_ARGS, VllmServer  # noqa: E402

ENDS = ("stop", "kill", "kill while starting")
ARGS = (*PLUGIN_ARGS, "--max-model-len", "256", "--enforce-eager", "--served-model-name", "tiny")
REQUEST = {"model": "tiny", "prompt": "again and again", "max_tokens": 4, "temperature": 0}


def kill_one(server: VllmServer) -> None:
    """SIGKILL for the newest of the server's processes: a worker, once there is one."""
    pids = children_of(server.pid)
    if pids:
        os.kill(pids[-1], signal.SIGKILL)


def turn(model: Path, end: str) -> dict[str, Any]:
    """One server from its start to its end, and what stayed of it."""
    began, text = time.monotonic(), ""
    server = VllmServer(model, ARGS).start()
    try:
        if end == "kill while starting":
            while server.stage() in ("starting Python", "reading the model's configuration"):
                server.advance()
                time.sleep(0.2)
        else:
            server.wait_ready()
            text = server.post_json("/v1/completions", REQUEST)["choices"][0]["text"]
        traces = traces_of(server.pid, server.port, server.log.parent)
        if end != "stop":
            kill_one(server)
    finally:
        server.stop()
    return {
        "end": end,
        "seconds": round(time.monotonic() - began, 1),
        "text": text,
        "processes": len(traces.pids),
        "segments": len(traces.segments),
        "left": traces.left_after(),
    }


def soak(times: int, say: Any) -> dict[str, Any]:
    """``times`` turns with the ends taking turns."""
    before, turns = sockets_and_notes(), []
    with tempfile.TemporaryDirectory(prefix="moe-soak-") as folder:
        model = write_checkpoint(Path(folder) / "fp8", weights="fp8")
        for number in range(times):
            found = turn(model, ENDS[number % len(ENDS)])
            turns.append(found)
            stayed = ", ".join(found["left"]) or "nothing left"
            say(f"{number + 1} of {times}: {found['end']}, {found['seconds']} s, {stayed}")
    texts = {found["text"] for found in turns if found["text"]}
    notes = sorted(sockets_and_notes() - before)
    clean = not notes and not any(found["left"] for found in turns) and len(texts) <= 1
    return {"clean": clean, "times": times, "texts": len(texts), "notes": notes, "turns": turns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="the result on stdout as JSON")
    arguments = parser.parse_args()
    if arguments.times < 1:
        parser.error("--times: expected at least 1")
    result = soak(arguments.times, lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(result, indent=2))
    print("no leak" if result["clean"] else "LEAKS, see above", file=sys.stderr)
    return 0 if result["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
