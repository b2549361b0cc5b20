# SPDX-License-Identifier: Apache-2.0
"""Time to first token under load, side by side: real servers, load from ``vllm bench serve``.

Both sides get the same prompts (same seeds) at the same arrival times. Their turns alternate and
the order is swapped from turn to turn (A B, B A, …), so that a machine that becomes slower or
faster meanwhile does not favour one of them. Warm-up requests are not counted, and the prefix
cache is off, or the second turn would find its prompts there.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_backend.measure.server import (
    GATEWAY_ARGS,
    PLUGIN_ARGS,
    POLL_S,
    OnStage,
    ServerError,
    VllmServer,
    without_plugin,
)
from moe_backend.measure.vllm_bench import PERCENTILES, Generator, Load

GRACE_S = 5.0  # nothing is in flight when a server is stopped, or nobody waits for it any more
SERVER_ARGS = ("--no-enable-prefix-caching",)
LATENCIES = ("ttft_ms", "tpot_ms")
# Whom the report belongs to, what it does, how far it is; a total of None is not known.
Report = Callable[[str, str, float, "float | None"], None]


@dataclass(frozen=True)
class Side:
    """One of the two servers that are compared."""

    name: str
    model: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One load on one side; times in milliseconds, one per request."""

    side: str
    load: str  # its name
    round: int
    ttft_ms: list[float]
    tpot_ms: list[float]
    output_tokens_per_s: float
    requests_per_s: float


@dataclass(frozen=True)
class Plan:
    """What is measured. ``together`` keeps both servers up; otherwise one runs at a time.

    Even together only one of them is under load at any time. After ``budget_s`` seconds, counted
    from the start of the first server, no turn begins that would not end in time.
    """

    sides: tuple[Side, ...]
    loads: tuple[Load, ...]
    rounds: int = 3
    together: bool = True
    seed: int = 0
    budget_s: float | None = None

    def turns(self) -> list[tuple[Side, Load, int]]:
        """Every turn in its order; servers that take turns change as seldom as can be."""
        turns = []
        for number in range(self.rounds):
            if self.together:
                for i, load in enumerate(self.loads):
                    turns += [(side, load, number) for side in self._order(number + i)]
            else:
                turns += [(s, load, number) for s in self._order(number) for load in self.loads]
        return turns

    def _order(self, turn: int) -> tuple[Side, ...]:
        return self.sides if turn % 2 == 0 else self.sides[::-1]

    def seed_of(self, load: Load, number: int) -> int:
        """The same for both sides, another one for each turn."""
        return self.seed + number * len(self.loads) + self.loads.index(load)


class ServerPool:
    """The servers of a plan: started when first needed, all ended on exit."""

    def __init__(self, plan: Plan, report: Report, logs: Path | None = None) -> None:
        self._plan, self._report, self._logs = plan, report, logs
        self._stack = contextlib.ExitStack()
        self._running: dict[str, VllmServer] = {}
        self.started_in: dict[str, float] = {}
        self.status: dict[str, Any] = {}  # what /moe/status said once the server was ready

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *details: Any) -> None:
        self._end()

    def _end(self) -> None:
        for server in self._running.values():
            server.ask_to_stop()
        self._stack.close()
        self._running.clear()

    def get(self, side: Side) -> VllmServer:
        if side.name not in self._running:
            if not self._plan.together:
                self._end()
            wanted = self._plan.sides if self._plan.together else (side,)
            # Started at the same time: a start is mostly one busy core and much waiting.
            for one in wanted:
                self._running[one.name] = self._start(one)
            self._wait(wanted)
        server = self._running[side.name]
        server.check()
        return server

    def _start(self, side: Side) -> VllmServer:
        log = self._logs / f"server-{side.name}.log" if self._logs else None
        args = [*SERVER_ARGS, *side.args]
        told = self._stage_of(side)
        server = VllmServer(side.model, args, env=side.env, log=log, on_stage=told, grace=GRACE_S)
        self._stack.callback(server.stop)
        return server.start()

    def _stage_of(self, side: Side) -> OnStage:
        return lambda stage, seconds: self._report(f"{side.name} server", stage, seconds, None)

    def _wait(self, sides: Sequence[Side]) -> None:
        starting = list(sides)
        while starting:
            for side in list(starting):
                try:
                    ready = self._running[side.name].advance()
                except ServerError as error:
                    raise ServerError(f"{side.name}: {error}") from None
                if ready:
                    starting.remove(side)
                    self.started_in[side.name] = self._running[side.name].started_in or 0.0
                    self._report(f"{side.name} server", "ready", 1, 1)
                    if set(GATEWAY_ARGS) <= set(side.args):
                        self.status[side.name] = self._running[side.name].get_json("/moe/status")
            time.sleep(POLL_S)


