# SPDX-License-Identifier: Apache-2.0
"""``moe-backend loadtest``: time to first token under load, beside the default backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail


def command(
    model: str = typer.Option(..., "--model", help="Folder or name of an FP8 MoE model."),
    compare: str = typer.Option("default", help="The other side: default (stock vLLM) or none."),
    compare_model: str = typer.Option(
        "", help="Model of the other side. Without a GPU: its bf16 copy, made when missing."
    ),
    rate: list[float] = typer.Option([1.0, 4.0], help="Requests per second; repeat; inf: at once."),
    input_len: int = typer.Option(128, help="Tokens of each prompt."),
    output_len: int = typer.Option(32, help="Tokens of each answer."),
    num_prompts: int = typer.Option(32, help="Requests of each run."),
    rounds: int = typer.Option(3, min=1, help="Turns of each side; their spread is reported."),
    warmups: int = typer.Option(4, min=0, help="Requests before each run that do not count."),
    seed: int = typer.Option(0, min=0, help="Of the prompts and arrival times."),
    server_arg: list[str] = typer.Option(
        [], help="Argument for both servers, one word each: --server-arg=--max-model-len=4096"
    ),
    together: bool = typer.Option(
        None,
        "--together/--in-turn",
        help="Both servers up at once, or one. Default: in turn on GPU.",
    ),
    out: Path = typer.Option(Path("loadtest"), help="Folder of the report, plots, JSON and logs."),
    json_: bool = typer.Option(False, "--json", help="The result on stdout as JSON."),
) -> None:
    """Compare time to first token and throughput with the default backend under real load."""
    from moe_backend.measure.server import ServerError
    from moe_backend.measure.vllm_bench import Load, LoadError

    if compare not in ("default", "none"):
        fail(f"--compare {compare}: expected default or none")
    if len(set(rate)) != len(rate):
        fail("--rate: every rate once")
    try:
        loads = tuple(Load(r, input_len, output_len, num_prompts, warmups) for r in rate)
    except ValueError as error:
        fail(str(error))
    options = {"rounds": rounds, "seed": seed, "together": together, "args": server_arg}
    from moe_backend.cli.interrupt import ending
    from moe_backend.cli.progress import LiveProgress

    try:
        with ending("every server is stopped"), LiveProgress() as progress:
            report = _run(model, compare, compare_model, loads, options, out, progress)
    except (ServerError, LoadError) as error:
        fail(f"{error}\nThe servers' logs are in {out.absolute()}.", code=1)
    except (ValueError, OSError) as error:
        fail(str(error))
    from moe_backend.measure.report import finite, write_report

    paths = write_report(out, report)
    if json_:
        files = {name: str(path) for name, path in paths.items()}
        emit_json(finite({**report["load"], "status": report["status"], "files": files}))
    else:
        from moe_backend.cli.tables import load_table

        console.print(load_table(report["load"]))
        console.print(f"report: {paths['html'].absolute()}")


def _run(
    model: str,
    compare: str,
    compare_model: str,
    loads: tuple[Any, ...],
    options: dict[str, Any],
    out: Path,
    progress: Any,
) -> dict[str, Any]:
    from moe_backend.measure import environment
    from moe_backend.measure.loadtest import (
        Plan,
        ServerPool,
        default_side,
        measure,
        plugin_side,
        summarise,
    )
    from moe_backend.measure.sides import stock_model

    on_gpu = environment.has_gpu()
    sides = [plugin_side(model, options["args"])]
    if compare == "default":
        stock = compare_model or stock_model(model, on_gpu, progress)
        sides.insert(0, default_side(stock, options["args"]))
    together = options["together"] if options["together"] is not None else not on_gpu
    plan = Plan(tuple(sides), loads, options["rounds"], together, options["seed"])
    with ServerPool(plan, progress, logs=out) as pool:
        runs = measure(plan, pool, progress)
    return {
        "title": f"Load test: {Path(model).name}",
        "intro": "Real vLLM servers, load from vllm bench serve, the two sides in turns.",
        "load": summarise(plan, runs),
        "status": pool.status.get("tma_fp8"),
        "environment": environment.describe(),
        "notes": environment.notes(on_gpu),
    }
