# SPDX-License-Identifier: Apache-2.0
"""The wheel exposes one top-level package and carries the tuned files."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "moe_backend",
        "kernels",
        "tuned_configs",
    ):
        (source / name).symlink_to(ROOT / name)  # a build folder must not appear in the checkout
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_only_moe_backend_is_a_top_level_import(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moe_backend"}


def test_every_source_file_is_in(wheel):
    names = set(wheel.namelist())
    for folder, prefix in (("moe_backend", ""), ("kernels", "moe_backend/")):
        for path in (ROOT / folder).rglob("*.py"):
            assert prefix + str(path.relative_to(ROOT)) in names


def test_tuned_files_are_in(wheel):
    names = set(wheel.namelist())
    for path in (ROOT / "tuned_configs").glob("*.json"):
        assert f"moe_backend/tuned_configs/{path.name}" in names


def test_the_balance_page_is_in(wheel):
    assert "moe_backend/vllm_plugin/balance.html" in wheel.namelist()


def test_entry_points(wheel):
    text = next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    points = wheel.read(text).decode()
    assert "tma_fp8 = moe_backend.vllm_plugin:register" in points
    assert "moe-backend = moe_backend.cli.main:main" in points
