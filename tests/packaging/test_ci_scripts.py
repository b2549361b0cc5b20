# SPDX-License-Identifier: Apache-2.0
"""The environment script refuses what it cannot do, and touches nothing that it did not make."""

import os
import subprocess
import sys
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


def test_cuda_sees_everything_that_its_interpreter_sees(tmp_path):
    """A vLLM in a virtual environment: --system-site-packages alone reaches past it."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    (packages,) = outer.glob("lib/python3*/site-packages")
    (packages / "engine_of_outer.py").touch()
    (packages / "pip.py").write_text("import engine_of_outer, sys; print(sys.argv)")
    done = venv(inner, FLAVOR="cuda", PYTHON=str(outer / "bin" / "python"))
    assert done.returncode == 0, done.stderr
    assert "[report,test]" in (inner / "install.log").read_text()
    subprocess.run([inner / "bin" / "python", "-c", "import engine_of_outer"], check=True)


def test_continuous_integration_runs_what_everybody_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"


def test_make_explains_itself():
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("demo", "test", "lint", "venv", "soak"):
        assert f"make {target} " in done.stdout
