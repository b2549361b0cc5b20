# SPDX-License-Identifier: Apache-2.0
"""What the commands say to wrong arguments, before any kernel is loaded."""

import json

import pytest
import torch
from typer.testing import CliRunner

from moe_backend.cli.main import app


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "experts", "--shapes", "gpt"], "--shapes: expected deepseek-v3-tp8"),
        (["bench", "experts", "--shapes", "E8-H1000-I64-K2"], "hidden size 1000"),
        (["bench", "experts", "--tokens", "1,x"], "--tokens: expected positive numbers"),
        (["bench", "experts", "--tokens", "0"], "--tokens: expected positive numbers"),
        (["bench", "experts", "--load", "heavy"], "--load: expected some of uniform, zipf"),
        (["tune", "--model", "/nowhere"], "neither a folder with a config.json"),
        (["tune", "--model", "deepseek-v3-tp8", "--load", "hot"], "uniform, zipf or trace:FILE"),
        (["tune", "--model", "deepseek-v3-tp8", "--load", "trace:/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
@pytest.mark.parametrize("command", ["experts", "router", "permute", "aux-loss"])
def test_no_gpu(command):
    result = run("bench", command)
    assert result.exit_code == 2 and "no CUDA device" in result.output


def test_an_unsupported_layer_is_refused(tmp_path):
    config = {"num_experts": 8, "hidden_size": 1000, "intermediate_size": 256, "top_k": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("tune", "--model", str(tmp_path))
    assert result.exit_code == 2 and "hidden size 1000" in result.output
