# SPDX-License-Identifier: Apache-2.0
"""The whole story on a small model: checkpoint, two real servers, load, parity, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_backend import envs
from moe_backend.measure import environment
from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.loadtest import (
    Plan,
    Report,
    ServerPool,
    default_side,
    measure,
    plugin_side,
    summarise,
)
from moe_backend.measure.parity import Request, run_parity
from moe_backend.measure.sides import shared_gpu_args, stock_model
from moe_backend.measure.vllm_bench import Load

SERVER_ARGS = ("--max-model-len", "1024")  # prompts are short; a small cache starts sooner
CACHE_GIB = 2.0


@dataclass(frozen=True)
class Setting:
    """What the demo measures; small enough for two cores."""

    preset: str = "tiny-deepseek"
    rates: tuple[float, ...] = (2.0, float("inf"))
    input_len: int = 64
    output_len: int = 16
    num_prompts: int = 12
    rounds: int = 2


def run_demo(out: Path, report: Report, setting: Setting | None = None) -> dict[str, Any]:
    """Runs everything and returns what ``report.write_report`` takes.

    What an earlier run left in the cache is used again: the checkpoint, its bf16 copy and the
    code that vLLM compiled.

    Args:
        out: folder of the servers' logs and the parity check's files.
        report: called with what is happening, see ``loadtest.Report``.

    Raises:
        ServerError, LoadError, ParityError, SettingsError.
    """
    setting, began = setting or Setting(), time.monotonic()
    on_gpu = environment.has_gpu()
    model = _checkpoint(setting, report)
    stock = stock_model(str(model), on_gpu, report)
    args = (*SERVER_ARGS, *(shared_gpu_args(CACHE_GIB) if on_gpu else ()))
    plan = Plan(
        sides=(default_side(stock, args), plugin_side(str(model), args)),
        loads=tuple(
            Load(rate, setting.input_len, setting.output_len, setting.num_prompts)
            for rate in setting.rates
        ),
        rounds=setting.rounds,
    )
    with ServerPool(plan, report, logs=out) as pool:
        runs = list(measure(plan, pool, report))
    parity = _parity(str(model), stock, out, report)
    facts = environment.describe()
    facts["duration"] = f"{time.monotonic() - began:.0f} s in all"
    return {
        "title": f"moe-backend demo: {setting.preset}",
        "intro": "The real vLLM server twice, stock and with --quantization tma_fp8, under the "
        "same load from vllm bench serve.",
        "load": summarise(plan, runs) | {"started_in_s": pool.started_in},
        "parity": parity,
        "status": pool.status["tma_fp8"],
        "environment": facts,
        "notes": environment.notes(on_gpu),
        "seconds": time.monotonic() - began,
    }


def _checkpoint(setting: Setting, report: Report) -> Path:
    folder = envs.load().cache_dir / "demo" / setting.preset

    def progress(done: int, total: int) -> None:
        report("checkpoint", "writing seeded FP8 weights", done, total)

    path = write_checkpoint(folder, setting.preset, weights="fp8", progress=progress)
    report("checkpoint", str(path), 1, 1)
    return path


def _parity(model: str, stock: str, out: Path, report: Report) -> dict[str, Any]:
    def progress(words: str, share: float) -> None:
        report("parity", words, 100 * share, 100)

    found = run_parity(Request(model, reference=stock), output=out, on_progress=progress)
    report("parity", "holds" if found["passed"] else "broken", 100, 100)
    return found
