# SPDX-License-Identifier: Apache-2.0
"""`moe-backend parity`: the plugin's outputs beside the default backend's, with bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail, progress_console
from moe_backend.cli.make_checkpoint import parse_assignments


def read_prompts(path: Path) -> list[str]:
    """A JSON list, JSON lines with a "prompt" each, or one prompt a line."""
    text = path.read_text()
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list):
        prompts: list[Any] = whole
    else:
        prompts = [_prompt_of(line) for line in text.splitlines() if line.strip()]
    if not prompts or not all(isinstance(p, str) and p for p in prompts):
        raise ValueError(f"{path}: expected prompts, one a line or a JSON list of texts")
    return prompts


def _prompt_of(line: str) -> Any:
    if line.lstrip().startswith("{"):
        try:
            return json.loads(line).get("prompt")
        except ValueError:
            return line
    return line


def command(
    model: str = typer.Option(..., help="Folder or hub name of a block-FP8 checkpoint."),
    prompts: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="One prompt a line, JSON lines, or a JSON list."
    ),
    tokens: int = typer.Option(32, min=1, help="Tokens to generate per prompt."),
    reference: str | None = typer.Option(
        None, help="The default engine's model. [default: the same; without CUDA its bf16 copy]"
    ),
    tp: int = typer.Option(1, min=1, help="Tensor-parallel size of both engines."),
    max_model_len: int = typer.Option(1024, min=16, help="Longest prompt plus answer."),
    engine: list[str] = typer.Option(
        [], "--engine", help="Further argument of vllm.LLM for both: NAME=VALUE, repeatable."
    ),
    eager: bool | None = typer.Option(
        None, "--eager/--no-eager", help="Run the plugin without graphs. [default: on a CPU]"
    ),
    output: Path | None = typer.Option(
        None, help="Folder for parity.json, parity.png and both engines' logs."
    ),
    inject_fault: bool = typer.Option(
        False, help="Falsify one weight scale on our side: the check must then fail."
    ),
    timeout: float = typer.Option(1800.0, min=1, help="Seconds each engine may take."),
    json_output: bool = typer.Option(False, "--json", help="Machine-readable result on stdout."),
) -> None:
    """Compare our outputs with the default backend's, layer by layer and token by token."""
    from moe_backend.envs import SettingsError
    from moe_backend.measure import parity
    from moe_backend.measure.model_config import ModelError

    try:
        request = parity.Request(
            model=model,
            prompts=read_prompts(prompts) if prompts else parity.PROMPTS,
            num_tokens=tokens,
            reference=reference,
            tp=tp,
            max_model_len=max_model_len,
            eager=eager,
            engine=parse_assignments(engine),
            fault=inject_fault,
            timeout=timeout,
        )
        report = compare(request, output)
    except (ModelError, SettingsError, parity.ParityError, ValueError, OSError) as error:
        fail(str(error))
    if json_output:
        emit_json(report)
    else:
        show(report, output)
    if not report["passed"]:
        raise typer.Exit(1)


def compare(request: Any, output: Path | None) -> dict[str, Any]:
    """Runs the comparison under a progress bar."""
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    from moe_backend.cli.interrupt import ending
    from moe_backend.measure.parity import run_parity

    columns = ("[progress.description]{task.description}", BarColumn(), TimeElapsedColumn())
    with (
        ending("the engines are ended"),
        Progress(*columns, console=progress_console, transient=True) as bar,
    ):
        task = bar.add_task("reading the model", total=1.0)

        def told(words: str, share: float) -> None:
            bar.update(task, description=words, completed=share)

        return run_parity(request, output=output, on_progress=told)


def show(report: dict[str, Any], output: Path | None = None) -> None:
    """The report as tables for people."""
    from rich.table import Table

    table = Table(title=f"MoE layers, relative error · {report['backend']}")
    for name in ("layer", "tokens", "experts used", "ours", "ours, worst block"):
        table.add_column(name, justify="right")
    for name in ("ours, unrounded", "default, unrounded"):
        table.add_column(name, justify="right")
    for row in report["layers"]:
        errors = ("error", "worst_cell", "rounding", "default_rounding")
        counts = ("layer", "num_tokens", "num_experts_used")
        table.add_row(*(str(row[n]) for n in counts), *(f"{row[n]:.2e}" for n in errors))
    console.print(table)
    console.print(_histogram(report["logprob_differences"]["values"]))
    tokens = report["tokens"]
    console.print(
        f"{tokens['positions']} positions of the same text: best token equal at "
        f"{tokens['agreement']:.1%}, {tokens['flips']} differ; free-running greedy text equal "
        f"for {tokens['greedy_agreement']:.1%} of its tokens before a first difference"
    )
    if report["fault"]:
        console.print(f"[yellow]injected fault:[/] {report['fault']}")
    console.print(_checks(report["checks"]))
    if output:
        console.print(f"written: {output}/parity.json, {output}/parity.png", soft_wrap=True)
    word = "[bold green]parity holds[/]" if report["passed"] else "[bold red]parity is broken[/]"
    console.print(word)


def _histogram(values: list[float]) -> Any:
    """Log-probability differences by size, plain enough for any terminal."""
    from rich.table import Table

    edges = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    table = Table(title="log-probability, ours minus default", box=None)
    for name, justify in (("|difference|", "right"), ("tokens", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    low = 0.0
    for high in (*edges, float("inf")):
        count = sum(low <= abs(v) < high for v in values)
        label = f"< {high:g}" if high != float("inf") else f"≥ {low:g}"
        table.add_row(label, str(count), "█" * round(40 * count / max(len(values), 1)))
        low = high
    return table


def _checks(checks: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="bounds")
    for name in ("", "check", "value", "bound", "what"):
        table.add_column(name)
    for check in checks:
        sign = "≥" if check["name"] == "token_agreement" else "≤"
        table.add_row(
            "[green]✓[/]" if check["ok"] else "[red]✗[/]",
            check["name"],
            f"{check['value']:.3g}",
            f"{sign} {check['bound']:g}",
            check["what"],
        )
    return table
