# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer beside the engine's: same inputs, one process, checked, then timed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from moe_backend import reference
from moe_backend.measure import peers, tensor_core, timing
from moe_backend.measure.roofline import Roofline, experts_roofline
from moe_backend.support import supports_shape
from moe_backend.types import (
    BLOCK,
    FP8,
    Activation,
    ExpertWeights,
    KernelConfig,
    MoEShape,
    Routing,
    cdiv,
)

SHAPES = {
    "deepseek-v3-tp8": MoEShape(256, 256, 7168, 256, 8),
    "qwen3-30b-a3b": MoEShape(128, 128, 2048, 768, 8),
    "deepseek-v3-ep8": MoEShape(32, 32, 7168, 2048, 1, ep_size=8),
}
# Layers that nobody tuned, across the range of sizes: --shapes others.
OTHERS = (
    "E1-H1024-I704-K1",
    "E8-H4096-I4096-K2",
    "E64-H2048-I1408-K6",
    "E64-H8192-I320-K8",
    "E128-H4096-I1536-K8",
    "E160-H5120-I192-K6",
    "E384-H7168-I256-K8",
    "E512-H2048-I512-K10",
    "E512-H1024-I64-K22",
)
_NAME = re.compile(r"E(\d+)-H(\d+)-I(\d+)-K(\d+)")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384)
LOADS = ("uniform", "zipf")
# Ours against the oracle that rounds where we round, inside the tensor cores too. Peers round
# elsewhere: they are held to the oracle that adds exactly (measured 1.8e-2, 2.4e-2 at one token).
TOLERANCE = {"ours": 4e-3, "peer": 3e-2}
_CHECKED_TOKENS = 256  # the oracle is slow: it sees this many of the tokens


def shape_of(name: str) -> MoEShape:
    """A layer by its name in SHAPES or by its sizes, ``E256-H7168-I256-K8``; raises ValueError."""
    if name in SHAPES:
        return SHAPES[name]
    if not (sizes := _NAME.fullmatch(name)):
        known = ", ".join(SHAPES)
        raise ValueError(f"expected {known} or sizes as E256-H7168-I256-K8, found {name!r}")
    experts, hidden, inter, top_k = map(int, sizes.groups())
    shape = MoEShape(experts, experts, hidden, inter, top_k)
    if not (support := supports_shape(shape)):
        raise ValueError(f"{name}: {support.reason}")
    return shape


@dataclass(frozen=True)
class Case:
    """One shape and number of tokens; ``sets`` of inputs, so that weights do not stay in L2."""

    weights: ExpertWeights
    inputs: list[tuple[torch.Tensor, Routing]]
    roofline: Roofline
    expert_map: torch.Tensor | None = None

    @cached_property
    def some(self) -> torch.Tensor:
        """Which tokens of the first set are checked."""
        return torch.randperm(self.inputs[0][0].shape[0], device="cuda")[:_CHECKED_TOKENS]

    def _oracle(self, layer) -> torch.Tensor:
        x, routing = (self.inputs[0][0], self.inputs[0][1])
        ids, weights = routing.topk_ids[self.some], routing.topk_weights[self.some]
        args = (x[self.some], ids, weights, self.weights)
        return layer(*args, expert_map=self.expert_map).float()

    @cached_property
    def as_tensor_cores(self) -> torch.Tensor:
        """What those tokens should give with the tensor cores' sums."""
        return self._oracle(tensor_core.fused_experts)

    @cached_property
    def with_exact_sums(self) -> torch.Tensor:
        return self._oracle(reference.fused_experts)


