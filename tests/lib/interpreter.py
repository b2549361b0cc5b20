# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on the CPU: to be enabled before anything imports triton.

Only this process interprets. Servers and compilers that tests start do not inherit it.
"""

import os


def enable() -> bool:
    """Switches Triton to its interpreter where there is no GPU; says whether it did."""
    import torch

    if torch.cuda.is_available():
        return False
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # triton's own library decides when it is imported
    import triton

    triton.knobs.runtime.interpret = True  # also sets the variable, hence before it is removed
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    import interpreter_casts

    interpreter_casts.install()
    return True
