# SPDX-License-Identifier: Apache-2.0
"""``moe-backend loadtest``: time to first token under load, beside the default backend."""

from __future__ import annotations

import shlex
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
    rate: list[float] = typer.Option(
        [], help="Requests per second; repeat; inf: at once. [default: 1 and 4]"
    ),
    clients: list[int] = typer.Option(
        [], help="Users who each ask again once they were answered; repeat; beside --rate."
    ),
    input_len: list[int] = typer.Option([128], help="Tokens of each prompt; repeat."),
    output_len: int = typer.Option(32, help="Tokens of each answer."),
    num_prompts: int = typer.Option(32, help="Requests of each run."),
    load: list[str] = typer.Option(
        [],
        help="A load of its own, INPUT:OUTPUT:WHEN:PROMPTS with WHEN 2/s, inf or 32c (clients); "
        "repeat; instead of the options above.",
    ),
    rounds: int = typer.Option(3, min=1, help="Turns of each side; their spread is reported."),
    warmups: int = typer.Option(4, min=0, help="Requests before each run that do not count."),
    seed: int = typer.Option(0, min=0, help="Of the prompts and arrival times."),
    server_arg: list[str] = typer.Option(
        [], help="Arguments for both servers: --server-arg '--max-model-len 4096'; repeat."
    ),
    together: bool = typer.Option(
        None,
        "--together/--in-turn",
        help="Both servers up at once, or one. Default: in turn on GPU.",
    ),
    cache_gib: float = typer.Option(
        4.0, min=0.1, help="KV cache of each of two servers that are together on a GPU."
    ),
    budget: float = typer.Option(
        None, min=1, help="Seconds for all of it: turns that would end later are left out."
    ),
    out: Path = typer.Option(Path("loadtest"), help="Folder of the report, plots, JSON and logs."),
    json_: bool = typer.Option(False, "--json", help="The result on stdout as JSON."),
) -> None:
    """Compare time to first token and throughput with the default backend under real load.

    What was measured when the command is interrupted or a server fails is reported all the same.
    """
    from moe_backend.cli.interrupt import ending
    from moe_backend.cli.progress import LiveProgress
    from moe_backend.measure.server import ServerError
    from moe_backend.measure.vllm_bench import LoadError

    if compare not in ("default", "none"):
        fail(f"--compare {compare}: expected default or none")
    try:
        shape = (input_len, output_len, num_prompts, warmups)
        loads = _loads(load, rate, clients, *shape)
        args = [word for text in server_arg for word in shlex.split(text)]
    except ValueError as error:
        fail(str(error))
    options = {"rounds": rounds, "seed": seed, "together": together, "args": args}
    options |= {"cache_gib": cache_gib, "budget_s": budget}
    try:
        with ending("every server is stopped"), LiveProgress() as progress:
            report = _run(model, compare, compare_model, loads, options, out, progress)
    except (ServerError, LoadError) as error:
        fail(f"{error}\nThe servers' logs are in {out.absolute()}.", code=1)
    except (ValueError, OSError) as error:
        fail(str(error))
    if not report["load"]["results"]:
        fail(f"--budget {budget:g}: not one pair of turns fits; give more time", code=1)
    from moe_backend.measure.report import finite, write_report

    paths = write_report(out, report)
    if json_:
        files = {name: str(path) for name, path in paths.items()}
        emit_json(finite({**report["load"], "status": report["status"], "files": files}))
    else:
        from moe_backend.cli.tables import load_table

        console.print(load_table(report["load"]))
        if missed := report["load"]["not_reached"]:
            console.print(f"[yellow]not reached in time:[/] {'; '.join(missed)}", highlight=False)
        console.print(f"report: {paths['html'].absolute()}")


def _loads(
    given: list[str],
    rates: list[float],
    clients: list[int],
    lengths: list[int],
    output_len: int,
    num_prompts: int,
    warmups: int,
) -> tuple[Any, ...]:
    """Those written out, or every length at every rate and number of clients."""
    from moe_backend.measure.vllm_bench import Load

    if given:
        loads = [Load.parse(text, warmups) for text in given]
    else:
        rates = rates or ([] if clients else [1.0, 4.0])
        moments = [(r, None) for r in rates] + [(float("inf"), c) for c in clients]
        loads = [
            Load(rate, length, output_len, num_prompts, warmups, count)
            for length in lengths
            for rate, count in moments
        ]
    if len({load.name for load in loads}) != len(loads):
        raise ValueError("every rate, number of clients, length and load once, please")
    return tuple(loads)


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
        paired,
        plugin_side,
        summarise,
    )
    from moe_backend.measure.report import write_report
    from moe_backend.measure.sides import shared_gpu_args, stock_model

    on_gpu = environment.has_gpu()
    together = options["together"] if options["together"] is not None else not on_gpu
    args = [*(shared_gpu_args(options["cache_gib"]) if together and on_gpu else ())]
    args += options["args"]
    sides = [plugin_side(model, args)]
    if compare == "default":
        stock = compare_model or stock_model(model, on_gpu, progress)
        sides.insert(0, default_side(stock, args))
    plan = Plan(
        tuple(sides), loads, options["rounds"], together, options["seed"], options["budget_s"]
    )
    runs: list[Any] = []
    pool = ServerPool(plan, progress, logs=out)

    def report(*notes: str) -> dict[str, Any]:
        return {
            "title": f"Load test: {Path(model).name}",
            "intro": "Real vLLM servers, load from vllm bench serve, the two sides in turns.",
            "load": summarise(plan, runs) | {"started_in_s": pool.started_in},
            "status": pool.status.get("tma_fp8"),
            "environment": environment.describe(),
            "notes": [*notes, *environment.notes(on_gpu)],
        }

    try:
        with pool:
            for run in measure(plan, pool, progress):
                runs.append(run)
    except BaseException as error:
        if paired(plan, runs):
            write_report(out, report(f"Ended early: {str(error) or type(error).__name__}"))
        raise
    return report()
