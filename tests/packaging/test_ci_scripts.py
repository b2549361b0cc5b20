# SPDX-License-Identifier: Apache-2.0
"""The environment script refuses what it cannot do, and touches nothing that it did not make."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def venv(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [str(ROOT / ".ci" / "venv"), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("data")
    done = venv(tmp_path, FLAVOR="cpu")
    assert done.returncode == 2 and "not made by this script" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"FLAVOR": "tpu"}, "FLAVOR=tpu"), ({"PYTHON": "/no/python"}, "no Python 3.11 or newer")],
)
def test_wrong_settings_are_named(tmp_path, variables, said):
    done = venv(tmp_path / "new", **variables)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "new").exists()


def test_continuous_integration_runs_what_everybody_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"


def test_make_explains_itself():
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("demo", "test", "lint", "venv", "soak"):
        assert f"make {target} " in done.stdout
