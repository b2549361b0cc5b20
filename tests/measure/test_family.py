# SPDX-License-Identifier: Apache-2.0
"""Rows of an operation's benchmark: a wrong kernel has no time, and ratios mean what they say."""

import pytest
import torch
from rich.console import Console

from moe_backend.measure import family, timing


@pytest.fixture
def stopwatch(monkeypatch):
    """Every call list takes as many µs as its only call returns."""

    class Captured:
        def __init__(self, calls, graph_us):
            self.us = float(calls[0]())

        def sample(self, replays):
            return [self.us] * replays

    monkeypatch.setattr(timing, "Captured", Captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def case(wrong=None, **us):
    calls = {name: [lambda t=t: t] for name, t in us.items()}
    return family.Case("route", "4", calls, 4_000_000, lambda: wrong, ">=1x")


def test_ratio_is_the_peers_time_over_ours(stopwatch):
    row = family.measure(case(ours=2.0, vLLM=5.0), copy_bytes_per_s=4e12)
    assert row.ratios() == {"vLLM": 2.5}
    assert row.of_copy == pytest.approx(0.5)
    assert row.as_dict()["times_faster_than"] == {"vLLM": 2.5}


def test_a_wrong_kernel_gets_no_time(stopwatch):
    row = family.measure(case("ids: 3 differ", ours=2.0, vLLM=5.0))
    assert "ours" not in row.us and row.failed == {"ours": "ids: 3 differ"}
    assert row.ratios() == {} and row.of_copy is None and row.us["vLLM"]["p50"] == 5.0


def test_a_peer_that_fails_spares_the_others(stopwatch):
    broken = case(ours=2.0, vLLM=5.0)
    broken.calls["torch"] = [lambda: 1 / 0]
    row = family.measure(broken)
    assert "ZeroDivisionError" in row.failed["torch"] and row.ratios() == {"vLLM": 2.5}


def test_implementations_take_turns_and_the_first_round_is_left_out():
    """Timed one after the other, the first was once a third too slow: the clocks were still low."""
    turns = []

    class Slowing:
        def __init__(self, name):
            self.name = name

        def sample(self, replays):
            turns.append(self.name)
            return [float(len(turns))] * replays

    out = timing.alternate({n: Slowing(n) for n in ("ours", "vLLM")}, rounds=2, replays=3)
    assert turns == ["ours", "vLLM"] * 3
    assert out["ours"].p20 == 3 and out["vLLM"].p20 == 4 and out["ours"].p80 == 5


def test_table_shows_failures_and_ratios(stopwatch):
    rows = [family.measure(case(ours=2.0, vLLM=5.0)), family.measure(case("NaN", vLLM=5.0))]
    console = Console(width=200, record=True)
    console.print(family.table("router", rows))
    text = console.export_text()
    assert "5.0 (2.50x)" in text and "wrong" in text and "NaN" in text


@pytest.mark.parametrize(
    ("out", "tolerance", "says"),
    [
        (torch.tensor([1.0, 2.0]), 0, None),
        (torch.tensor([1.0, 3.0]), 0, "ids: 1 of 2 values differ"),
        (torch.tensor([1.0, 2.1]), 0.2, None),
        (torch.tensor([1.0, 2.5]), 0.2, "off by 5.00e-01"),
        (torch.tensor([1.0, float("nan")]), 0.2, "not finite"),
        (torch.tensor([1.0]), 0.2, "shape"),
    ],
)
def test_differs(out, tolerance, says):
    found = family.differs("ids", out, torch.tensor([1.0, 2.0]), tolerance)
    assert (found is None) if says is None else says in found
