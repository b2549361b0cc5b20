# SPDX-License-Identifier: Apache-2.0
"""`moe-backend make-checkpoint`: a seeded model folder, small with weights or full-size without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail, progress_console


def parse_assignments(items: list[str]) -> dict[str, Any]:
    """``["hidden_size=2048", "rope_scaling=null"]`` → values as JSON, else as text."""
    out: dict[str, Any] = {}
    for item in items:
        name, sign, text = item.partition("=")
        if not sign or not name:
            raise ValueError(f"--set {item!r}: expected FIELD=VALUE, as in --set hidden_size=2048")
        try:
            out[name.strip()] = json.loads(text)
        except ValueError:
            out[name.strip()] = text
    return out


def command(
    path: Path = typer.Argument(..., help="Folder to write; missing, empty, or written before."),
    preset: str = typer.Option(
        "tiny-deepseek",
        help="tiny-deepseek, tiny-qwen3-moe (with weights), deepseek-r1, qwen3-30b-a3b, kimi-k2 "
        "(full size, without weights: serve with --load-format dummy).",
    ),
    seed: int = typer.Option(0, help="Of the weights; the same seed gives the same bytes."),
    weights: str = typer.Option(
        "", help="fp8, bf16 (the same model dequantised) or none. [default: by preset]"
    ),
    assignments: list[str] = typer.Option(
        [], "--set", help="Replace a field of the configuration: FIELD=VALUE, repeatable."
    ),
    json_output: bool = typer.Option(False, "--json", help="Machine-readable result on stdout."),
) -> None:
    """Write a seeded FP8 checkpoint that vLLM and transformers read."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from moe_backend.cli.interrupt import ending
    from moe_backend.measure import checkpoint

    try:
        overrides = parse_assignments(assignments)
        columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
        with (
            ending("nothing was written"),
            Progress(
                *columns, TimeRemainingColumn(), console=progress_console, transient=True
            ) as bar,
        ):
            task = bar.add_task("writing weights", total=None)
            folder = checkpoint.write_checkpoint(
                path,
                preset,
                seed,
                weights or None,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **overrides,
            )
    except (ValueError, OSError) as error:
        fail(str(error))
    kind = weights or checkpoint.default_weights(preset)
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    if json_output:
        result = {"path": folder, "preset": preset, "seed": seed, "weights": kind, "files": files}
        emit_json(result)
        return
    size = sum(files.values()) / 1e6
    console.print(f"[green]✓[/] {folder} ({preset}, weights {kind}, {size:.1f} MB)", soft_wrap=True)
    dummy = " --load-format dummy" if kind == "none" else ""
    quantized = " --quantization tma_fp8" if kind != "bf16" else ""
    console.print(f"  moe-backend serve {folder}{quantized}{dummy}", soft_wrap=True)
