# SPDX-License-Identifier: Apache-2.0
"""The demo's order of work and its report, with stand-ins for the servers and the parity check."""

import json

import pytest
from typer.testing import CliRunner

from moe_backend.cli.main import app
from moe_backend.measure.loadtest import Run

pytest.importorskip("vllm")
pytest.importorskip("matplotlib")
STATUS = {
    "active": True,
    "layers": {"moe_backend": 1},
    "workers": [
        {"rank": 0, "layers": [{"layer": "l", "backend": "moe_backend", "reason": "reference"}]}
    ],
}
CHECK = {"name": "layer_error", "value": 0.002, "bound": 0.004, "what": "ours to the oracle"}


@pytest.fixture
def story(monkeypatch, tmp_path):
    """Stands in for everything slow; returns what was done, in order."""
    from moe_backend.measure import demo

    done = []

    class Pool:
        def __init__(self, plan, report, logs):
            self.plan, self.started_in = plan, {"default": 1.0, "tma_fp8": 2.0}
            self.status = {"tma_fp8": STATUS}

        def __enter__(self):
            done.append("servers start")
            return self

        def __exit__(self, *_):
            done.append("servers end")

    def measure(plan, pool, report):
        done.append("load")
        report("load", "1 run", 1, 1)
        return [
            Run(s.name, x.name, n, [10.0, 12.0], [1.0, 1.2], 50.0, 2.0) for s, x, n in plan.turns()
        ]

    def parity(request, *, output, on_progress):
        done.append("parity")
        on_progress("judging", 0.5)
        return {
            "passed": story.passed,
            "checks": [CHECK | {"ok": story.passed}],
            "layers": [{"layer": 1, "error": 0.002}],
            "logprob_differences": {"values": [0.0, 0.1]},
        }

    def story():
        return done

    story.passed = True
    monkeypatch.setenv("MOE_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "ServerPool", Pool)
    monkeypatch.setattr(demo, "measure", measure)
    monkeypatch.setattr(demo, "run_parity", parity)
    monkeypatch.setattr(demo, "stock_model", lambda model, *_: f"{model}-bf16")
    monkeypatch.setattr(demo, "write_checkpoint", lambda folder, *_, **__: folder)
    return story


def run(tmp_path, *words):
    return CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *words])


def test_servers_are_ended_before_the_parity_check_starts_its_own(story, tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert story() == ["servers start", "load", "servers end", "parity"]


def test_figures_verdict_and_report_are_shown(story, tmp_path):
    result = run(tmp_path)
    assert "TTFT p50" in result.output and "tma_fp8" in result.output
    assert "Parity holds: 1 of 1 bounds kept" in result.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "tiny-deepseek" in page and "1 of 1" in page


def test_broken_parity_is_exit_code_1_with_a_report(story, tmp_path):
    story.passed = False
    result = run(tmp_path)
    assert result.exit_code == 1 and "is broken" in result.output
    assert (tmp_path / "out" / "report.html").exists()


def test_json_is_json_and_alone_on_stdout(story, tmp_path):
    result = run(tmp_path, "--json")
    data = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))
    assert data["parity"]["passed"] and {r["rate"] for r in data["results"]} == {2.0, "inf"}
    assert data["ratios"][0]["ttft_p50_ms"]["median"] == 1.0
    assert data["files"]["html"].endswith("report.html")
