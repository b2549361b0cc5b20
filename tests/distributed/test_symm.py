# SPDX-License-Identifier: Apache-2.0
"""The symm transport between GPUs (and nccl beside it): exact rows, graphs, errors, dead ranks."""

import os
import random
import signal
import time

import pytest
import torch
from ep_payloads import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    check_gradients,
    coded_tokens,
    config,
    one_iteration,
)
from factories import expert_weights, relative_error, routing
from ranks import Ranks, run_ranks

from moe_backend import ExpertWeights, Routing, fused_experts
from moe_backend.distributed import (
    EPError,
    EPMismatch,
    EPOverflow,
    EPTimeout,
    ExpertParallel,
    alltoallv,
    combine,
    dispatch,
    ep_experts,
    open_backend,
)

pytestmark = pytest.mark.multigpu
WORLD = 1 << (max(torch.cuda.device_count(), 2).bit_length() - 1)  # 2, 4 or 8


def _many_iterations(rank, world, backend, steps):
    ep = ExpertParallel(config(), backend=backend)
    place, delays = list(range(EXPERTS)), random.Random(rank)
    for step in range(steps):
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randrange(400_000))
        one_iteration(ep, rank, step, place, "cuda", look_at_rows=step % 50 < 4)
    ep.check()


@pytest.mark.parametrize("backend, steps", [("symm", 1000), ("nccl", 100)])
def test_every_row_arrives_over_many_iterations(backend, steps):
    run_ranks(_many_iterations, WORLD, backend, steps, timeout=300, cuda=True)


def _gradients(rank, world):
    check_gradients(rank, world, "nccl", "cuda")


def test_gradients_over_nccl_equal_those_of_one_process():
    run_ranks(_gradients, WORLD, cuda=True)


