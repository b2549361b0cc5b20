# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page, PNG plots and JSON from what was measured.

The page holds everything it shows: no script, no font and no picture comes from elsewhere, so it
can be mailed, archived and opened without a network.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from moe_backend.measure import figures

CSS = """
:root { color-scheme: light; --ink: #0f172a; --soft: #475569; --line: #e2e8f0; --accent: #c2410c }
* { box-sizing: border-box }
body { margin: 0; background: #f8fafc; color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 10px }
p { margin: 6px 0 } .soft { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px;
  margin: 22px 0 }
.card, .panel { background: #fff; border: 1px solid var(--line); border-radius: 10px }
.card { padding: 14px 16px } .panel { padding: 14px 16px; margin: 12px 0; overflow-x: auto }
.card b { display: block; font-size: 24px; line-height: 1.25 }
.ok { color: #15803d } .bad { color: #b91c1c }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: 13px }
th.l, td.l { text-align: left } tr:last-child td { border-bottom: 0 }
tr.second td { color: var(--accent) } svg { width: 100%; height: auto; display: block }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
code.n { white-space: nowrap }
""".strip()


def write_report(folder: Path, report: dict[str, Any]) -> dict[str, Path]:
    """Writes report.html, report.json and the plots; returns their paths.

    ``report`` holds "title" and, each optional: "intro", "load" (from loadtest.summarise),
    "parity" (from measure.parity), "status" (from /moe/status), "environment" and "notes".
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"html": folder / "report.html", "json": folder / "report.json"}
    parts = [_head(report)]
    if load := report.get("load"):
        parts += _load_section(load, folder, paths)
    if parity := report.get("parity"):
        parts += _parity_section(parity, folder, paths)
    if status := report.get("status"):
        parts.append(_status_section(status))
    parts.append(_how_section(report))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report['title'])}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    paths["html"].write_text(page)
    paths["json"].write_text(json.dumps(finite(report), indent=2, default=str) + "\n")
    return paths


def finite(value: Any) -> Any:
    """JSON knows no infinity: the rate "all at once" is written as the word that options take."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return "inf" if value == float("inf") else value


def _table(heads: list[str], rows: list[list[str]], left: int = 1, second: str = "") -> str:
    """Cells are HTML already; the first ``left`` columns are words, the others numbers."""

    def cells(tag: str, row: list[str]) -> str:
        kinds = [" class=l" if i < left else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{c}</{tag}>" for kind, c in zip(kinds, row, strict=True))

    body = "".join(
        f"<tr{' class=second' if second and second in row[:left] else ''}>{cells('td', row)}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>"


def _panel(content: str) -> str:
    return f'<div class="panel">{content}</div>'


def _card(label: str, value: str, note: str = "", kind: str = "") -> str:
    return (
        f'<div class="card"><span class="soft">{escape(label)}</span>'
        f'<b class="{kind}">{escape(value)}</b><span class="soft">{escape(note)}</span></div>'
    )


def _head(report: dict[str, Any]) -> str:
    cards = []
    if parity := report.get("parity"):
        good = sum(check["ok"] for check in parity["checks"])
        cards.append(
            _card(
                "Parity with default",
                "holds" if parity["passed"] else "broken",
                f"{good} of {len(parity['checks'])} bounds kept",
                "ok" if parity["passed"] else "bad",
            )
        )
    load = report.get("load") or {}
    if load.get("ratios"):
        entry = load["ratios"][-1]
        for label, key in (("TTFT p50", "ttft_p50_ms"), ("Tokens/s", "output_tokens_per_s")):
            one = entry[key]
            spread = f"{one['low']:.2f} to {one['high']:.2f} over {entry['rounds']} rounds"
            cards.append(
                _card(f"{label} vs default", f"{one['median']:.2f}×", f"{spread}; {entry['load']}")
            )
    if status := report.get("status"):
        counts = status.get("layers", {})
        ours, total = counts.get("moe_backend", 0), sum(counts.values())
        kind = "ok" if status.get("active") else "bad"
        cards.append(_card("MoE layers on moe_backend", f"{ours} of {total}", "", kind))
    intro = f"<p class=soft>{escape(report.get('intro', ''))}</p>"
    return f'<h1>{escape(report["title"])}</h1>{intro}<div class="cards">{"".join(cards)}</div>'


def _load_section(load: dict[str, Any], folder: Path, paths: dict[str, Path]) -> list[str]:
    heads = [
        "tokens, when",
        "server",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p99",
        "tokens/s",
        "requests",
    ]
    keys = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
    rows = []
    for row in load["results"]:
        numbers = [f"{row[key]:.1f}" for key in keys]
        words = [escape(row["load"]), escape(row["side"])]
        rows.append([*words, *numbers, f"{row['output_tokens_per_s']:.1f}", str(row["requests"])])
    parts = ["<h2>Under load</h2>", _panel(_table(heads, rows, left=2, second="tma_fp8"))]
    parts.append("<p class=soft>Times in milliseconds, over all requests of all rounds.</p>")
    parts.append(_plot(figures.ttft_distribution, load, folder, paths))
    if len(load["loads"]) > 1:
        parts.append(_plot(figures.against_load, load, folder, paths))
    if load.get("not_reached"):
        parts.append(f"<p>Not reached in time: {escape('; '.join(load['not_reached']))}.</p>")
    if load.get("ratios"):
        parts.append(_plot(figures.ratios, load, folder, paths))
    return parts


def _plot(make: Any, data: dict[str, Any], folder: Path, paths: dict[str, Path]) -> str:
    png = folder / f"{make.__name__}.png"
    paths[make.__name__] = png
    return _panel(figures.draw(make, data, png))


def _parity_section(parity: dict[str, Any], folder: Path, paths: dict[str, Path]) -> list[str]:
    rows = []
    for check in parity["checks"]:
        mark = '<span class="ok">kept</span>' if check["ok"] else '<span class="bad">broken</span>'
        numbers = [f"{check['value']:.3g}", f"{check['bound']:.3g}", mark]
        rows.append([escape(check["name"].replace("_", " ")), escape(check["what"]), *numbers])
    return [
        "<h2>Parity</h2>",
        _panel(_table(["bound", "what", "found", "limit", ""], rows, left=2)),
        _plot(figures.parity, parity, folder, paths),
    ]


def _status_section(status: dict[str, Any]) -> str:
    rows = []
    for worker in status.get("workers", []):
        for row in worker["layers"]:
            words = [str(worker["rank"]), f"<code class=n>{escape(row['layer'])}</code>"]
            said = (row["backend"], row["reason"], row.get("routing", ""))
            rows.append([*words, *(escape(str(text)) for text in said)])
    heads = ["rank", "layer", "runs on", "why", "routing"]
    return "<h2>Which layer runs where</h2>" + _panel(_table(heads, rows, left=5))


def _how_section(report: dict[str, Any]) -> str:
    facts = dict(report.get("environment", {}))
    for side in (report.get("load") or {}).get("sides", []):
        facts[f"server {side['name']}"] = " ".join([side["model"], *side["args"]])
    rows = [[escape(str(k)), f"<code>{escape(str(v))}</code>"] for k, v in facts.items()]
    notes = "".join(f"<p class=soft>{escape(note)}</p>" for note in report.get("notes", []))
    return f"<h2>How this was measured</h2>{notes}" + _panel(_table(["", ""], rows, left=2))
