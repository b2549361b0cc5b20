# SPDX-License-Identifier: Apache-2.0
"""`moe-backend doctor` at the shell, in a process of its own as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from moe_backend.measure.checkpoint import write_checkpoint


def doctor(*args, **env):
    command = [sys.executable, "-m", "moe_backend.cli.main", "doctor", *map(str, args)]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "COLUMNS": "120"} | env
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("m") / "tiny", weights="none")


def test_ready_with_json_alone_on_stdout(model):
    """vLLM logs to stdout by default; one line of it would break every script."""
    pytest.importorskip("vllm")
    result = doctor("--model", model, "--json")
    said = json.loads(result.stdout)
    assert result.returncode == 0 and said["ok"], result.stderr
    assert {g["kind"]: g["backend"] for g in said["layers"]}["experts"] == "moe_backend"


def test_blockers_are_listed_with_exit_code_1(model):
    result = doctor("--model", model, "--tp", "4", MOE_BACKEND_FALBACK="allow", VLLM_PLUGINS="")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    for words in ("MOE_BACKEND_FALBACK", "VLLM_PLUGINS", "splits a 128x128 scale block"):
        assert words in " ".join(result.stdout.split()), result.stdout


def test_unreadable_model_is_a_message_and_exit_code_2(tmp_path):
    result = doctor("--model", tmp_path)
    assert result.returncode == 2 and "config.json" in result.stderr
    assert "Traceback" not in result.stderr
