# SPDX-License-Identifier: Apache-2.0
"""``moe-backend demo``: what ``make demo`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail


def command(
    out: Path = typer.Option(Path(".demo"), help="Folder of the report, plots, JSON and logs."),
    json_: bool = typer.Option(False, "--json", help="The result on stdout as JSON."),
) -> None:
    """Serve a small model twice, stock and with our kernels; compare speed and outputs."""
    from moe_backend.cli.interrupt import ending
    from moe_backend.cli.progress import LiveProgress
    from moe_backend.envs import SettingsError
    from moe_backend.measure.server import ServerError
    from moe_backend.measure.vllm_bench import LoadError

    try:
        import vllm  # noqa: F401
    except ImportError as error:
        fail(f"vLLM cannot be imported ({error}); run `make demo`, which installs it")
    from moe_backend.measure.demo import run_demo
    from moe_backend.measure.parity import ParityError
    from moe_backend.measure.report import finite, write_report

    out = out.absolute()
    try:
        with ending("every server is stopped"), LiveProgress() as progress:
            report = run_demo(out, progress)
            paths = write_report(out, report)
    except SettingsError as error:
        fail(str(error))
    except (ServerError, LoadError, ParityError, OSError) as error:
        fail(f"{error}\nEvery server is stopped; their logs are in {out}.", code=1)
    if json_:
        emit_json(finite(_summary(report, paths)))
    else:
        _show(report, paths)
    if not report["parity"]["passed"]:
        raise typer.Exit(1)


def _summary(report: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:
    load, parity = report["load"], report["parity"]
    return {
        "parity": {"passed": parity["passed"], "checks": parity["checks"]},
        "results": load["results"],
        "ratios": load["ratios"],
        "status": report["status"],
        "environment": report["environment"],
        "seconds": report["seconds"],
        "files": {name: str(path) for name, path in paths.items()},
    }


def _show(report: dict[str, Any], paths: dict[str, Path]) -> None:
    from moe_backend.cli.tables import load_table

    console.print(load_table(report["load"]))
    status, parity = report["status"], report["parity"]
    layers = ", ".join(f"{count} on {name}" for name, count in status["layers"].items())
    console.print(f"MoE layers: {layers} ({status['workers'][0]['layers'][0]['reason']})")
    good = sum(check["ok"] for check in parity["checks"])
    verdict = "[bold green]holds" if parity["passed"] else "[bold red]is broken"
    console.print(f"Parity {verdict}[/]: {good} of {len(parity['checks'])} bounds kept")
    for check in parity["checks"]:
        mark = "[green]✓[/]" if check["ok"] else "[red]✗[/]"
        console.print(
            f"  {mark} {check['what']}: {check['value']:.3g} (bound {check['bound']:g})",
            highlight=False,
        )
    for note in report["notes"][1:]:
        console.print(f"[dim]{note}[/]")
    console.print(f"{report['seconds']:.0f} s in all; report: {paths['html']}", soft_wrap=True)
