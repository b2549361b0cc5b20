# SPDX-License-Identifier: Apache-2.0
"""Ours beside its peers for one operation: checked first, then timed, printed with the ratio.

The benchmarks of router, permutation and balance loss hand over cases; what is common to them,
checking, timing, the fraction of the copy bandwidth and the table, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]

_GRAPH_US = 2000.0  # a replay itself costs some 8 us
_ROUNDS, _REPLAYS = 5, 8


@dataclass(frozen=True)
class Case:
    """The same work by us and by peers.

    ``calls`` maps a name to calls on different inputs; "ours" must be one. ``check`` returns what
    is wrong with ours, or None. ``bytes`` is what the operation must read and write once.
    """

    operation: str
    size: str
    calls: Mapping[str, Sequence[Call]]
    bytes: int
    check: Callable[[], str | None]
    target: str = ""


@dataclass
class Row:
    operation: str
    size: str
    bytes: int
    target: str = ""
    us: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float = 0.0

    @property
    def ours(self) -> float | None:
        return self.us["ours"]["p50"] if "ours" in self.us else None

    @property
    def of_copy(self) -> float | None:
        """Achieved bandwidth over that of a device copy, both reads and writes counted."""
        if self.ours is None or not self.copy_bytes_per_s:
            return None
        return self.bytes / (self.ours * 1e-6) / self.copy_bytes_per_s

    def ratios(self) -> dict[str, float]:
        """How many times faster than each peer."""
        if self.ours is None:
            return {}
        return {name: t["p50"] / self.ours for name, t in self.us.items() if name != "ours"}

    def as_dict(self) -> dict[str, Any]:
        rounded = {name: round(ratio, 2) for name, ratio in self.ratios().items()}
        return {
            "operation": self.operation, "size": self.size, "target": self.target, "us": self.us,
            "times_faster_than": rounded, "bytes": self.bytes,
            "fraction_of_copy": self.of_copy and round(self.of_copy, 3), "failed": self.failed,
        }  # fmt: skip


def measure(case: Case, copy_bytes_per_s: float = 0.0) -> Row:
    """A wrong or failing implementation gets no time; the others are timed in turns."""
    from moe_backend.measure import timing

    row = Row(case.operation, case.size, case.bytes, case.target)
    row.copy_bytes_per_s = copy_bytes_per_s
    try:
        wrong = case.check()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"[:500]
    if wrong:
        row.failed["ours"] = wrong
    captured = {}
    for name, calls in case.calls.items():
        if name in row.failed:
            continue
        try:
            captured[name] = timing.Captured(calls, _GRAPH_US)
        except Exception as error:
            row.failed[name] = f"{type(error).__name__}: {error}"[:500]
            torch.cuda.synchronize()
    times = timing.alternate(captured, rounds=_ROUNDS, replays=_REPLAYS)
    row.us = {name: taken.as_dict() for name, taken in times.items()}
    return row


def _wake(seconds: float = 0.5) -> None:
    """Work until the clocks have risen: the first row was once timed a third too slow."""
    import time

    square = torch.randn(4096, 4096, device="cuda").bfloat16()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            square @ square  # noqa: B018
        torch.cuda.synchronize()


def run(cases: Iterable[Case]) -> Iterator[Row]:
    """Rows as they are done; the copy bandwidth is measured first, in the same process."""
    from moe_backend.measure import timing

    _wake()
    copy = timing.copy_bandwidth()
    for case in cases:
        yield measure(case, copy)
        torch.cuda.empty_cache()


def table(title: str, rows: Sequence[Row]):
    """A rich table: ours, its fraction of the copy bandwidth, each peer with the ratio."""
    from rich.table import Table

    out = Table(title=title)
    for column in ("operation", "size", "ours µs", "p20-p80", "of copy"):
        out.add_column(column, justify="left" if column in ("operation", "size") else "right")
    peers = sorted({name for row in rows for name in (*row.us, *row.failed)} - {"ours"})
    for peer in peers:
        out.add_column(f"{peer} µs (x)", justify="right")
    out.add_column("target")
    for row in rows:
        ratios = row.ratios()
        cells = [row.operation, row.size]
        if row.ours is None:
            cells += ["wrong", row.failed.get("ours", "")[:40], ""]
        else:
            spread = f"{row.us['ours']['p20']:.1f}-{row.us['ours']['p80']:.1f}"
            cells += [f"{row.ours:.1f}", spread, f"{row.of_copy or 0:.0%}"]
        for peer in peers:
            if peer in row.us:
                times = f" ({ratios[peer]:.2f}x)" if peer in ratios else ""
                cells.append(f"{row.us[peer]['p50']:.1f}{times}")
            else:
                cells.append("failed" if peer in row.failed else "")
        out.add_row(*cells, row.target)
    return out


def environment() -> dict[str, str]:
    """What a figure depends on besides the code."""
    import triton

    import moe_backend

    return {
        "moe_backend": moe_backend.__version__,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def vllm_operators():
    """vLLM's compiled MoE operators, or None where they are not installed."""
    from importlib import import_module

    for name in ("vllm._moe_C_stable_libtorch", "vllm._moe_C"):  # before and after a rename
        try:
            import_module(name)
        except ImportError:
            continue
        return torch.ops._moe_C
    return None


def differs(name: str, out: torch.Tensor, want: torch.Tensor, tolerance: float) -> str | None:
    """What is wrong with a result; exact for a tolerance of zero."""
    if out.shape != want.shape:
        return f"{name}: shape {tuple(out.shape)}, expected {tuple(want.shape)}"
    if tolerance == 0:
        wrong = int((out != want).sum())
        return f"{name}: {wrong} of {out.numel()} values differ" if wrong else None
    if not torch.isfinite(out).all():
        return f"{name}: not finite"
    error = (out.double() - want.double()).abs().max().item() if out.numel() else 0.0
    return f"{name}: off by {error:.2e}, more than {tolerance:.0e}" if error > tolerance else None
