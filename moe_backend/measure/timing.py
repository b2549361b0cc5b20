# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU: many calls in one CUDA graph, percentiles over its replays.

A replay costs some 8 µs whatever it holds, so short calls are repeated inside the graph and the
sum divided. Callers hand over several calls with different inputs so that nothing stays in L2
that would not in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

_MOST_CALLS = 800  # in one graph


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


class Captured:
    """Calls in a CUDA graph, repeated until it lasts about ``graph_us``, so that what a replay
    costs by itself is shared by many."""

    def __init__(self, calls: Sequence[Callable[[], object]], graph_us: float = 400.0):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
            once = min(_eager_us(calls[0]) for _ in range(3))
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        rounds = max(1, min(_MOST_CALLS // len(calls), int(graph_us / max(once * len(calls), 1.0))))
        self.calls = rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(rounds):
                for call in calls:
                    call()

    def sample(self, replays: int) -> list[float]:
        """Microseconds of one call, from each of some replays."""
        return [_eager_us(self.graph.replay) / self.calls for _ in range(replays)]


def time_calls(
    calls: Sequence[Callable[[], object]], *, replays: int = 20, graph_us: float = 400.0
) -> Timing:
    """Time of one call, averaged over ``calls``, captured together and replayed.

    Args:
        calls: the same work on different inputs; each must be capturable.
        replays: timed replays, after three that are not.
        graph_us: repeat the calls in the graph until it lasts about this long.
    """
    captured = Captured(calls, graph_us)
    captured.sample(3)
    return percentiles(captured.sample(replays))


def alternate(captured: Mapping[str, Captured], *, rounds: int, replays: int) -> dict[str, Timing]:
    """Times of several implementations whose replays take turns, so that clocks and neighbours
    that change meanwhile change all of them. A first round is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for turn in range(rounds + 1):
        for name, graph in captured.items():
            taken = graph.sample(replays)
            if turn:
                samples[name] += taken
    return {name: percentiles(taken) for name, taken in samples.items()}


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes per second of a device copy, read plus written; eager, as a graph's copy is slower."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_eager_us(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.numel() / best * 1e6
