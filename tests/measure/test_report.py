# SPDX-License-Identifier: Apache-2.0
"""The page needs nothing from elsewhere, shows what was measured, and cannot be broken by names."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from moe_backend.measure.loadtest import Plan, Run, Side, summarise
from moe_backend.measure.report import write_report
from moe_backend.measure.vllm_bench import Load

pytest.importorskip("matplotlib")
EVIL = "<script>alert('x')</script>"


class Tags(HTMLParser):
    """Every tag must be closed in order; ids and outside references are collected."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.names, self.ids, self.outside = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data") and not value.startswith("#"):
                self.outside.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def measured():
    sides = (Side("default", f"/models/{EVIL}"), Side("tma_fp8", "/models/x"))
    plan = Plan(sides, (Load(2, 8, 4, 3), Load(math.inf, 8, 4, 3)), rounds=2)
    runs = [
        Run(s.name, x.name, n, [10.0 + n, 20, 30], [2.0, 2, 3], 100.0 + n, 2.0)
        for s, x, n in plan.turns()
    ]
    check = {"name": "layer_error", "value": 0.002, "bound": 0.006, "ok": True, "what": EVIL}
    return {
        "title": f"Test {EVIL}",
        "load": summarise(plan, runs),
        "parity": {
            "passed": False,
            "checks": [check, check | {"name": "other", "ok": False}],
            "layers": [{"layer": 1, "error": 0.002}],
            "logprob_differences": {"values": [0.0, 0.01, -0.02]},
        },
        "status": {
            "active": True,
            "layers": {"moe_backend": 1},
            "workers": [{"rank": 0, "layers": [{"layer": EVIL, "backend": "b", "reason": "r"}]}],
        },
        "environment": {"device": "CPU"},
        "notes": ["a note"],
    }


def test_the_page_is_whole_and_self_contained(measured, tmp_path):
    paths = write_report(tmp_path, measured)
    page = paths["html"].read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open, "a tag is not closed"
    assert not tags.outside, "something is fetched from elsewhere"
    assert not tags.names & {"script", "link", "iframe", "img", "object"}
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(tags.ids) == len(set(tags.ids)), "ids of two plots collide"
    for ids in re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', page):
        assert ids in tags.ids, "a plot refers to a shape that is not there"


def test_names_are_text_not_markup(measured, tmp_path):
    page = write_report(tmp_path, measured)["html"].read_text()
    assert EVIL not in page and "&lt;script&gt;" in page


def test_verdict_figures_and_layers_are_shown(measured, tmp_path):
    page = write_report(tmp_path, measured)["html"].read_text()
    assert "1 of 2 bounds kept" in page and ">broken<" in page
    assert "all at once" in page and "2 req/s" in page
    assert "1.00×" in page and "a note" in page and "1 of 1" in page


def test_plots_are_png_and_json_holds_every_request(measured, tmp_path):
    paths = write_report(tmp_path, measured)
    plots = {name for name, path in paths.items() if path.suffix == ".png"}
    assert plots == {"ttft_distribution", "against_load", "ratios", "parity"}
    assert all(paths[name].read_bytes().startswith(b"\x89PNG") for name in plots)
    data = json.loads(paths["json"].read_text(), parse_constant=lambda word: pytest.fail(word))
    assert {row["rate"] for row in data["load"]["results"]} == {2, "inf"}
    assert sum(len(run["ttft_ms"]) for run in data["load"]["runs"]) == 2 * 2 * 2 * 3


def test_parts_that_were_not_measured_are_left_out(measured, tmp_path):
    paths = write_report(tmp_path, {"title": "t", "load": measured["load"]})
    page = paths["html"].read_text()
    assert "Parity" not in page and "Which layer" not in page
    assert set(paths) == {"html", "json", "ttft_distribution", "against_load", "ratios"}
