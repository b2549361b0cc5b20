# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer beside the engine's: same inputs, one process, checked, then timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from moe_backend import reference
from moe_backend.measure import peers, timing
from moe_backend.measure.roofline import Roofline, experts_roofline
from moe_backend.types import BLOCK, FP8, Activation, ExpertWeights, MoEShape, Routing, cdiv

SHAPES = {
    "deepseek-v3-tp8": MoEShape(256, 256, 7168, 256, 8),
    "qwen3-30b-a3b": MoEShape(128, 128, 2048, 768, 8),
    "deepseek-v3-ep8": MoEShape(32, 32, 7168, 2048, 1, ep_size=8),
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384)
LOADS = ("uniform", "zipf")
# Ours against the oracle that rounds where we round; peers round elsewhere (measured 1.8e-2, and
# 2.2e-2 at one token).
TOLERANCE = {"ours": 4e-3, "peer": 3e-2}
_CHECKED_TOKENS = 256  # the oracle is slow: it sees this many of the tokens


@dataclass(frozen=True)
class Case:
    """One shape and number of tokens; ``sets`` of inputs, so that weights do not stay in L2."""

    weights: ExpertWeights
    inputs: list[tuple[torch.Tensor, Routing]]
    roofline: Roofline


@dataclass
class Row:
    shape: str
    tokens: int
    load: str
    roofline_us: float
    us: dict[str, dict[str, float]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def ratio(self, peer: str, ours: str = "ours") -> float | None:
        if ours in self.us and peer in self.us:
            return self.us[peer]["p50"] / self.us[ours]["p50"]
        return None


def random_weights(shape: MoEShape, seed: int = 0) -> ExpertWeights:
    """Weights whose layer neither vanishes nor overflows; made on the GPU, expert by expert."""
    generator = torch.Generator("cuda").manual_seed(seed)
    experts, hidden, inter = shape.num_local_experts, shape.hidden, shape.intermediate

    def matrix(rows: int, columns: int) -> torch.Tensor:
        out = torch.empty(experts, rows, columns, dtype=FP8, device="cuda")
        for e in range(experts):
            out[e] = torch.randn(rows, columns, generator=generator, device="cuda").to(FP8)
        return out

    def scale(rows: int, columns: int, fan_in: int) -> torch.Tensor:
        random = torch.rand(experts, rows, columns, generator=generator, device="cuda")
        return (random + 0.5) * fan_in**-0.5

    blocks_h, blocks_i = cdiv(hidden, BLOCK), cdiv(inter, BLOCK)
    return ExpertWeights(
        matrix(2 * inter, hidden),
        scale(2 * blocks_i, blocks_h, hidden),
        matrix(hidden, inter),
        scale(blocks_h, blocks_i, inter),
    )


def random_routing(shape: MoEShape, tokens: int, load: str, seed: int) -> Routing:
    """Distinct experts for every token; Zipf (s=1) over a random order of the experts."""
    generator = torch.Generator("cuda").manual_seed(seed)
    experts = shape.num_local_experts
    popularity = torch.ones(experts, device="cuda")
    if load == "zipf":
        order = torch.randperm(experts, generator=generator, device="cuda")
        popularity[order] = 1.0 / torch.arange(1, experts + 1, device="cuda")
    gumbel = -torch.empty(tokens, experts, device="cuda").exponential_(generator=generator).log()
    ids = (popularity.log() + gumbel).topk(shape.top_k).indices.int()
    weights = torch.rand(tokens, shape.top_k, generator=generator, device="cuda") + 0.1
    return Routing(ids, weights / weights.sum(-1, keepdim=True), experts)


def make_case(
    shape: MoEShape, tokens: int, load: str, weights: ExpertWeights, seed: int = 0
) -> Case:
    sets = 8 if tokens <= 64 else 2
    inputs = []
    live = []
    for i in range(sets):
        generator = torch.Generator("cuda").manual_seed(seed + i)
        x = torch.randn(tokens, shape.hidden, generator=generator, device="cuda").bfloat16()
        routing = random_routing(shape, tokens, load, seed + i)
        inputs.append((x, routing))
        live.append(routing.topk_ids.unique().numel())
    floor = experts_roofline(shape, tokens * shape.top_k, round(sum(live) / sets))
    return Case(weights, inputs, floor)


def relative_error(out: torch.Tensor, case: Case, index: int = 0) -> float:
    """Relative L2 of some of the tokens against the oracle; NaN anywhere gives NaN."""
    x, routing = case.inputs[index]
    some = torch.randperm(x.shape[0], device="cuda")[:_CHECKED_TOKENS]
    want = reference.fused_experts(
        x[some], routing.topk_ids[some], routing.topk_weights[some], case.weights
    ).float()
    error = (out[some].float() - want).norm() / want.norm()
    return error.item() if out.isfinite().all() else float("nan")


Implementation = Callable[[torch.Tensor, Routing], torch.Tensor]


def measure(row: Row, name: str, call: Implementation, case: Case, *, replays: int = 20) -> None:
    """Check, then time; a wrong or failing implementation gets no time."""
    limit = TOLERANCE["peer" if name in peers.PEERS else "ours"]
    try:
        x, routing = case.inputs[0]
        call(x, routing)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call(x, routing)
        torch.cuda.synchronize()
        row.peak_mib[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        row.error[name] = relative_error(out, case)
        if not row.error[name] <= limit:
            row.failed[name] = f"relative error {row.error[name]:.2e} exceeds {limit:.0e}"
            return
        calls = [lambda x=x, routing=routing: call(x, routing) for x, routing in case.inputs]
        row.us[name] = timing.time_calls(calls, replays=replays).as_dict()
    except Exception as error:
        row.failed[name] = f"{type(error).__name__}: {error}"[:500]
        torch.cuda.synchronize()


def ours(weights: ExpertWeights, config=None) -> Implementation:
    from moe_backend import execution

    def call(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        args = (x, routing.topk_ids, routing.topk_weights, weights, Activation(), None, None)
        return execution.experts(*args) if config is None else execution.run_experts(*args, config)

    return call


def run(
    shapes: Iterable[str], tokens: Iterable[int], loads: Iterable[str], *, with_peers: bool = True
) -> Iterator[Row]:
    """One row per shape, load and number of tokens, as each is done."""
    from moe_backend.tuning import selection

    with peers.engine_context() if with_peers else contextlib.nullcontext():
        for shape_name in shapes:
            shape = SHAPES[shape_name]
            weights = random_weights(shape)
            for load in loads:
                for count in tokens:
                    case = make_case(shape, count, load, weights)
                    row = Row(shape_name, count, load, round(case.roofline.us, 1))
                    chosen = selection.select(shape, count, torch.device("cuda"))
                    row.config = {"source": chosen.source, **asdict(chosen.config)}
                    measure(row, "ours", ours(weights), case)
                    for name in peers.PEERS if with_peers else ():
                        call = peers.make(name, weights, case.inputs[0][1], count)
                        measure(row, name, call, case)
                    yield row
                    del case
            del weights
            torch.cuda.empty_cache()
