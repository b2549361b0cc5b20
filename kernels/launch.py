# SPDX-License-Identifier: Apache-2.0
"""Launches repeated with other tensors, without what Triton works out anew every time.

Triton binds arguments, derives their specialisation, makes a key of it as text and asks the driver
about every pointer: several times what the launch itself takes. A ``Launch`` is one kernel with its
grid, numbers and constants. It goes through Triton once, which compiles, and from then on hands the
compiled kernel the addresses alone. Only aligned addresses may do so, for alignment is the one part
of the specialisation that differs between tensors of the same dtype.

    _launches = Launches()
    launch = _launches.get(key)          # key: every dtype, presence, number and constant
    if launch is None:
        launch = _launches.add(key, Launch(kernel, device, grid, numbers, constants))
    launch(*tensors)
"""

import torch
from triton import knobs
from triton.runtime.driver import driver

_MOST = 4096  # launches that are kept


class Launch:
    """``kernel[grid](*tensors, *numbers, **constants)``, the constants last in its signature."""

    __slots__ = ("kernel", "index", "grid", "numbers", "constants", "ready")

    def __init__(self, kernel, device: torch.device, grid: tuple, numbers: tuple, constants: dict):
        self.kernel, self.grid, self.numbers = kernel, (*grid, 1, 1)[:3], numbers
        self.constants = constants
        self.index = device.index  # None off CUDA
        self.ready = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self._on_device(tensors)
        return self._on_device(tensors)

    def _on_device(self, tensors: tuple) -> None:
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            if address is not None:
                bits |= address
        if (
            bits & 15 or knobs.runtime.launch_enter_hook.calls
        ):  # a profiler wants to see the tensors
            self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        elif self.ready is None:
            compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            if compiled is not None:  # the interpreter compiles nothing
                unused = len(self.kernel.params) - len(tensors) - len(self.numbers)
                rest = (*self.numbers, *[None] * unused)  # a constant's place is not read
                self.ready = (compiled.run, compiled.function, compiled.packed_metadata, rest)
        else:
            run, function, metadata, rest = self.ready
            active = driver.active
            stream = active.get_current_stream(self.index or 0)
            run(*self.grid, stream, function, metadata, None, None, None, *addresses, *rest)


class Launches(dict):
    """A bounded table of launches; a key must tell apart what is not the same launch."""

    def add(self, key, launch: Launch) -> Launch:
        if len(self) >= _MOST:
            self.clear()
        self[key] = launch
        return launch