@dataclass
class Row:
    shape: str
    tokens: int
    load: str
    roofline_us: float
    flops: int = 0
    weight_bytes: int = 0
    us: dict[str, dict[str, float]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    error_exact_sums: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def ratio(self, peer: str) -> float | None:
        """How many times faster than ``peer``."""
        if "ours" in self.us and peer in self.us:
            return self.us[peer]["p50"] / self.us["ours"]["p50"]
        return None

    def as_dict(self) -> dict[str, Any]:
        ratios = {p: round(r, 3) for p in peers.PEERS if (r := self.ratio(p)) is not None}
        return {**asdict(self), "times_faster_than": ratios}


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


def random_routing(
    shape: MoEShape, tokens: int, load: str, seed: int, popularity: Sequence[float] | None = None
) -> Routing:
    """Distinct experts for every token: all alike, by Zipf (s=1) over a random order, or by
    ``popularity``. Ids are global; under expert parallelism this rank is the first."""
    generator = torch.Generator("cuda").manual_seed(seed)
    experts = shape.num_experts
    likely = torch.ones(experts, device="cuda")
    if popularity is not None:
        likely = torch.tensor(popularity, device="cuda") + 1e-9
    elif load == "zipf":
        order = torch.randperm(experts, generator=generator, device="cuda")
        likely[order] = 1.0 / torch.arange(1, experts + 1, device="cuda")
    gumbel = -torch.empty(tokens, experts, device="cuda").exponential_(generator=generator).log()
    ids = (likely.log() + gumbel).topk(shape.top_k).indices.int()
    weights = torch.rand(tokens, shape.top_k, generator=generator, device="cuda") + 0.1
    return Routing(ids, weights / weights.sum(-1, keepdim=True), experts)


def expert_map_of(shape: MoEShape) -> torch.Tensor | None:
    """Map of the first rank where experts are spread over ranks."""
    if shape.num_experts == shape.num_local_experts:
        return None
    ids = torch.arange(shape.num_experts, dtype=torch.int32, device="cuda")
    return torch.where(ids < shape.num_local_experts, ids, -1)


def make_case(
    shape: MoEShape,
    tokens: int,
    load: str,
    weights: ExpertWeights,
    seed: int = 0,
    popularity: Sequence[float] | None = None,
) -> Case:
    sets = 8 if tokens <= 64 else 2
    inputs = []
    routes, live = 0, 0
    for i in range(sets):
        generator = torch.Generator("cuda").manual_seed(seed + i)
        x = torch.randn(tokens, shape.hidden, generator=generator, device="cuda").bfloat16()
        routing = random_routing(shape, tokens, load, seed + i, popularity)
        inputs.append((x, routing))
        mine = routing.topk_ids[routing.topk_ids < shape.num_local_experts]
        routes += mine.numel()
        live += mine.unique().numel()
    floor = experts_roofline(shape, routes // sets, max(1, live // sets))
    return Case(weights, inputs, floor, expert_map_of(shape))


def relative_error(out: torch.Tensor, case: Case, want: torch.Tensor) -> float:
    """Relative L2 of some of the tokens against an oracle; NaN anywhere gives NaN."""
    error = (out[case.some].float() - want).norm() / want.norm()
    return error.item() if out.isfinite().all() else float("nan")


Implementation = Callable[[torch.Tensor, Routing], torch.Tensor]


def measure(row: Row, name: str, call: Implementation, case: Case, *, replays: int = 20) -> None:
    """Check, then time; a wrong or failing implementation gets no time."""
    peer = name in peers.PEERS
    limit = TOLERANCE["peer" if peer else "ours"]
    try:
        x, routing = case.inputs[0]
        if peer:
            peers.drop_workspace()
        call(x, routing)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call(x, routing)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        peak += peers.workspace_bytes() if peer else 0
        row.peak_mib[name] = round(peak / 2**20, 1)
        row.error_exact_sums[name] = relative_error(out, case, case.with_exact_sums)
        row.error[name] = (
            row.error_exact_sums[name] if peer else relative_error(out, case, case.as_tensor_cores)
        )
        if not row.error[name] <= limit:
            row.failed[name] = f"relative error {row.error[name]:.2e} exceeds {limit:.0e}"
            return
        calls = [lambda x=x, routing=routing: call(x, routing) for x, routing in case.inputs]
        row.us[name] = timing.time_calls(calls, replays=replays).as_dict()
    except Exception as error:
        row.failed[name] = f"{type(error).__name__}: {error}"[:500]
        torch.cuda.synchronize()


def ours(
    weights: ExpertWeights, config: KernelConfig | None = None, expert_map=None
) -> Implementation:
    """Our layer as serving calls it, or with a given configuration."""
    from moe_backend import execution

    def call(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        args = (x, routing.topk_ids, routing.topk_weights, weights, Activation(), expert_map, None)
        return execution.experts(*args) if config is None else execution.run_experts(*args, config)

    return call


def run(
    shapes: Iterable[str],
    tokens: Iterable[int],
    loads: Iterable[str],
    *,
    with_peers: bool = True,
    with_heuristic: bool = False,
) -> Iterator[Row]:
    """One row per shape, load and number of tokens, as each is done."""
    from moe_backend.tuning import selection
    from moe_backend.tuning.heuristics import heuristic

    with peers.engine_context() if with_peers else contextlib.nullcontext():
        for shape_name in shapes:
            shape = shape_of(shape_name)
            weights = random_weights(shape)
            for load in loads:
                for count in tokens:
                    case = make_case(shape, count, load, weights)
                    floor = case.roofline
                    row = Row(shape_name, count, load, round(floor.us, 1))
                    row.flops, row.weight_bytes = floor.flops, floor.weight_bytes
                    chosen = selection.select(shape, count, torch.device("cuda"))
                    row.config = {"source": chosen.source, **asdict(chosen.config)}
                    measure(row, "ours", ours(weights), case)
                    if with_heuristic:
                        untuned = ours(weights, heuristic(shape, count), case.expert_map)
                        measure(row, "heuristic", untuned, case)
                    for name in peers.PEERS if with_peers else ():
                        call = peers.make(name, weights, case.inputs[0][1], count)
                        measure(row, name, call, case)
                    yield row
                    del case
            del weights
            torch.cuda.empty_cache()


def line(row: Row) -> str:
    """One row for the progress of a run."""
    times = " ".join(f"{name} {t['p50']:.1f}" for name, t in row.us.items())
    wrong = " ".join(f"{name} FAILED ({why})" for name, why in row.failed.items())
    return f"{row.shape} {row.load} {row.tokens} tokens: {times} µs {wrong}"


def table(rows: list[Row]):
    """Ours beside both peers with ratios, rates and the fraction of the roofline."""
    from rich.table import Table

    out = Table(title="Experts: median µs of one layer, bf16 in and out")
    heads = ("shape", "load", "tokens", "ours", "p20-p80", "roofline", "TFLOP/s", "GB/s")
    tails = ("heuristic", "config", "MiB (peers)", "error (exact sums)")
    for head in (*heads, *peers.PEERS.values(), *tails):
        out.add_column(head, justify="left" if head in ("shape", "load", "config") else "right")
    for row in rows:
        cells = [row.shape, row.load, str(row.tokens)]
        if "ours" in row.us:
            t = row.us["ours"]
            cells += [f"{t['p50']:.1f}", f"{t['p20']:.1f}-{t['p80']:.1f}"]
            cells += [f"{row.roofline_us / t['p50']:.0%}"]
            cells += [
                f"{row.flops / t['p50'] / 1e6:.0f}",
                f"{row.weight_bytes / t['p50'] / 1e3:.0f}",
            ]
        else:
            cells += [row.failed.get("ours", "")[:40], "", "", "", ""]
        for peer in peers.PEERS:
            ratio = row.ratio(peer)
            text = f"{row.us[peer]['p50']:.1f}" if peer in row.us else row.failed.get(peer, "")[:20]
            cells.append(text + (f" ({ratio:.2f}×)" if ratio else ""))
        cells.append(f"{row.us['heuristic']['p50']:.1f}" if "heuristic" in row.us else "")
        cells.append(row.config.get("source", ""))
        theirs = "/".join(f"{row.peak_mib[p]:.0f}" for p in peers.PEERS if p in row.peak_mib)
        cells.append(f"{row.peak_mib.get('ours', 0):.0f}" + (f" ({theirs})" if theirs else ""))
        if "ours" in row.error:
            cells.append(f"{row.error['ours']:.1e} ({row.error_exact_sums['ours']:.1e})")
        out.add_row(*cells)
    return out


def plot(rows: list[Row], path) -> None:
    """Latency against tokens with the roofline, one panel per shape and load."""
    from matplotlib.figure import Figure

    panels = sorted({(row.shape, row.load) for row in rows})
    figure = Figure(figsize=(5.2 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        mine = [row for row in rows if (row.shape, row.load) == panel]
        for name, label in (("ours", "moe-backend"), *peers.PEERS.items()):
            points = [(r.tokens, r.us[name]["p50"]) for r in mine if name in r.us]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        floor = [(r.tokens, r.roofline_us) for r in mine]
        axis.plot(*zip(*floor, strict=True), "k--", label="roofline")
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs", title=" ".join(panel))
        axis.legend()
    figure.savefig(path, dpi=130)
