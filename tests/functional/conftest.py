# SPDX-License-Identifier: Apache-2.0
"""The functional face runs on both executions: the torch reference and our kernels.

Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU.
"""

import interpreter
import pytest

INTERPRETED = interpreter.enable()


@pytest.fixture(params=["reference", "kernels"])
def device(request, monkeypatch) -> str:
    from moe_backend import ops_training

    if INTERPRETED:
        monkeypatch.setattr(ops_training, "on_kernels", lambda t: request.param == "kernels")
        return "cpu"
    return "cpu" if request.param == "reference" else "cuda"
