# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU: many calls in one CUDA graph, percentiles over its replays.

A replay costs some 8 µs whatever it holds, so short calls are repeated inside the graph and the
sum divided. Callers hand over several calls with different inputs so that nothing stays in L2
that would not in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    p20: float
    p50: float
    p80: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


def percentiles(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("samples: expected at least one, found none")
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * p))] for p in (0.2, 0.5, 0.8)]
    return Timing(*at)


def _eager_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_calls(
    calls: Sequence[Callable[[], object]], *, replays: int = 20, graph_us: float = 400.0
) -> Timing:
    """Time of one call, averaged over ``calls``, captured together and replayed.

    Args:
        calls: the same work on different inputs; each must be capturable.
        replays: timed replays, after three that are not.
        graph_us: repeat the calls in the graph until it lasts about this long.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
        once = min(_eager_us(calls[0]) for _ in range(3))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rounds = max(1, min(50, int(graph_us / max(once * len(calls), 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    samples = [_eager_us(graph.replay) / (rounds * len(calls)) for _ in range(replays)]
    del graph
    return percentiles(samples)


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes per second of a device copy, read plus written; eager, as a graph's copy is slower."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_eager_us(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.numel() / best * 1e6
