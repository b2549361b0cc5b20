# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between GPUs beside NCCL: same tokens, one run, checked, then timed.

One process per GPU, started here or by torchrun. Times are the slowest rank's median over graph
replays; combine alone cannot be repeated (it has nothing to wait for), so its time is that of
dispatch and combine together less that of dispatch. NCCL moves rows that are packed already: its
times leave out what ours do beside moving (quantising, counting, ordering by expert).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_backend import reference
from moe_backend.distributed import EPConfig, ExpertParallel
from moe_backend.distributed.footprint import wire_row_bytes
from moe_backend.distributed.plan import plan_send
from moe_backend.distributed.symm_memory import SymmetricBuffer
from moe_backend.types import Routing

NVLINK = 450e9  # bytes/s in one direction, by the datasheet
REPLAYS = 20
ERROR = 5e-3  # bf16 parts and sums: 2 * 1.7e-3, and room


@dataclass
class Row:
    """One number of tokens per rank; times in µs."""

    gpus: int
    tokens: int
    programs: int
    us: dict[str, float] = field(default_factory=dict)
    floor_us: dict[str, float] = field(default_factory=dict)
    bytes_out: dict[str, int] = field(default_factory=dict)
    capacity_mib: float = 0.0
    error: float = float("nan")
    failed: dict[str, str] = field(default_factory=dict)

    def ratios(self) -> dict[str, float]:
        """How many times faster than each peer."""
        pairs = {
            "dispatch / nccl, counts read": ("nccl dispatch, counts read", "dispatch"),
            "dispatch / nccl": ("nccl dispatch", "dispatch"),
            "combine / nccl": ("nccl combine", "combine"),
            "both / all-gather + reduce-scatter": ("all-gather + reduce-scatter", "both"),
        }
        known = {k: v for k, v in pairs.items() if v[0] in self.us and v[1] in self.us}
        return {k: round(self.us[a] / self.us[b], 2) for k, (a, b) in known.items()}

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times_faster": self.ratios()}


