# SPDX-License-Identifier: Apache-2.0
"""Search kernel configurations on this device: check, time, keep the fastest.

The up and the down projection are searched one after the other for each alignment they share; what
is timed is always the whole layer, so that a choice pays for what it does to its neighbours. Each
size is saved as soon as it is done: an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from moe_backend.measure import bench_experts as bench
from moe_backend.tuning import schema, space
from moe_backend.types import KernelConfig, MoEShape

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    shape: MoEShape
    tokens: int
    load: str
    config: KernelConfig
    us: float
    tried: int
    failed: dict[str, str]


def shape_of_model(config: dict, tp: int, ep: int) -> MoEShape:
    """The layer that one rank sees, from a checkpoint's config.json; raises ValueError."""

    def first(*names: str) -> int:
        for name in names:
            if config.get(name):
                return int(config[name])
        raise ValueError(f"config.json: none of {', '.join(names)}; is it a mixture of experts?")

    experts = first("n_routed_experts", "num_experts", "num_local_experts")
    inter = first("moe_intermediate_size", "intermediate_size")
    if experts % ep:
        raise ValueError(f"--ep {ep} does not divide {experts} experts")
    if ep == 1 and inter % tp:
        raise ValueError(f"--tp {tp} does not divide the experts' intermediate size {inter}")
    inter = inter if ep > 1 else inter // tp
    top_k = first("num_experts_per_tok", "top_k")
    return MoEShape(experts, experts // ep, first("hidden_size"), inter, top_k, ep_size=ep)


def popularity_of_trace(path: Path, experts: int) -> list[float]:
    """Expert loads from a JSON list (or lines) of counts, one per expert."""
    text = path.read_text()
    try:
        counts = json.loads(text)
    except ValueError:
        counts = text.split()
    try:
        values = [float(c) for c in counts]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected one number per expert ({error})") from None
    if len(values) != experts or min(values) < 0 or not sum(values):
        raise ValueError(f"{path}: expected {experts} counts, found {len(values)}")
    return values


def _compile(shape: MoEShape, tokens: int, configs: Sequence[KernelConfig]) -> None:
    """In a process of its own: run once with few experts, which fills Triton's cache."""
    small = MoEShape(4, 4, shape.hidden, shape.intermediate, min(shape.top_k, 4))
    weights = bench.random_weights(small)
    case = bench.make_case(small, min(tokens, 1024), "uniform", weights)
    for config in configs:
        try:
            bench.ours(weights, config)(*case.inputs[0])
            torch.cuda.synchronize()
        except Exception:  # the search itself reports it, with the layer's name
            torch.cuda.synchronize()


def candidates(shape: MoEShape, tokens: int) -> list[KernelConfig]:
    """Enough of the search space to compile all of its kernels."""
    found = list(space.direct(shape, tokens))
    for group in space.groups(shape, tokens):
        if group.ups and group.downs:
            found += [group.config(up, group.downs[-1]) for up in group.ups]
            found += [group.config(group.ups[0], down) for down in group.downs]
    return found


def compile_ahead(shape: MoEShape, sizes: Sequence[int], workers: int = 12) -> int:
    """Compile what the search will run, in parallel; returns how many configurations."""
    jobs = {c: count for count in sizes for c in candidates(shape, count)}
    shares = [[c for i, c in enumerate(jobs) if i % workers == w] for w in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile, shape, max(sizes), s) for s in shares if s]:
            done.result()
    return len(jobs)


class Search:
    """One shape, number of tokens and load."""

    def __init__(self, case: bench.Case, shape: MoEShape, tokens: int, load: str, say: Say):
        self.case, self.shape, self.tokens, self.load, self.say = case, shape, tokens, load, say
        self.times: dict[KernelConfig, float] = {}
        self.failed: dict[str, str] = {}

    def time(self, config: KernelConfig, replays: int = 10) -> float:
        """Microseconds of the layer; infinite for one that is wrong or fails."""
        if config not in self.times:
            row = bench.Row("", self.tokens, self.load, self.case.roofline.us)
            call = bench.ours(self.case.weights, config, self.case.expert_map)
            bench.measure(row, "ours", call, self.case, replays=replays)
            self.times[config] = row.us["ours"]["p50"] if "ours" in row.us else float("inf")
            if "ours" in row.failed:
                self.failed[str(config)] = row.failed["ours"]
            self.say(f"{len(self.times)} tried, best {min(self.times.values()):.1f} µs")
        return self.times[config]

    def run(self) -> Found:
        for config in space.direct(self.shape, self.tokens):
            self.time(config)
        for group in space.groups(self.shape, self.tokens):
            if not group.ups or not group.downs:
                continue
            down = group.downs[0]
            up = min(group.ups, key=lambda u: self.time(group.config(u, down)))
            for down in group.downs[1:]:
                self.time(group.config(up, down))
        best = min(self.times, key=self.times.__getitem__)
        if self.times[best] == float("inf"):
            raise RuntimeError(f"no configuration is right: {next(iter(self.failed.values()))}")
        finalists = sorted(self.times, key=self.times.__getitem__)[:3]
        again = {c: self._again(c) for c in finalists}
        best = min(again, key=again.__getitem__)
        return Found(
            self.shape, self.tokens, self.load, best, again[best], len(self.times), self.failed
        )

    def _again(self, config: KernelConfig) -> float:
        first = self.times.pop(config)
        self.times[config] = min(first, self.time(config, replays=30))
        return self.times[config]


def tune(
    shape: MoEShape,
    tokens: Sequence[int],
    load: str,
    path: Path,
    *,
    popularity: Sequence[float] | None = None,
    force: bool = False,
    commit: str = "",
    say: Say = lambda text: None,
) -> Iterator[Found]:
    """Search every size that ``path`` does not hold yet and save each at once."""
    import triton

    device = torch.cuda.get_device_name()
    entries = list(schema.load(path, device).entries) if path.exists() else []
    stamp = {"triton": triton.__version__, "torch": torch.__version__, "commit": commit}

    def same(e: schema.Entry, count: int) -> bool:
        return (e.shape.moe_shape(), e.tokens, e.load) == (shape, count, load)

    todo = [t for t in tokens if force or not any(same(e, t) for e in entries)]
    if not todo:
        return
    say(f"compiling for {len(todo)} sizes")
    say(f"compiled {compile_ahead(shape, todo)} configurations")
    weights = bench.random_weights(shape)
    for count in todo:
        case = bench.make_case(shape, count, load, weights, popularity=popularity)
        found = Search(case, shape, count, load, say).run()
        entry = schema.entry(shape, count, load, found.config, found.us, **stamp)
        entries = [e for e in entries if not same(e, count)] + [entry]
        entries.sort(key=lambda e: (str(e.shape), e.load, e.tokens))
        path.parent.mkdir(parents=True, exist_ok=True)
        schema.save(path, schema.ConfigFile(device=device, entries=entries))
        yield found
        del case