def measure(plan: Plan, pool: ServerPool, report: Report) -> Iterator[Run]:
    """The runs of the plan as they are done. Raises ServerError or LoadError."""
    began, turns = time.monotonic(), plan.turns()
    took: dict[str, float] = {}  # the longest turn of each load
    with Generator() as generator:  # imports while the servers start
        for done, (side, load, number) in enumerate(turns):
            expected = took.get(load.name, max(took.values(), default=0.0))
            if plan.together and side == plan._order(number + plan.loads.index(load))[0]:
                expected *= len(plan.sides)  # a turn without its counterpart tells nothing
            if plan.budget_s is not None and time.monotonic() - began + expected > plan.budget_s:
                report("load", f"out of time after {done} of {len(turns)} runs", 1, 1)
                return
            server, start = pool.get(side), time.monotonic()
            text = f"{side.name}, {load.name}, round {number + 1} of {plan.rounds}"
            report("load", text, done, len(turns))

            def on_progress(finished: int, total: int, done: int = done, text: str = text) -> None:
                report("load", text, done + finished / total, len(turns))

            seed = plan.seed_of(load, number)
            result = generator.run(server.base_url, side.model, load, seed, on_progress)
            took[load.name] = max(took.get(load.name, 0.0), time.monotonic() - start)
            yield _run(side, load, number, result)
    report("load", f"{len(turns)} runs", len(turns), len(turns))


def _run(side: Side, load: Load, number: int, result: dict[str, Any]) -> Run:
    per_token = [
        1e3 * sum(gaps) / (tokens - 1)
        for gaps, tokens in zip(result["itls"], result["output_lens"], strict=True)
        if tokens > 1
    ]
    return Run(
        side=side.name,
        load=load.name,
        round=number,
        ttft_ms=[1e3 * t for t in result["ttfts"]],
        tpot_ms=per_token,
        output_tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy and vLLM's generator do."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _figures(runs: Sequence[Run]) -> dict[str, float]:
    """The figures of some runs of one side under one load, over all their requests."""
    found = {}
    for name in LATENCIES:
        values = [v for run in runs for v in getattr(run, name)]
        for percent in PERCENTILES:
            found[f"{name[:4]}_p{percent}_ms"] = percentile(values, percent)
    for name in ("output_tokens_per_s", "requests_per_s"):
        found[name] = statistics.median(getattr(run, name) for run in runs)
    return found


def paired(plan: Plan, runs: Sequence[Run]) -> list[Run]:
    """The runs whose counterparts on every side were done too."""
    sides: dict[tuple[str, int], set[str]] = {}
    for run in runs:
        sides.setdefault((run.load, run.round), set()).add(run.side)
    return [run for run in runs if len(sides[run.load, run.round]) == len(plan.sides)]


def summarise(plan: Plan, runs: Sequence[Run]) -> dict[str, Any]:
    """Figures for each side and load, and B over A with its spread over the rounds.

    Turns without a counterpart are left out, and loads that were not reached are listed.
    """
    runs = paired(plan, runs)
    reached = {run.load for run in runs}
    loads = [load for load in plan.loads if load.name in reached]
    results, ratios = [], []
    for load in loads:
        of_load = [run for run in runs if run.load == load.name]
        what = {"load": load.name, "rate": load.rate, "input_len": load.input_len}
        for side in plan.sides:
            mine = [run for run in of_load if run.side == side.name]
            count = sum(len(run.ttft_ms) for run in mine)
            results.append({"side": side.name, **what, "requests": count, **_figures(mine)})
        if len(plan.sides) == 2:
            rounds = {run.round for run in of_load}
            ratios.append({**what, "rounds": len(rounds), **_ratios(plan, of_load)})
    return {
        "sides": [asdict(side) for side in plan.sides],
        "loads": [asdict(load) | {"name": load.name} for load in loads],
        "not_reached": [load.name for load in plan.loads if load.name not in reached],
        "rounds": plan.rounds,
        "together": plan.together,
        "results": results,
        "ratios": ratios,
        "runs": [asdict(run) for run in runs],
    }


def _ratios(plan: Plan, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """For every figure: second side over first, round by round; the median, lowest and highest."""
    first, second = (side.name for side in plan.sides)
    by_round = []
    for number in sorted({run.round for run in runs}):
        a, b = (
            _figures([run for run in runs if run.round == number and run.side == name])
            for name in (first, second)
        )
        by_round.append({name: b[name] / a[name] for name in a})
    return {
        name: {
            "median": statistics.median(one[name] for one in by_round),
            "low": min(one[name] for one in by_round),
            "high": max(one[name] for one in by_round),
        }
        for name in by_round[0]
    }


def plugin_side(model: str, args: Sequence[str] = ()) -> Side:
    """The plugin, with the gateway that says which layers it took."""
    return Side("tma_fp8", model, (*PLUGIN_ARGS, *args, *GATEWAY_ARGS))


def default_side(model: str, args: Sequence[str] = ()) -> Side:
    """Stock vLLM: our plugin is not even loaded."""
    return Side("default", model, tuple(args), without_plugin())
