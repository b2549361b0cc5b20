# SPDX-License-Identifier: Apache-2.0
"""`moe-backend explain`: exact → nearest size → heuristic, with the reason."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from moe_backend.cli.main import app
from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.model_config import read_model
from moe_backend.tuning import heuristics, schema

DEVICE = "NVIDIA Test GPU"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("m") / "r1", "deepseek-r1"))


@pytest.fixture
def tuned(tmp_path, monkeypatch, model):
    """A file with entries for 64 and 1,024 tokens of the TP 8 shape."""
    shape = read_model(model).shape(8)
    entries = [
        schema.entry(
            shape, n, "uniform", heuristics.heuristic(shape, n), 100.0, triton="3.6", torch="2.11"
        )
        for n in (64, 1024)
    ]
    file = tmp_path / schema.file_name(DEVICE)
    schema.save(file, schema.ConfigFile(device=DEVICE, entries=entries))
    monkeypatch.setenv("MOE_BACKEND_CONFIG_DIR", str(tmp_path))
    return file


def run(*args):
    return CliRunner().invoke(app, ["explain", *map(str, args)])


def sources(result):
    assert result.exit_code == 0, result.output
    return [(row["tokens"], row["source"]) for row in json.loads(result.stdout)["selections"]]


def test_exact_then_nearest_then_heuristic(model, tuned):
    common = ("--model", model, "--device", DEVICE, "--tokens", "64,100,1024", "--json")
    found = run(*common, "--tp", 8)
    assert sources(found) == [(64, "exact"), (100, "bucket"), (1024, "exact")]
    assert json.loads(found.stdout)["shape"]["intermediate"] == 256
    assert {s for _, s in sources(run(*common, "--tp", 8, "--ep"))} == {"heuristic"}


def test_people_read_device_shape_and_reason(model, tuned):
    result = run("--model", model, "--device", DEVICE, "--tp", 8, "--tokens", "64")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert DEVICE in text and "256 of 256 experts" in text and "measured at 64 tokens" in text


def test_device_is_named_when_there_is_no_gpu(model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = json.loads(run("--model", model, "--tokens", "1", "--json").stdout)
    assert said["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "many"), "expected positive numbers"),
        (("--tokens", "0"), "expected positive numbers"),
        (("--tokens", ""), "expected positive numbers"),
        (("--tp", "32"), "splits a 128x128 scale block"),
        (("--model", "/absent"), "no such folder"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(model, args, words):
    result = run("--model", model, *args)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_broken_file_of_the_user_is_named(model, tuned):
    tuned.write_text('{"version": 1, "device": "x", "entries": [{}]}')
    result = run("--model", model, "--device", DEVICE, "--tp", 8)
    assert result.exit_code == 2 and tuned.name in result.stderr.replace("\n", "")


def test_model_without_experts(tmp_path):
    folder = write_checkpoint(tmp_path / "m", weights="none", first_k_dense_replace=5)
    result = run("--model", folder)
    assert result.exit_code == 2 and "no expert layers" in result.stderr
