# SPDX-License-Identifier: Apache-2.0
"""`moe-backend doctor`: is this machine ready, and which layer would run where?"""

from __future__ import annotations

from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail, progress_console

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: " "}


def command(
    model: str | None = typer.Option(None, help="Folder or hub name; only its config is read."),
    tp: int = typer.Option(1, min=1, help="Number of ranks (tensor-parallel size)."),
    ep: bool = typer.Option(False, "--ep", help="Deal whole experts to the ranks."),
    json_output: bool = typer.Option(False, "--json", help="Machine-readable result on stdout."),
) -> None:
    """Versions, device, plugin, environment, and the backend of every layer of a model."""
    from moe_backend.measure import doctor
    from moe_backend.measure.model_config import ModelError, read_model

    try:
        facts = read_model(model) if model else None
    except ModelError as error:
        fail(str(error))
    with progress_console.status("examining (importing vLLM takes a few seconds)"):
        report = doctor.examine(facts, tp, ep)
    if json_output:
        emit_json(report.as_json())
    else:
        show(report)
    if report.blockers:
        raise typer.Exit(1)


def show(report: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    sections: dict[str, Table] = {}
    for finding in report.findings:
        table = sections.get(finding.section)
        if table is None:
            table = sections[finding.section] = Table(
                title=finding.section, title_justify="left", box=None, show_header=False
            )
            table.add_column(width=1)
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            table.add_column(overflow="fold", style="dim")
        texts = (escape(t) for t in (finding.name, finding.value, finding.note))
        table.add_row(MARKS[finding.ok], *texts)
    for table in sections.values():
        console.print(table)
        console.print()
    if report.layers:
        console.print(_layers(report.layers))
    if not report.blockers:
        console.print("[bold green]ready[/]: nothing stands in the way of a start")
        return
    console.print("[bold red]a start would fail:[/]")
    for reason in report.blockers:
        console.print(f"  • {escape(reason)}")


def _layers(groups: list[Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="layers", title_justify="left", box=None)
    for name in ("number", "kind", "backend"):
        table.add_column(name, no_wrap=True, justify="left")
    table.add_column("", overflow="fold")
    colours = {"moe_backend": "green", "refused": "red", "engine": "yellow"}
    for group in groups:
        colour = "default" if group.kind == "dense" else colours[group.backend]
        facts = (_shape(group.shape), group.routing, group.reason)
        table.add_row(
            f"{group.numbers()} ({len(group.layers)})",
            group.kind,
            f"[{colour}]{group.backend}[/]",
            escape(" · ".join(filter(None, facts))),
        )
    return table


def _shape(shape: dict[str, Any]) -> str:
    if not shape:
        return ""
    local, total = shape["num_local_experts"], shape["num_experts"]
    experts = f"E{total}" if local == total else f"E{local} of {total}"
    return f"{experts} H{shape['hidden']} I{shape['intermediate']} top {shape['top_k']}"
