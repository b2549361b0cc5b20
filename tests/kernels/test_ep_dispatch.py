# SPDX-License-Identifier: Apache-2.0
"""The symmetric-memory kernels, several ranks in one process, against the plan in plain torch."""

import pytest
import torch
from ep_world import make_world, status
from moe_backend.kernels import ep_combine, ep_dispatch, ep_plan
from moe_backend.kernels.ep_buffers import COUNTS, OVERFLOW, REFUSED, RESULTS, ROWS, TIMEOUT, Layout

from moe_backend import Routing, reference
from moe_backend.distributed.plan import padded_rows, plan_receive, plan_send


def layout(world=3, experts=6, hidden=256, top_k=3, max_tokens=24, rows=384, **changes):
    sizes = dict(align=16, slots=2, quantised=True)
    return Layout(world, experts, hidden, top_k, max_tokens, rows, **{**sizes, **changes})


def random_inputs(lay, step, tokens, device):
    g = torch.Generator().manual_seed(step)
    out = []
    for n in tokens:
        ids = torch.rand(n, lay.num_experts, generator=g).argsort(1)[:, : lay.top_k].int()
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        ids[torch.rand(ids.shape, generator=g) < 0.05] = lay.num_experts + 7
        x = torch.randn(n, lay.hidden, generator=g).bfloat16()
        weights = torch.rand(ids.shape, generator=g)
        out.append((x.to(device), Routing(ids.to(device), weights.to(device), lay.num_experts)))
    return out


def expected(lay, place, inputs):
    """Per rank: receive plan, rows and weights of the payloads, from the plan in plain torch."""
    plans = [plan_send(r, place, lay.world) for _, r in inputs]  # on the inputs' device
    out = []
    for rank in range(lay.world):
        rows, x, weights = [], [], []
        for (tokens, r), plan in zip(inputs, plans, strict=True):
            first = sum(plan.per_rank[:rank])
            mine = slice(first, first + plan.per_rank[rank])
            rows.append(plan.rows[mine])
            x.append(tokens[plan.token[mine]])
            weights.append(r.topk_weights[plan.token[mine]])
        received = plan_receive(torch.cat(rows), lay.local, lay.align, [len(r) for r in rows])
        out.append((received, torch.cat(x), torch.cat(weights)))
    return plans, out


def dispatch_all(world, slot, inputs):
    for ep, (_, r) in zip(world, inputs, strict=True):
        ep_plan.count(ep, slot, r.topk_ids)
    for ep in world:
        ep_plan.arrange(ep, slot)
    for ep, (x, r) in zip(world, inputs, strict=True):
        ep_dispatch.send(ep, slot, x, r.topk_ids, r.topk_weights)
    return [ep_dispatch.receive(ep, slot) for ep in world]


def check_dispatch(world, slot, datas, wanted):
    lay = world[0].layout
    for ep, data, (plan, x, _) in zip(world, datas, wanted, strict=True):
        tiles = len(plan.tile_expert)
        mine = ep.slots[slot]
        assert mine.tile_expert[:tiles].tolist() == plan.tile_expert.tolist()
        assert int(mine.num_tiles) == tiles
        assert mine.tile_rows[:tiles].tolist() == plan.tile_rows.tolist()
        assert (mine.tile_expert[tiles:] == -1).all() and (mine.tile_rows[tiles:] == 0).all()
        payload, k = (plan.route_row >= 0).nonzero(as_tuple=True)
        at = plan.route_row[payload, k]
        if lay.quantised:
            q, scale = reference.quant_fp8(x)
            assert torch.equal(data.view(torch.uint8)[at], q.view(torch.uint8)[payload])
            assert torch.equal(mine.scale.T[at], scale[payload])
        else:
            assert torch.equal(data[at], x[payload])
        assert int(ep.status) == 0 and int(ep.alarm) == 0


def combine_all(world, slot, inputs, wanted, plans):
    lay, g = world[0].layout, torch.Generator().manual_seed(9)
    device = world[0].place.device
    rows = [torch.randn(lay.rows, lay.hidden, generator=g).bfloat16().to(device) for _ in world]
    for ep, y in zip(world, rows, strict=True):
        ep_combine.send_back(ep, slot, y)
    parts = []
    for y, (plan, _, weights) in zip(rows, wanted, strict=True):
        routes = y[plan.route_row.clamp_min(0)]
        weights = weights.masked_fill(plan.route_row < 0, 0.0)
        parts.append(reference.unpermute_reduce(routes, weights).bfloat16().split(plan.per_rank))
    for source, (ep, (x, _)) in enumerate(zip(world, inputs, strict=True)):
        out = ep_combine.collect(ep, slot, torch.full_like(x, float("nan")))
        want, first = torch.zeros(x.shape, device=device), 0
        for rank, number in enumerate(plans[source].per_rank):
            want[plans[source].token[first : first + number]] += parts[rank][source].float()
            first += number
        # a GPU fuses multiply and add: parts may round to the neighbouring bf16
        near = {"rtol": 2**-6, "atol": 2**-6} if out.is_cuda else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(out, want.bfloat16(), **near)