def _experts_move_and_two_in_flight(rank, world):
    ep = ExpertParallel(config(), backend="symm")
    local = EXPERTS // world
    for step in range(8):
        place = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(step)).tolist()
        ep.update_expert_map(torch.tensor([p % local if p // local == rank else -1 for p in place]))
        one_iteration(ep, rank, step, place, "cuda")
    ids = torch.arange(6 * TOP_K, device="cuda").view(6, TOP_K) % EXPERTS
    flights = [
        dispatch(coded_tokens(rank, 6, s).cuda(), Routing(ids, ids + 1.0, EXPERTS), ep)
        for s in range(2)
    ]
    with pytest.raises(ValueError, match="2 dispatches are in flight"):
        dispatch(coded_tokens(rank, 6, 2).cuda(), Routing(ids, ids + 1.0, EXPERTS), ep)
    for rows, handle in flights:
        y = combine(torch.ones(rows.num_rows, HIDDEN, device="cuda").bfloat16(), handle)
        assert torch.equal(y[:, 0].float(), (ids + 1.0).sum(1))


def test_experts_that_moved_and_two_layers_in_flight():
    run_ranks(_experts_move_and_two_in_flight, WORLD, cuda=True)


def _graph(rank, world):
    """Captured once, replayed with other tokens, routings and sizes of the others."""
    ep = ExpertParallel(config(), backend="symm")
    x = coded_tokens(rank, 32, 0).cuda()
    ids = torch.zeros(32, TOP_K, dtype=torch.int32, device="cuda")
    weights = torch.ones(32, TOP_K, device="cuda")

    def layer():
        out = x
        for _ in range(2):  # two layers in one graph
            rows, handle = dispatch(out, Routing(ids, weights, EXPERTS), ep)
            plain = rows.data.float() * rows.scale.T.repeat_interleave(128, 1)
            out = combine(plain.bfloat16(), handle)
        return out

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for step in range(200):
        g = torch.Generator().manual_seed(step * world + rank)
        ids.copy_(torch.rand(32, EXPERTS, generator=g).argsort(1)[:, :TOP_K])
        weights.copy_(torch.randint(0, 2, (32, TOP_K), generator=g))
        x.copy_(coded_tokens(rank, 32, step))
        graph.replay()
        ep.check()
        total = weights.sum(1, keepdim=True)
        assert torch.equal(out[:, 1:5].float(), x[:, 1:5].float() * total * total)


def test_graphs_replay_with_other_routings():
    run_ranks(_graph, WORLD, timeout=120, cuda=True)


def _layer(rank, world):
    hidden, inter, tokens = 512, 256, 200
    w = expert_weights(EXPERTS, hidden, inter, device="cuda")
    share = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    mine = ExpertWeights(*(t[share].contiguous() for t in (w.w13, w.w13_scale, w.w2, w.w2_scale)))
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
    r = routing(tokens, EXPERTS, TOP_K, device="cuda", seed=rank)
    errors = []
    for align in (16, 64, 128):
        sizes = config(hidden=hidden, max_tokens=256, align=align)
        out = ep_experts(x, r, mine, ExpertParallel(sizes, backend="symm"))
        errors.append(relative_error(out, fused_experts(x, r, w)))
    return errors


def test_the_layer_equals_one_gpu_to_rounding():
    """As over gloo, plus the two runs' different tiles: sums of K in another order flip FP8 codes
    of the intermediate now and then."""
    for errors in run_ranks(_layer, WORLD, cuda=True, timeout=300):
        assert max(errors) < 5e-3


def _alltoallv(rank, world):
    for name in ("symm", "nccl"):
        backend = open_backend(name, capacity_bytes=1 << 20)
        for step, dtype in enumerate((torch.uint8, torch.bfloat16, torch.float64) * 4):
            table = torch.randint(
                0, 50, (world, world), generator=torch.Generator().manual_seed(step)
            )
            counts = table[rank].cuda()
            n = int(table[rank].sum())
            send = (torch.arange(n * 7).view(n, 7) % 97 + rank).to(dtype).cuda()
            recv, got = (
                torch.zeros(64 * world, 7, dtype=dtype, device="cuda"),
                torch.zeros_like(counts),
            )
            alltoallv(send, counts, recv, got, backend=backend)
            assert torch.equal(got.cpu(), table[:, rank])
            first = 0
            for source in range(world):
                start = int(table[source, :rank].sum()) * 7
                want = (torch.arange(start, start + int(got[source]) * 7) % 97 + source).to(dtype)
                found = recv[first : first + int(got[source])].cpu().flatten()
                assert torch.equal(found, want)
                first += int(got[source])
        backend.check()


def test_alltoallv_between_gpus():
    run_ranks(_alltoallv, WORLD, cuda=True)


def _errors(rank, world):
    said = []
    ep = ExpertParallel(config(capacity_rows=16), backend="symm")
    ids = torch.zeros(64, TOP_K, dtype=torch.int32, device="cuda") - 1
    ids[:, 0] = EXPERTS - 1
    dispatch(coded_tokens(rank, 64, 0).cuda(), Routing(ids, ids.float(), EXPERTS), ep)
    torch.cuda.synchronize()
    with pytest.raises(EPOverflow) as raised:
        ep.check()
    said.append(str(raised.value))
    ep = ExpertParallel(config(), backend="symm")
    x = coded_tokens(rank, 64 if rank else 65, 0).cuda()
    ids = torch.zeros(x.shape[0], TOP_K, dtype=torch.int32, device="cuda")
    with pytest.raises(EPMismatch) as raised:
        dispatch(x, Routing(ids, ids.float(), EXPERTS), ep)
        torch.cuda.synchronize()
        ep.check()
    said.append(str(raised.value))
    return said


def test_overflow_and_a_wrong_input_are_raised_on_every_rank():
    for rank, (overflow, refusal) in enumerate(run_ranks(_errors, WORLD, cuda=True)):
        assert f"rank {WORLD - 1} would receive more rows than its stated capacity" in overflow
        assert ("rank 0 refused its input" if rank else "max_tokens=64 tokens, found 65") in refusal


def _until_it_fails(rank, world, running):
    ep = ExpertParallel(config(), backend="symm", timeout_s=3)
    ids = torch.arange(8 * TOP_K, device="cuda").view(8, TOP_K) % EXPERTS
    x, r = coded_tokens(rank, 8, 0).cuda(), Routing(ids, ids + 1.0, EXPERTS)
    last = time.monotonic()
    for step in range(10**7):
        try:
            rows, handle = dispatch(x, r, ep)
            y = combine(torch.ones(rows.num_rows, HIDDEN, device="cuda").bfloat16(), handle)
            torch.cuda.synchronize()
            ep.check()
            assert torch.equal(y[:, 0].float(), (ids + 1.0).sum(1))
        except EPTimeout as error:
            took = time.monotonic() - last
            with pytest.raises(EPError):
                dispatch(x, r, ep)
            return {"ranks": error.ranks, "phase": error.phase, "took": took}
        last = time.monotonic()
        if step == 100 and rank == 1:
            open(running, "w").close()
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_dead_or_stuck_rank_is_named_within_the_bound(how, tmp_path):
    running = str(tmp_path / "running")
    ranks = Ranks(_until_it_fails, WORLD, running, cuda=True)
    try:
        end = time.monotonic() + 60
        while not os.path.exists(running) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(ranks.processes[1].pid, how)
        for rank in set(range(WORLD)) - {1}:
            ok, found = ranks.answer(rank, 30)
            assert ok, found
            assert found["ranks"] == (1,) and found["took"] < 5, found
    finally:
        ranks.stop()
    run_ranks(_many_iterations, WORLD, "symm", 20, cuda=True)
