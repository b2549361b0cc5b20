# SPDX-License-Identifier: Apache-2.0
"""`moe-backend parity` at the shell: verdicts on real engines, and every kind of bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from typer.testing import CliRunner

from moe_backend.cli.main import app
from moe_backend.cli.parity import read_prompts
from moe_backend.measure import guard, parity, parity_runs
from moe_backend.measure.checkpoint import write_checkpoint


def run(*args):
    return CliRunner().invoke(app, ["parity", *map(str, args)])


@pytest.fixture(autouse=True)
def _private_temp(tmp_path, monkeypatch):
    """A failed comparison keeps its logs; those of the tests go away with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("m") / "tiny", num_hidden_layers=3, n_routed_experts=16
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def default_once(cache, monkeypatch):
    """The default engine runs in the first test only; its files serve the others."""
    real = parity.run_engine

    def run_engine(side, job, work, timeout, on_progress):
        kept = cache / "default"
        if side == "default" and kept.exists():
            shutil.copytree(kept, work / side)
            return parity_runs.load_result(work / side)
        result = real(side, job, work, timeout, on_progress)
        if side == "default":
            shutil.copytree(work / side, kept)
        return result

    monkeypatch.setattr(parity, "run_engine", run_engine)
    monkeypatch.setenv("MOE_BACKEND_CACHE_DIR", str(cache))


SHORT = ("--tokens", 8, "--json")


@pytest.mark.serving
def test_parity_holds_on_the_tiny_model(model, default_once, tmp_path):
    pytest.importorskip("vllm")
    result = run("--model", model, *SHORT, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["passed"] and [row["layer"] for row in report["layers"]] == [1, 2]
    assert all(row["num_experts_used"] == 16 for row in report["layers"])
    assert report["tokens"]["positions"] > 100 and report["fault"] is None
    assert len(report["logprob_differences"]["values"]) == report["tokens"]["positions"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"parity.json", "default.log", "plugin.log"} <= written
    assert not guard.children_of(os.getpid()), "an engine is left behind"


@pytest.mark.serving
def test_one_false_scale_breaks_parity(model, default_once):
    """The check is alive: a single wrong block scale of a single expert must not pass."""
    pytest.importorskip("vllm")
    result = run("--model", model, *SHORT, "--inject-fault")
    assert result.exit_code == 1, result.stderr
    report = json.loads(result.stdout)
    assert "w2_weight_scale_inv" in report["fault"] and not report["passed"]
    broken = {check["name"] for check in report["checks"] if not check["ok"]}
    assert "layer_worst_cell" in broken
    first, last = report["layers"]
    assert first["worst_cell"] < 2e-2 < last["worst_cell"], "only the falsified layer may fail"


@pytest.mark.serving
def test_engine_that_does_not_start_is_explained(model, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("MOE_BACKEND_CACHE_DIR", str(tmp_path))
    result = run("--model", model, "--engine", "no_such_argument=1")
    assert result.exit_code == 2 and "no_such_argument" in result.stderr
    assert "the default engine failed" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.serving
def test_engine_that_takes_too_long_is_ended(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_CACHE_DIR", str(tmp_path))
    result = run("--model", model, "--timeout", 1)
    assert result.exit_code == 2 and "longer than 1 s" in result.stderr
    assert not guard.children_of(os.getpid())


@pytest.mark.serving
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_ends_the_engines(model, tmp_path, number, code):
    command = [sys.executable, "-m", "moe_backend.cli.main", "parity", "--model", str(model)]
    environment = os.environ | {"MOE_BACKEND_CACHE_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 60
        while not (engines := guard.children_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        assert "the engines are ended" in process.communicate(timeout=60)[1]
        assert process.returncode == code and engines
    assert not [pid for pid in engines if os.path.exists(f"/proc/{pid}")]


def test_models_that_cannot_be_compared(tmp_path):
    assert "no such folder" in bad("--model", tmp_path / "absent")
    plain = write_checkpoint(tmp_path / "bf16", weights="none", n_routed_experts=8)
    config = json.loads((plain / "config.json").read_text())
    assert "needs real weights" in bad("--model", plain)
    for change, words in (
        ({"quantization_config": None}, "no quantization_config"),
        ({"first_k_dense_replace": 5}, "has no expert layers"),
        ({"model_type": "new_moe", "scoring_func": None}, "models route is not known"),
    ):
        (plain / "config.json").write_text(json.dumps(config | change))
        assert words in bad("--model", plain)


def bad(*args):
    result = run(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return " ".join(result.stderr.split())


def test_bad_prompts_and_arguments(model, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "expected prompts" in bad("--model", model, "--prompts", tmp_path / "empty.txt")
    assert "does not exist" in bad("--model", model, "--prompts", tmp_path / "absent.txt")
    assert "expected FIELD=VALUE" in bad("--model", model, "--engine", "oops")
    assert bad("--model", model, "--tokens", 0)


def test_unknown_variable_is_refused_before_an_engine_starts(model, monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_FALBACK", "allow")
    assert "MOE_BACKEND_FALBACK" in bad("--model", model)


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    assert read_prompts(file) == ["one", "two"]
    file.write_text('["a", "b"]')
    assert read_prompts(file) == ["a", "b"]
    file.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    assert read_prompts(file) == ["x", "y"]
    file.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="expected prompts"):
        read_prompts(file)
