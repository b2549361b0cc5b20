# SPDX-License-Identifier: Apache-2.0
"""The plots of a load test and a parity check, as SVG for the page and PNG for documents."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIRST, SECOND, GRID, INK = "#64748b", "#c2410c", "#e2e8f0", "#0f172a"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "moe-backend",
}


def colours(load: dict[str, Any]) -> dict[str, str]:
    names = [side["name"] for side in load["sides"]]
    return dict(zip(names, (SECOND,) if len(names) == 1 else (FIRST, SECOND), strict=True))


def ttft_distribution(load: dict[str, Any]) -> Any:
    """Share of requests whose first token had come, against time; one plot for each load."""
    from matplotlib.figure import Figure

    names, columns = [one["name"] for one in load["loads"]], 4
    rows, columns = -(-len(names) // columns), min(len(names), columns)
    figure = Figure(figsize=(12, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, name in zip(axes, names, strict=False):
        for side, colour in colours(load).items():
            chosen = [r for r in load["runs"] if r["side"] == side and r["load"] == name]
            values = sorted(t for run in chosen for t in run["ttft_ms"])
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            axis.step([0, *values], [0, *shares], where="post", color=colour, lw=2, label=side)
        axis.set(title=name, xlabel="time to first token (ms)", ylim=(0, 102))
        axis.set_xlim(left=0)
    for axis in list(axes)[len(names) :]:
        axis.set_visible(False)
    figure.axes[0].set_ylabel("requests (%)")
    figure.axes[0].legend(loc="lower right")
    return figure


def against_load(load: dict[str, Any]) -> Any:
    """TTFT, TPOT and throughput of both sides over the loads."""
    from matplotlib.figure import Figure

    names = [one["name"] for one in load["loads"]]
    crowded = len(names) > 3
    figure = Figure(figsize=(12, 4.2 if crowded else 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    x = range(len(names))
    panels = (
        (axes[0], "TTFT (ms), p50 and dashed p99", "ttft_p50_ms", "ttft_p99_ms"),
        (axes[1], "TPOT (ms), p50 and dashed p99", "tpot_p50_ms", "tpot_p99_ms"),
        (axes[2], "Output tokens per second", "output_tokens_per_s", None),
    )
    for axis, title, solid, dashed in panels:
        for name, colour in colours(load).items():
            rows = [r for r in load["results"] if r["side"] == name]
            axis.plot(x, [r[solid] for r in rows], "o-", color=colour, lw=2, label=name)
            if dashed:
                axis.plot(x, [r[dashed] for r in rows], "o--", color=colour, lw=1.2, ms=3.5)
        axis.set(title=title, ylim=(0, None))
        axis.set_xticks(
            list(x), names, rotation=60 if crowded else 0, ha="right" if crowded else "center"
        )
        axis.margins(x=0.12)
    axes[0].legend()
    return figure


def ratios(load: dict[str, Any]) -> Any:
    """Second side over first: the median of the rounds, with the lowest and highest round."""
    from matplotlib.figure import Figure

    panels = (
        ("TTFT p50", "ttft_p50_ms"),
        ("TTFT p99", "ttft_p99_ms"),
        ("TPOT p50", "tpot_p50_ms"),
        ("tokens/s", "output_tokens_per_s"),
    )
    figure = Figure(figsize=(12, 0.9 + 0.28 * len(panels) * len(load["ratios"])))
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    labels, row = [], 0
    for label, key in panels:
        for entry in load["ratios"]:
            one = entry[key]
            axis.plot([one["low"], one["high"]], [row, row], color=SECOND, lw=3, alpha=0.35)
            axis.plot(one["median"], row, "o", color=SECOND)
            axis.annotate(
                f"{one['median']:.2f}", (one["median"], row), (0, 5), "data", "offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
            labels.append(f"{label}, {entry['load']}")
            row += 1
    axis.axvline(1, color=FIRST, lw=1.2, ls="--")
    axis.set_yticks(range(row), labels)
    axis.invert_yaxis()
    axis.set(
        xscale="log",
        title="tma_fp8 over default; dashed: equal; for times, left is better, for tokens/s right",
    )
    axis.minorticks_off()
    _plain_ticks(
        axis, [e[k][f] for e in load["ratios"] for _, k in panels for f in ("low", "high")]
    )
    return figure


def _plain_ticks(axis: Any, values: list[float]) -> None:
    """Ticks at round ratios instead of powers of ten."""
    low, high = min([*values, 1]) * 0.92, max([*values, 1]) * 1.09
    wide = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    close = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2)
    ticks = [s for s in (wide if high > 3 * low else close) if low <= s <= high]
    axis.set_xlim(low, high)
    axis.set_xticks(ticks, [f"{t:g}×" for t in ticks])


def parity(found: dict[str, Any]) -> Any:
    """Each layer's error against its bound, and how log-probabilities differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = [row["layer"] for row in found["layers"]]
    left.bar([str(n) for n in layers], [row["error"] for row in found["layers"]], color=SECOND)
    bounds = {check["name"]: check["bound"] for check in found["checks"]}
    if "layer_error" in bounds:
        left.axhline(bounds["layer_error"], color=FIRST, ls="--", lw=1.2)
        left.annotate(
            "bound", (0.99, bounds["layer_error"]), (0, 3), ("axes fraction", "data"),
            "offset points", ha="right", fontsize=8,
        )  # fmt: skip
    left.set(title="Relative error of each MoE layer", xlabel="layer")
    values = found["logprob_differences"]["values"]
    right.hist(values, bins=40, color=SECOND, alpha=0.85)
    right.axvline(0, color=INK, lw=0.8)
    right.set(
        title="Log-probability of the same token: ours − default",
        xlabel="difference (nats)",
        ylabel="positions",
    )
    return figure


def draw(make: Callable[[dict[str, Any]], Any], data: dict[str, Any], png: Path | None) -> str:
    """The figure as inline SVG; also written as PNG when a path is given."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = make(data)
        if png is not None:
            figure.savefig(png, dpi=150, facecolor="white")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Ids must be unique within the page, and the width is the page's.
    stem = make.__name__
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{stem}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{stem}-", svg)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