def _slowest(value: float, digits: int = 2) -> float:
    worst = torch.tensor([value], device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return round(float(worst), digits)


def _timed(call: Callable[[], object], rounds: int) -> float:
    """µs of ``rounds`` calls' average; ranks start together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / rounds


def _graph_us(call: Callable[[], object], rounds: int) -> float:
    """The same number of calls on every rank: an adaptive one would leave ranks waiting."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            call()
    samples = [_timed(graph.replay, rounds) for _ in range(REPLAYS + 3)][3:]
    return _slowest(statistics.median(samples))


def _eager_us(call: Callable[[], object]) -> float:
    samples = [_timed(call, 1) for _ in range(REPLAYS + 3)][3:]
    return _slowest(statistics.median(samples))


def random_case(config: EPConfig, tokens: int, rank: int) -> tuple[torch.Tensor, Routing]:
    g = torch.Generator("cuda").manual_seed(100 * tokens + rank)
    x = torch.randn(tokens, config.hidden, generator=g, device="cuda").bfloat16()
    noise = torch.rand(tokens, config.num_experts, generator=g, device="cuda")
    ids = noise.topk(config.top_k).indices.int()
    weights = torch.rand(tokens, config.top_k, generator=g, device="cuda")
    return x, Routing(ids, weights / weights.sum(1, keepdim=True), config.num_experts)


def _check(ep: ExpertParallel, x: torch.Tensor, routing: Routing) -> float:
    """Error of a way there and back whose experts return what they are given."""
    rows, handle = ep.dispatch(x, routing)
    assert rows.scale is not None
    given = rows.data.float() * rows.scale.T.repeat_interleave(128, 1)
    out = ep.combine(given.bfloat16(), handle).float()
    want = reference.dequant_fp8(*reference.quant_fp8(x)) * routing.topk_weights.sum(1)[:, None]
    torch.cuda.synchronize()
    ep.check()
    return float((out - want).norm() / want.norm())


def _ours(row: Row, ep: ExpertParallel, x: torch.Tensor, routing: Routing, rounds: int) -> None:
    engine: Any = ep._engine
    results = torch.randn(ep.capacity_rows, ep.config.hidden, device="cuda").bfloat16()

    def dispatch() -> None:
        _, flight = engine.dispatch(x, routing, "")
        engine.release(flight)

    def both() -> None:
        _, flight = engine.dispatch(x, routing, "")
        engine.combine(results, flight)

    row.us["dispatch"] = _graph_us(dispatch, rounds)
    row.us["both"] = _graph_us(both, rounds)
    row.us["combine"] = round(row.us["both"] - row.us["dispatch"], 2)
    ep.check()


def _nccl(row: Row, ep: ExpertParallel, x: torch.Tensor, routing: Routing, rounds: int) -> None:
    config, world = ep.config, ep.world_size
    sent = plan_send(routing, ep.place.cuda(), world).per_rank
    counts = torch.tensor(sent, device="cuda")
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    got = theirs.tolist()
    width = wire_row_bytes(config)
    out = torch.empty(sum(sent), width, dtype=torch.uint8, device="cuda")
    landed = torch.empty(sum(got), width, dtype=torch.uint8, device="cuda")
    back = torch.empty(sum(got), config.hidden, dtype=torch.bfloat16, device="cuda")
    home = torch.empty(sum(sent), config.hidden, dtype=torch.bfloat16, device="cuda")
    all_x = torch.empty(world * x.shape[0], config.hidden, dtype=x.dtype, device="cuda")
    all_ids = torch.empty(world * x.shape[0], config.top_k, dtype=torch.int32, device="cuda")
    all_weights = torch.empty(all_ids.shape, device="cuda")
    mine = torch.empty_like(x)

    def reading() -> None:
        dist.all_to_all_single(theirs, counts)
        dist.all_to_all_single(landed, out, theirs.tolist(), sent)

    def gather_scatter() -> None:
        dist.all_gather_into_tensor(all_x, x)
        dist.all_gather_into_tensor(all_ids, routing.topk_ids)
        dist.all_gather_into_tensor(all_weights, routing.topk_weights)
        dist.reduce_scatter_tensor(mine, all_x)

    row.us["nccl dispatch, counts read"] = _eager_us(reading)
    row.us["nccl dispatch"] = _graph_us(
        lambda: dist.all_to_all_single(landed, out, got, sent), rounds
    )
    row.us["nccl combine"] = _graph_us(
        lambda: dist.all_to_all_single(home, back, sent, got), rounds
    )
    row.us["all-gather + reduce-scatter"] = _graph_us(gather_scatter, rounds)
    leaving = sum(n for rank, n in enumerate(sent) if rank != ep.rank)
    arriving = sum(n for rank, n in enumerate(got) if rank != ep.rank)
    row.bytes_out = {"dispatch": leaving * width, "combine": arriving * 2 * config.hidden}


def nvlink_bandwidth(control: Any, nbytes: int = 256 << 20) -> float:
    """Bytes per second of this rank's copy into its neighbour's memory, all ranks at once."""
    buffer = SymmetricBuffer(nbytes, control)
    there = buffer.of((dist.get_rank() + 1) % dist.get_world_size())
    here = torch.empty_like(there)
    us = min(_timed(lambda: there.copy_(here), 1) for _ in range(8))
    dist.barrier()
    buffer.destroy()
    return nbytes / _slowest(us) * 1e6


def measure(tokens: list[int], programs: list[int], config: dict[str, int]) -> list[Row]:
    """On every rank of the initialised default group. Peers are timed once per size."""
    rows: list[Row] = []
    bandwidth: float | None = None
    for number in tokens:
        sizes = EPConfig(max_tokens=number, **config)  # type: ignore[arg-type]
        peers: Row | None = None
        for width in programs:
            ep = ExpertParallel(sizes, backend="symm", programs=width)
            bandwidth = bandwidth or nvlink_bandwidth(ep._control)
            row = Row(ep.world_size, number, width, capacity_mib=ep.capacity_bytes / 2**20)
            x, routing = random_case(sizes, number, ep.rank)
            rounds = 20 if number <= 1024 else 5
            row.error = _slowest(_check(ep, x, routing), digits=6)
            if row.error < ERROR:
                _ours(row, ep, x, routing, rounds)
            else:
                row.failed["ours"] = f"relative error {row.error:.1e}, allowed {ERROR:.0e}"
            if peers is None:
                peers = Row(ep.world_size, number, width)
                _nccl(peers, ep, x, routing, rounds)
                _floors(peers, bandwidth)
            row.us |= peers.us
            row.floor_us, row.bytes_out = peers.floor_us, peers.bytes_out
            dist.barrier()
            ep.destroy()
            rows.append(row)
    return rows


def _floors(row: Row, bandwidth: float) -> None:
    for name, nbytes in row.bytes_out.items():
        row.floor_us[name] = _slowest(nbytes / NVLINK * 1e6)
        row.floor_us[f"{name}, at a copy's {bandwidth / 1e9:.0f} GB/s"] = _slowest(
            nbytes / bandwidth * 1e6
        )


def _rank(
    rank: int, world: int, folder: str, tokens: list[int], programs: list[int], config
) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)
    rows = measure(tokens, programs, config)
    if rank == 0:
        found = [row.as_dict() for row in rows]
        (Path(folder) / "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(
    gpus: int, tokens: list[int], programs: list[int], config: dict[str, int]
) -> list[dict] | None:
    """Rows of all sizes; None on the ranks of torchrun that are not the first."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        rows = [row.as_dict() for row in measure(tokens, programs, config)]
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        return rows if first else None
    with tempfile.TemporaryDirectory() as folder:
        args = (gpus, folder, tokens, programs, config)
        torch.multiprocessing.spawn(_rank, args, gpus)
        return json.loads((Path(folder) / "rows.json").read_text())


def table(rows: list[dict]):
    """For people: times, floors, ratios."""
    from rich import box
    from rich.table import Table

    columns = list(dict.fromkeys(name for row in rows for name in row["us"]))
    title = f"{rows[0]['gpus']} GPUs, µs (ratio to ours)"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    out.add_column("tokens/rank", justify="right")
    out.add_column("programs", justify="right")
    for name in (*columns, "floor out", "floor back", "error"):
        out.add_column(name, justify="right")
    against = {"nccl dispatch, counts read": "dispatch", "nccl dispatch": "dispatch"}
    against |= {"nccl combine": "combine", "all-gather + reduce-scatter": "both"}
    for row in rows:
        cells = []
        for name in columns:
            ours = row["us"].get(against.get(name, ""))
            ratio = f" ({row['us'][name] / ours:.2f}x)" if ours else ""
            cells.append(f"{row['us'].get(name, float('nan')):.1f}{ratio}")
        floors = [f"{row['floor_us'][name]:.1f}" for name in ("dispatch", "combine")]
        error = row["failed"].get("ours") or f"{row['error']:.1e}"
        out.add_row(str(row["tokens"]), str(row["programs"]), *cells, *floors, error)
    return out
