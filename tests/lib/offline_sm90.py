# SPDX-License-Identifier: Apache-2.0
"""Compile for an H200 without one: a Triton driver that compiles what is launched and runs nothing.

    with offline_sm90.compiling() as kernels:
        execution.run_experts(...)          # CPU tensors
    kernels[0].registers, .spills, .shared, .asm["ptx"]

Must be used in a process whose Triton is not in interpreter mode.
"""

import contextlib
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Compiled:
    name: str
    registers: int
    spills: int  # bytes of stack frame
    shared: int
    asm: dict = field(repr=False)


class _Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, kernel, shared, device):
        return 0, 0, 0, 0, 1024  # module, function, registers, spills, threads


def _driver():
    from triton.backends.compiler import GPUTarget

    class Driver:
        utils = _Utils()
        launcher_cls = staticmethod(lambda src, metadata: lambda *args: None)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    return Driver()


def resources(kernel) -> Compiled:
    """Registers, stack and shared memory of a compiled kernel, read off its machine code."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return Compiled(kernel.name, int(found[1]), int(found[2]), kernel.metadata.shared, kernel.asm)


@contextlib.contextmanager
def compiling():
    from triton import knobs
    from triton.runtime.driver import driver

    if knobs.runtime.interpret:
        raise RuntimeError("Triton is in interpreter mode: compile in a process of its own")
    from triton.runtime.jit import JITFunction

    seen: list = []
    kernels: list[Compiled] = []
    before, run = driver._active, JITFunction.run

    def run_and_keep(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs)
        if kernel is not None and all(k is not kernel for k in seen):
            seen.append(kernel)
            kernels.append(resources(kernel))
        return kernel

    driver.set_active(_driver())
    JITFunction.run = run_and_keep
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = before
