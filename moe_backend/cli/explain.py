# SPDX-License-Identifier: Apache-2.0
"""`moe-backend explain`: which kernel configuration a model's layers take, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from moe_backend.cli.console import console, emit_json, fail

FALLBACK_DEVICE = "NVIDIA H200"
COLOURS = {"exact": "green", "bucket": "yellow", "heuristic": "red"}


def parse_tokens(text: str) -> list[int]:
    """``"1,16,8192"`` → numbers; raises ValueError for anything but positive ones."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"--tokens {text!r}: expected positive numbers, as in 1,16,8192")
    return numbers


def command(
    model: str = typer.Option(..., help="Folder or hub name; only its config is read."),
    tokens: str = typer.Option("1,16,256,8192", help="Batch sizes in tokens, comma-separated."),
    tp: int = typer.Option(1, min=1, help="Number of ranks (tensor-parallel size)."),
    ep: bool = typer.Option(False, "--ep", help="Deal whole experts to the ranks."),
    device: str | None = typer.Option(
        None, help=f"Device name. [default: this machine's GPU, else {FALLBACK_DEVICE}]"
    ),
    json_output: bool = typer.Option(False, "--json", help="Machine-readable result on stdout."),
) -> None:
    """Which tuned configuration a shape takes: exact, nearest measured size, or heuristic."""
    from moe_backend.envs import SettingsError
    from moe_backend.measure.model_config import ModelError, read_model
    from moe_backend.tuning.schema import ConfigFileError

    try:
        numbers = parse_tokens(tokens)
        facts = read_model(model)
        shape = checked_shape(facts, tp, ep)
        name, origin = device_name(device)
        rows = explain(shape, numbers, name)
    except (ModelError, SettingsError, ConfigFileError, ValueError) as error:
        fail(str(error))
    if json_output:
        emit_json({"model": model, "device": name, "shape": asdict(shape), "selections": rows})
        return
    show(model, name, origin, shape, rows)


def checked_shape(model: Any, tp: int, ep: bool) -> Any:
    """The layer on one rank; raises ValueError with the remedy when it cannot run."""
    from moe_backend import support

    if not model.moe_layers:
        raise ValueError(f"{model.name}: has no expert layers, nothing to select")
    if not ep:
        cut = support.supports_tensor_parallel(model.hidden, model.intermediate, tp)
        if not cut.ok:
            raise ValueError(cut.reason)
    shape = model.shape(tp, ep)
    answer = support.supports_shape(shape)
    if not answer.ok:
        raise ValueError(answer.reason)
    return shape


def device_name(asked: str | None) -> tuple[str, str]:
    """The device whose file is looked up, and where the name comes from."""
    import torch

    if asked:
        return asked, "asked for"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), "this machine's GPU"
    return FALLBACK_DEVICE, "no GPU here; --device names another"


def explain(shape: Any, tokens: list[int], device: str) -> list[dict[str, Any]]:
    """The selection for each batch size, as serving would make it."""
    from moe_backend.tuning.selection import select

    rows = []
    for number in tokens:
        found = select(shape, number, device)
        rows.append(
            {
                "tokens": number,
                "source": found.source,
                "reason": found.reason,
                "config": asdict(found.config),
            }
        )
    return rows


def words(config: dict[str, Any]) -> str:
    """A configuration on one line: what a layer launches, GEMM by GEMM."""
    if config.get("direct"):
        return "direct: one launch per GEMM over the routes themselves, nothing is sorted"
    parts = [f"rows in tiles of {config['align']}" if "align" in config else ""]
    parts += ["gathered through the routing index" if config.get("gather") else ""]
    for name in ("up", "down"):
        gemm = config.get(name) or {}
        if gemm:
            tile = f"n{gemm['block_n']} w{gemm['num_warps']} s{gemm['num_stages']}"
            parts.append(f"{name} {gemm['kernel']} {tile}")
    return ", ".join(filter(None, parts))


def show(model: str, device: str, origin: str, shape: Any, rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    experts = f"{shape.num_local_experts} of {shape.num_experts} experts"
    size = f"hidden {shape.hidden}, intermediate {shape.intermediate}, top {shape.top_k}"
    console.print(f"{escape(model)} on one rank: {experts}, {size}, ep {shape.ep_size}")
    console.print(f"device {escape(device)} ({origin})")
    table = Table(box=None)
    table.add_column("tokens", justify="right")
    table.add_column("source", no_wrap=True)
    table.add_column("configuration and reason", overflow="fold")
    for row in rows:
        colour = COLOURS.get(row["source"], "default")
        line = f"{escape(words(row['config']))}\n[dim]{escape(row['reason'])}[/]"
        table.add_row(str(row["tokens"]), f"[{colour}]{row['source']}[/]", line)
    console.print(table)
