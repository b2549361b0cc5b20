# SPDX-License-Identifier: Apache-2.0
"""Zeroed device counters for kernels whose last block finishes the work of all.

A line of counters is zero when a launch begins, and the launch leaves it zero, so no memset is
needed. Launches that could run at the same time never share a line:

- eager launches on one stream are ordered and share that stream's line;
- so do the launches of one capture on one stream: a graph cannot overlap itself. A graph keeps its
  lines for good, for it may be replayed beside any other;
- where a capture has no number (no CUDA driver to ask), each of its launches gets a line.

When the lines are used up, a captured memset takes over.
"""

import ctypes
from functools import cache

import torch

ARENA_BYTES = 8 << 20  # 4,096 captures for 256 experts


class _Arena:
    """Lines of one width on one device, handed out once each."""

    def __init__(self, device: torch.device, width: int):
        self.lines = torch.zeros(
            ARENA_BYTES // (4 * width), width, dtype=torch.int32, device=device
        )
        self.used = 0
        torch.cuda.synchronize(device)  # once: every stream must see the zeros

    def take(self) -> torch.Tensor | None:
        if self.used == self.lines.shape[0]:
            return None
        self.used += 1
        return self.lines[self.used - 1]


_arenas: dict[tuple[torch.device, int], _Arena] = {}
_stream_lines: dict[tuple, torch.Tensor] = {}


@cache
def _capture_info():
    """The driver's cuStreamGetCaptureInfo, which torch does not pass on, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def capture_number(stream: int) -> int | None:
    """The number, unique in the process, of the capture that a stream takes part in."""
    ask = _capture_info()
    if ask is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    handle = ctypes.c_void_p(stream)
    error = ask(handle, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if error == 0 and status.value == 1 else None


def zeroed_line(device: torch.device, size: int) -> torch.Tensor:
    """An int32 line of at least ``size`` zeros that the launch must leave zero."""
    width = 1 << max(5, (size - 1).bit_length())
    if device.type != "cuda":
        return torch.zeros(width, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return _captured_line(device, width, stream)
    key = (device, width, stream)
    line = _stream_lines.get(key)
    if line is None:
        if (device, width) not in _arenas:
            _arenas[device, width] = _Arena(device, width)
        line = _arenas[device, width].take()
        if line is None:
            line = torch.zeros(width, dtype=torch.int32, device=device)
        _stream_lines[key] = line
    return line


def _captured_line(device: torch.device, width: int, stream: int) -> torch.Tensor:
    number = capture_number(stream)
    key = (device, width, stream, number)
    line = None if number is None else _stream_lines.get(key)
    if line is None:
        arena = _arenas.get((device, width))
        line = arena.take() if arena else None
        if line is None:
            return torch.zeros(width, dtype=torch.int32, device=device)
        if number is not None:
            _stream_lines[key] = line
    return line


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device; outside CUDA a number that keeps grids small."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def overlaps(device: torch.device, programs: int) -> bool:
    """Whether a launch should start while the one before it ends (programmatic dependent launch).

    It hides up to 1 us, but large grids of short programs ran slower by it: 16,384 tokens over 128
    experts took 21.4 us instead of 12.9.
    """
    return device.type == "cuda" and programs <= 2048
