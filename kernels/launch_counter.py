# SPDX-License-Identifier: Apache-2.0
"""Zeroed device counters for kernels whose last block finishes the work of all.

A line of counters is zero when a launch begins, and the launch leaves it zero, so no memset is
needed. Launches that could run at the same time never share a line:

- eager launches on one stream are ordered and share that stream's line;
- every captured launch gets a line of its own for good. A graph cannot overlap itself, so its
  replays are ordered too. When the lines are used up, a captured memset takes over.
"""

from functools import cache

import torch

LINES_PER_ARENA = 1024
_arenas: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
_stream_lines: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def zeroed_line(device: torch.device, size: int) -> torch.Tensor:
    """An int32 line of at least ``size`` zeros that the launch must leave zero."""
    width = 1 << max(5, (size - 1).bit_length())
    if device.type != "cuda":
        return torch.zeros(width, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        lines = _arenas.get((device, width))
        return lines.pop() if lines else torch.zeros(width, dtype=torch.int32, device=device)
    key = (device, width, torch.cuda.current_stream(device).cuda_stream)
    line = _stream_lines.get(key)
    if line is None:
        if (device, width) not in _arenas:
            arena = torch.zeros(LINES_PER_ARENA, width, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # once per device: other streams must see the zeros
            _arenas[device, width] = list(arena.unbind())
        lines = _arenas[device, width]
        line = lines.pop() if lines else torch.zeros(width, dtype=torch.int32, device=device)
        _stream_lines[key] = line
    return line


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device; outside CUDA a number that keeps grids small."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
