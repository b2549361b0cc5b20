# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the routing and permutation family compiles for sm_90a and keeps to registers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent.parent / "lib" / "compile_training.py"
FILES = ("router_topk", "router_dense", "router_scores", "aux_loss", "row_map", "permute",
         "unpermute", "sort_chunks", "balance_sums")  # fmt: skip
SPILLING = {"_router_topk_kernel"}  # 72 keys a lane and 36 maxima at 2,304 experts: no speed asked


def kernels_in(name: str) -> set[str]:
    text = (Path(__file__).parents[2] / "kernels" / f"{name}.py").read_text()
    return {line.split("(")[0][4:] for line in text.splitlines() if line.startswith("def _") and
            line.split("(")[0].endswith("_kernel")}  # fmt: skip


def test_compiles_for_sm90():
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = set().union(*map(kernels_in, FILES))
    assert {kernel["kernel"] for kernel in kernels} == expected
    for kernel in kernels:
        assert kernel["shared"] <= 232448, kernel
        assert kernel["stack"] == 0 or kernel["kernel"] in SPILLING, kernel


def test_router_compiles_once_whatever_the_number_of_tokens():
    """Serving asks for no histogram: 1, an odd number and a multiple of 16 share one kernel."""
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import offline_sm90
from moe_backend.kernels.router_topk import router_topk
from moe_backend.types import RouterSpec
with offline_sm90.compiling() as kernels:
    for tokens in (1, 2, 7, 16, 48, 301):
        router_topk(torch.randn(tokens, 256), RouterSpec(8, "sigmoid", 8, 4), want_counts=False)
print(len(kernels))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT.parent], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "1"
