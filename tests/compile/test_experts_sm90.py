# SPDX-License-Identifier: Apache-2.0
"""All that serving may launch compiles for sm_90a, fits, and keeps accumulators in registers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_MEMORY = 232448
SCRIPT = Path(__file__).parent.parent / "lib" / "compile_experts.py"


@pytest.mark.parametrize("what", ["tuned", "paths"])
def test_compiles_for_sm90(what):
    done = subprocess.run(
        [sys.executable, SCRIPT, what], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert kernels or what == "tuned"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        if kernel["kernel"] == "_sm90_kernel":
            assert kernel["stack"] <= 16 and kernel["registers"] <= 168, kernel
