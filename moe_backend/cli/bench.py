# SPDX-License-Identifier: Apache-2.0
"""`moe-backend bench`: our kernels beside the engine's and the training libraries', in one run."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from moe_backend.cli.console import console, emit_json, fail, progress_console

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

JSON = typer.Option(False, "--json", help="Print the results as JSON.")
OUTPUT = typer.Option(None, help="Folder for the results as JSON (and a plot).")


def need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        fail("no CUDA device here; benchmarks time kernels. Run this on a Hopper GPU.")


def choices(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """Names separated by commas, each of them known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        fail(f"--{what}: expected some of {', '.join(known)}, found {text!r}")
    return names


def numbers(text: str, what: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        fail(f"--{what}: expected positive numbers separated by commas, found {text!r}")
    return found


@app.command()
def experts(
    shapes: str = typer.Option(
        "deepseek-v3-tp8",
        help="Layers: names, sizes as E256-H7168-I256-K8, all (the tuned ones) or others.",
    ),
    tokens: str = typer.Option("1,4,16,64,256,1024,4096,8192,16384", help="Numbers of tokens."),
    load: str = typer.Option("uniform", help="Expert load: uniform, zipf, or both."),
    peers: bool = typer.Option(True, help="Time the engine's Triton and DeepGEMM experts too."),
    heuristic: bool = typer.Option(False, help="Time what a device without tuned files runs too."),
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """The FP8 experts of a layer, bf16 in and out, beside vLLM's default and DeepGEMM."""
    from moe_backend.measure import bench_experts, family
    from moe_backend.measure import peers as engine

    groups = {"all": tuple(bench_experts.SHAPES), "others": bench_experts.OTHERS}
    names = [n for part in shapes.split(",") for n in groups.get(part.strip(), (part.strip(),))]
    try:
        for name in names:
            bench_experts.shape_of(name)
    except ValueError as error:
        fail(f"--shapes: {error}")
    loads = list(bench_experts.LOADS) if load == "both" else choices(
        load, bench_experts.LOADS, "load"
    )  # fmt: skip
    counts = numbers(tokens, "tokens")
    need_gpu()
    if peers and (missing := engine.available()):
        progress_console.print(f"without peers: {missing}")
        peers = False
    rows = []
    for row in bench_experts.run(names, counts, loads, with_peers=peers, with_heuristic=heuristic):
        rows.append(row)
        progress_console.print(bench_experts.line(row), highlight=False)
    results = {
        "environment": family.environment(),
        "rows": [row.as_dict() for row in rows],
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "experts.json").write_text(json.dumps(results, indent=2))
        bench_experts.plot(rows, output / "experts.png")
    if as_json:
        emit_json(results)
    else:
        console.print(bench_experts.table(rows))
    if any("ours" in row.failed for row in rows):
        fail("a kernel of ours was wrong or failed; see the table")


def _family(title: str, rows_of, output: Path | None, as_json: bool) -> None:
    """Common to the benchmarks of one operation family."""
    from moe_backend.measure import family

    need_gpu()
    rows = []
    for row in rows_of():
        rows.append(row)
        progress_console.print(f"{row.operation} {row.size}: {row.ours or row.failed}")
    results = {"environment": family.environment(), "rows": [row.as_dict() for row in rows]}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{title.replace(' ', '_')}.json").write_text(json.dumps(results, indent=2))
    if as_json:
        emit_json(results)
    else:
        console.print(family.table(title, rows))
    if any("ours" in row.failed for row in rows):
        fail("a kernel of ours was wrong or failed; see the table")


@app.command()
def router(output: Path | None = OUTPUT, as_json: bool = JSON) -> None:
    """The routers, for serving and training."""
    from moe_backend.measure import bench_router

    _family("router", bench_router.run, output, as_json)


@app.command()
def permute(output: Path | None = OUTPUT, as_json: bool = JSON) -> None:
    """Permutation by expert and its inverse, with gradients."""
    from moe_backend.measure import bench_permute

    _family("permute", bench_permute.run, output, as_json)


@app.command("aux-loss")
def aux_loss(output: Path | None = OUTPUT, as_json: bool = JSON) -> None:
    """The load-balance loss, forward and backward."""
    from moe_backend.measure import bench_aux_loss

    _family("aux loss", bench_aux_loss.run, output, as_json)


@app.command("ep")
def expert_parallel(
    gpus: int = typer.Option(0, help="GPUs to use; all by default. Under torchrun: its ranks."),
    tokens: str = typer.Option("1,128,1024,4096", help="Numbers of tokens per rank."),
    programs: str = typer.Option("528", help="Programs that move rows, and so at most SMs."),
    hidden: int = typer.Option(7168, help="Hidden size."),
    experts: int = typer.Option(256, help="Experts of all ranks together."),
    top_k: int = typer.Option(8, help="Experts of a token."),
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Dispatch and combine between GPUs, beside NCCL and the NVLink floor."""
    counts, widths = numbers(tokens, "tokens"), numbers(programs, "programs")
    need_gpu()
    import torch

    from moe_backend.measure import bench_ep, family

    gpus = gpus or torch.cuda.device_count()
    if gpus > torch.cuda.device_count() or experts % gpus:
        fail(f"--gpus: expected 1 to {torch.cuda.device_count()}, dividing {experts} experts")
    config = {"num_experts": experts, "hidden": hidden, "top_k": top_k}
    rows = bench_ep.run(gpus, counts, widths, config)
    if rows is None:
        return
    results = {"environment": family.environment(), "rows": rows}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "ep.json").write_text(json.dumps(results, indent=2))
    if as_json:
        emit_json(results)
    else:
        console.print(bench_ep.table(rows))
    if any(row["failed"] for row in rows):
        fail("the exchange was wrong or failed; see the table")
