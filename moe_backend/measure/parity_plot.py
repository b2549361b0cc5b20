# SPDX-License-Identifier: Apache-2.0
"""The parity report as a picture: errors by layer, log-probability differences, near ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, GREY, RED = "#2563eb", "#9ca3af", "#dc2626"


def write_plot(report: dict[str, Any], path: Path) -> bool:
    """Writes a PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _layers(left, report)
    _differences(right, report)
    word = "passed" if report["passed"] else "FAILED"
    figure.suptitle(f"Parity {word}: {Path(report['model']).name}")
    figure.savefig(path, dpi=120)
    return True


def _bound(report: dict[str, Any], name: str) -> float:
    return next(check["bound"] for check in report["checks"] if check["name"] == name)


def _layers(axes: Any, report: dict[str, Any]) -> None:
    layers = [entry["layer"] for entry in report["layers"]]
    for key, label, colour in (
        ("rounding", "plugin, to unrounded arithmetic", BLUE),
        ("default_rounding", "default, to unrounded arithmetic", GREY),
        ("error", "plugin, to the oracle that rounds alike", RED),
    ):
        values = [entry[key] for entry in report["layers"]]
        axes.plot(layers, values, "o-", label=label, color=colour, markersize=4)
    axes.axhline(_bound(report, "layer_rounding"), color=BLUE, linestyle=":", linewidth=1)
    axes.axhline(_bound(report, "layer_error"), color=RED, linestyle=":", linewidth=1)
    axes.set(yscale="log", xlabel="layer", ylabel="relative error of the routed experts")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)


def _differences(axes: Any, report: dict[str, Any]) -> None:
    values = report["logprob_differences"]["values"]
    bound = _bound(report, "p99_logprob_difference")
    axes.hist(values, bins=61, color=BLUE, log=True)
    for edge in (-bound, bound):
        axes.axvline(edge, color=RED, linestyle=":", linewidth=1)
    axes.set(
        xlabel="log-probability, plugin minus default (dotted: bound for 99%)",
        ylabel=f"tokens (of {len(values)})",
    )
