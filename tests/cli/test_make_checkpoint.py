# SPDX-License-Identifier: Apache-2.0
"""`moe-backend make-checkpoint` at the shell."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from moe_backend.cli.main import app
from moe_backend.cli.make_checkpoint import parse_assignments

SMALL = ["--set", "num_hidden_layers=2", "--set", "n_routed_experts=8"]


def run(*args):
    return CliRunner().invoke(app, ["make-checkpoint", *map(str, args)])


def test_writes_and_says_what(tmp_path):
    result = run(tmp_path / "m", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["weights"] == "fp8" and "model.safetensors" in said["files"]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["n_routed_experts"] == 8


def test_people_are_told_the_next_command(tmp_path):
    result = run(tmp_path / "m", "--preset", "kimi-k2")
    assert result.exit_code == 0 and "--load-format dummy" in result.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("--preset", "llama"),
        ("--set", "hidden_size"),
        ("--set", "hidden_size=x"),
        ("--set", "hiden_size=1"),
        ("--weights", "int4"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(tmp_path, args):
    result = run(tmp_path / "m", *args)
    assert result.exit_code == 2 and "error" in result.stderr
    assert "Traceback" not in result.output and not list(tmp_path.iterdir())


def test_brackets_of_a_message_are_not_taken_for_a_style(tmp_path):
    result = run(tmp_path / "m", "--set", "quantization_config.weight_block_size=[128]")
    assert "[rows, columns]" in result.stderr


def test_values_are_json_or_text():
    assert parse_assignments(["a=1", "b=null", "c=[1,2]", "d=text"]) == {
        "a": 1,
        "b": None,
        "c": [1, 2],
        "d": "text",
    }
