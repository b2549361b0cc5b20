# SPDX-License-Identifier: Apache-2.0
"""Python sources of other vLLM versions, as trees that go first on the path of a subprocess.

Only *.py is kept of a wheel, plus a stub dist-info whose version says "cpu": enough to import and
run everything that is Python, without a GPU. Kept under MOE_BACKEND_CACHE_DIR.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from moe_backend import envs

HERE = Path(__file__).parent
PLATFORM = "manylinux_2_28_x86_64"  # of the wheel we read; nothing compiled is used


class Unavailable(Exception):
    """The sources could not be had; the message says what was tried."""


def source_tree(version: str) -> Path:
    """The folder to put on the path; downloads once, safely from several processes."""
    root = envs.load().cache_dir / "vllm-sources"
    root.mkdir(parents=True, exist_ok=True)
    tree = root / version
    with open(root / f"{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=root) as folder:
                wheel = _download(version, Path(folder))
                made = _unpack(wheel, version, Path(folder) / "tree")
                made.rename(tree)
    return tree


def _download(version: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise Unavailable("pip is not installed in this environment: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", "--platform", PLATFORM]
    command += ["--python-version", "3.12", f"vllm=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    wheels = list(folder.glob("vllm-*.whl"))
    if done.returncode or not wheels:
        raise Unavailable(
            f"the Python sources of vLLM {version} could not be downloaded, so the version matrix "
            f"was not checked. Command: {' '.join(command)}\n{done.stderr[-2000:]}"
        )
    return wheels[0]


def _unpack(wheel: Path, version: str, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [n for n in archive.namelist() if n.endswith(".py")])
    info = target / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    shutil.rmtree(target / f"vllm-{version}.data", ignore_errors=True)
    return target


def environment(*first: Path, **more: str) -> dict[str, str]:
    """Of a quiet single-threaded subprocess with ``first`` on its path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_BACKEND_", "VLLM_"))}
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(map(str, first)),
        "PYTHONSAFEPATH": "1",  # the checkout's folder `kernels` is not transformers' package
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def run_contract(version: str | None) -> dict:
    """The contract's result with this version's sources, None for the installed vLLM."""
    first = (HERE,) if version is None else (source_tree(version), HERE)
    done = subprocess.run(
        [sys.executable, str(HERE / "contract.py")],
        env=environment(*first, VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = done.stderr.strip().splitlines()[-1:]
    if done.returncode or not last or not last[0].startswith('{"version"'):
        raise AssertionError(f"the contract did not run to its end:\n{done.stderr[-4000:]}")
    return json.loads(last[0])
