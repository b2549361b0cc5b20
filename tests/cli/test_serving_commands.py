# SPDX-License-Identifier: Apache-2.0
"""serve, loadtest and demo: what they pass on, and messages instead of tracebacks."""

import json

import pytest
from typer.testing import CliRunner

from moe_backend.cli.main import app
from moe_backend.measure.server import GATEWAY_ARGS, PLUGIN_ARGS, ServerError


def invoke(*words: str):
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def served(*words: str) -> list[str]:
    result = invoke("serve", "model", "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["command"][3:]


def test_serve_adds_the_plugin_and_the_gateway():
    assert served() == ["--model", "model", *PLUGIN_ARGS, *GATEWAY_ARGS]


def test_serve_passes_any_vllm_argument_on():
    words = ["-tp", "2", "--max-model-len=512", "--enforce-eager"]
    assert served(*words) == ["--model", "model", *PLUGIN_ARGS, *words, *GATEWAY_ARGS]


@pytest.mark.parametrize(
    "words", [["--quantization", "fp8"], ["--quantization=fp8"], ["-q", "fp8"]]
)
def test_serve_leaves_a_quantization_that_was_asked_for(words):
    assert "tma_fp8" not in served(*words)


def test_serve_without_the_gateway():
    assert served("--no-gateway") == ["--model", "model", *PLUGIN_ARGS]


def test_two_worker_extensions_are_refused_with_a_way_out():
    result = invoke("serve", "model", "--json", "--worker-extension-cls", "a.B")
    assert result.exit_code == 2 and "--no-gateway" in result.output


def test_serve_refuses_an_unknown_variable_before_it_starts(monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_FALBACK", "allow")
    result = invoke("serve", "model")
    assert result.exit_code == 2 and "MOE_BACKEND_FALLBACK" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--rate", "fast"], "valid number"),
        (["--rate", "1", "--rate", "1"], "every rate"),
        (["--clients", "0"], "clients"),
        (["--load", "8192:32"], "INPUT:OUTPUT:WHEN:PROMPTS"),
        (["--load", "8:4:inf:4", "--load", "8:4:inf:5"], "once"),
        (["--server-arg", "--a 'b"], "quotation"),
        (["--output-len", "1"], "time per token"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--rounds", "0"], "rounds"),
        (["--compare", "sglang"], "expected default or none"),
        ([], "not a model folder"),
    ],
)
def test_loadtest_refuses_what_it_cannot_measure(words, said, tmp_path):
    result = invoke("loadtest", "--model", str(tmp_path / "none"), *words)
    assert result.exit_code == 2 and said in result.output


def test_an_interrupted_loadtest_keeps_what_it_measured(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from moe_backend.measure import loadtest, sides
    from moe_backend.measure.loadtest import Run

    def interrupted(plan, pool, report):
        for side in plan.sides:
            yield Run(side.name, plan.loads[0].name, 0, [9.0], [1.0], 5.0, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(loadtest, "measure", interrupted)
    monkeypatch.setattr(sides, "stock_model", lambda model, *_: model)
    words = ["--model", "m", "--input-len", "8", "--input-len", "16", "--clients", "2"]
    result = invoke("loadtest", *words, "--out", str(tmp_path))
    assert result.exit_code == 130 and "every server is stopped" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["load"]["not_reached"] == ["16→32, 2 clients"]
    assert "Ended early: KeyboardInterrupt" in (tmp_path / "report.html").read_text()


def test_loadtest_says_where_the_logs_are_when_a_server_fails(monkeypatch, tmp_path):
    from moe_backend.cli import loadtest

    def fails(*_):
        raise ServerError("default: the vLLM server ended with code 1")

    monkeypatch.setattr(loadtest, "_run", fails)
    result = invoke("loadtest", "--model", "m", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "ended with code 1" in result.output and "logs" in result.output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ServerError("tma_fp8: out of memory"), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "every server is stopped"),
    ],
)
def test_a_demo_that_fails_says_why(monkeypatch, tmp_path, error, code, said):
    pytest.importorskip("vllm")
    from moe_backend.measure import demo

    def fails(*_):
        raise error

    monkeypatch.setattr(demo, "run_demo", fails)
    result = invoke("demo", "--out", str(tmp_path))
    assert result.exit_code == code and said in result.output


@pytest.mark.parametrize("command", ["serve", "loadtest", "demo"])
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0 and "--json" in result.output


def test_loadtest_json_is_json_though_a_rate_is_infinite(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from moe_backend.cli import loadtest
    from moe_backend.measure.loadtest import Plan, Run, default_side, plugin_side, summarise

    def measured(model, compare, compare_model, loads, options, out, progress):
        plan = Plan((default_side("a"), plugin_side("b")), loads, options["rounds"])
        runs = [Run(s.name, x.name, n, [9.0], [1.0], 5.0, 1.0) for s, x, n in plan.turns()]
        return {"title": "t", "load": summarise(plan, runs), "status": None}

    monkeypatch.setattr(loadtest, "_run", measured)
    words = ["--model", "m", "--rate", "2", "--rate", "inf", "--out", str(tmp_path), "--json"]
    data = json.loads(invoke("loadtest", *words).stdout, parse_constant=lambda w: pytest.fail(w))
    assert [entry["rate"] for entry in data["ratios"]] == [2.0, "inf"]