@pytest.mark.parametrize(
    "lay",
    [
        layout(),
        layout(world=1, experts=5, hidden=128, top_k=2),  # experts not a power of two
        layout(world=4, experts=8, hidden=384, top_k=1, align=64, rows=1024),  # groups not either
        layout(world=2, experts=4, quantised=False),
        layout(world=2, experts=4, hidden=1280, max_tokens=24),  # a row is several items
    ],
    ids=["three ranks", "one rank", "one slot a token", "native rows", "long rows"],
)
def test_rows_go_there_and_come_back(lay, device):
    world = make_world(lay, device)
    place = world[0].place
    steps = 3 if lay.world == 3 else 1  # slots are used again, with epochs and nothing else between
    for step in range(steps):
        slot = step % 2
        tokens = [0, 24, 7, 1][step:][: lay.world] + [5] * max(0, lay.world - 4 + step)
        inputs = random_inputs(lay, step, tokens, device)
        plans, wanted = expected(lay, place, inputs)
        check_dispatch(world, slot, dispatch_all(world, slot, inputs), wanted)
        combine_all(world, slot, inputs, wanted, plans)


def test_two_layers_in_flight_and_experts_that_moved(device):
    lay = layout()
    world = make_world(lay, device)
    place = torch.tensor([3, 1, 5, 0, 2, 4], dtype=torch.int32, device=device)
    for ep in world:
        ep.place.copy_(place)
    flights = []
    for slot in (0, 1):
        inputs = random_inputs(lay, 20 + slot, [9, 13, 2], device)
        plans, wanted = expected(lay, place, inputs)
        check_dispatch(world, slot, dispatch_all(world, slot, inputs), wanted)
        flights.append((slot, inputs, wanted, plans))
    for flight in flights:
        combine_all(world, *flight)


def test_more_than_one_block_of_tokens_keeps_the_order(device):
    lay = layout(world=2, experts=12, hidden=128, top_k=9, max_tokens=40, rows=1024)
    assert lay.block_tokens == 16
    world = make_world(lay, device)
    inputs = random_inputs(lay, 3, [40, 17], device)
    plans, wanted = expected(lay, world[0].place, inputs)
    check_dispatch(world, 0, dispatch_all(world, 0, inputs), wanted)
    combine_all(world, 0, inputs, wanted, plans)


def test_overflow_is_seen_by_all_and_nothing_is_sent(device):
    lay = layout(rows=64)
    world = make_world(lay, device)
    ids = torch.tensor([[2, 3, -1]] * 24, dtype=torch.int32, device=device)
    x = torch.randn(24, 256, device=device).bfloat16()
    inputs = [(x, Routing(ids, torch.ones(24, 3, device=device), 6)) for _ in world]
    before = [ep.view("data", 0, torch.uint8, lay.rows, 256).clone() for ep in world]
    dispatch_all(world, 0, inputs)
    assert padded_rows([72, 72], 16) > 64
    for ep, data in zip(world, before, strict=True):
        assert status(ep) == (OVERFLOW, COUNTS, 1)
        assert torch.equal(ep.view("data", 0, torch.uint8, lay.rows, 256), data)
        assert ep_combine.collect(ep, 0, torch.zeros_like(x)).isnan().all()


def test_a_refusal_of_one_rank_is_seen_by_all(device):
    world = make_world(layout(), device)
    none = torch.empty((0, 3), dtype=torch.int32, device=device)
    for ep in world:
        ep_plan.count(ep, 0, none, refusal=int(ep.me == 2))
    for ep in world:
        ep_plan.arrange(ep, 0)
        assert status(ep) == (REFUSED, COUNTS, 2)


@pytest.mark.parametrize("phase", [COUNTS, ROWS, RESULTS])
def test_a_silent_rank_is_named_with_the_phase(phase, device):
    lay = layout()
    world = make_world(lay, device)
    inputs = random_inputs(lay, 1, [4, 5, 6], device)
    living = world[:2]
    for ep, (_, r) in zip(world if phase > COUNTS else living, inputs, strict=False):
        ep_plan.count(ep, 0, r.topk_ids)
    for ep in world if phase > COUNTS else living:
        ep_plan.arrange(ep, 0)
    for ep, (x, r) in zip(world if phase > ROWS else living, inputs, strict=False):
        ep_dispatch.send(ep, 0, x, r.topk_ids, r.topk_weights)
    for ep in living:
        ep_dispatch.receive(ep, 0)
    for ep in living:
        ep_combine.send_back(ep, 0, torch.zeros(lay.rows, lay.hidden, device=device).bfloat16())
    for ep, (x, _) in zip(living, inputs, strict=False):
        out = ep_combine.collect(ep, 0, torch.zeros_like(x))
        assert out.isnan().all(), "a failed exchange must not look like a result"
        assert status(ep) == (TIMEOUT, phase, 2)


def test_epochs_may_wrap(device):
    lay = layout()
    world = make_world(lay, device)
    for ep in world:
        ep.slots[0].control[0] = 2**31 - 1
        ep.view("flags", 0, torch.int32, 3, 3).fill_(2**31 - 1)
    inputs = random_inputs(lay, 5, [3, 3, 3], device)
    plans, wanted = expected(lay, world[0].place, inputs)
    check_dispatch(world, 0, dispatch_all(world, 0, inputs), wanted)
    combine_all(world, 0, inputs, wanted, plans)
    assert int(world[0].slots[0].control[0]) == -(2**31)
