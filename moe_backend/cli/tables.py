# SPDX-License-Identifier: Apache-2.0
"""Tables for people that more than one command prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

NUMBERS = (
    ("TTFT p50", "ttft_p50_ms"),
    ("p90", "ttft_p90_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT p50", "tpot_p50_ms"),
    ("tokens/s", "output_tokens_per_s"),
)


def load_table(load: dict[str, Any]) -> Table:
    """Both sides under each other for every load, then the ratio with its spread."""
    table = Table(title="Under load (times in ms)", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tokens, when")
    table.add_column("server", no_wrap=True)
    for head, _ in NUMBERS:
        table.add_column(head, justify="right", no_wrap=True)
    for one in load["loads"]:
        name = one["name"]
        for row in load["results"]:
            if row["load"] == one["name"]:
                table.add_row(name, row["side"], *(f"{row[key]:.1f}" for _, key in NUMBERS))
                name = ""
        for entry in load["ratios"]:
            if entry["load"] == one["name"]:
                table.add_row("", "[bold]ratio", *(_ratio(entry[key]) for _, key in NUMBERS))
        table.add_section()
    return table


def _ratio(one: dict[str, float]) -> str:
    return f"[bold]{one['median']:.2f}×[/]\n[dim]{one['low']:.2f}–{one['high']:.2f}[/]"
