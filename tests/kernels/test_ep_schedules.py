# SPDX-License-Identifier: Apache-2.0
"""Ranks run ahead of each other by as much as their waits allow, in random order, over many calls
in the same memory: without resets or barriers nothing may be overwritten before it was read."""

import random

import pytest
import torch
from ep_world import make_status, make_world
from moe_backend.kernels import ep_alltoallv, ep_combine, ep_dispatch, ep_plan
from moe_backend.kernels.ep_alltoallv import Staging
from moe_backend.kernels.ep_buffers import Layout

WORLD, CALLS = 3, 5


def run_in_random_order(steps, waits, seed):
    """``steps(rank, call)`` yields a rank's steps by name and action; a step named in ``waits`` may
    only run once every rank has done the step it waits for."""
    order, done = random.Random(seed), set()
    queues = [[(c, *s) for c in range(CALLS) for s in steps(r, c)] for r in range(WORLD)]
    while any(queues):
        ready = [
            r for r, q in enumerate(queues)
            if q and (q[0][1] not in waits
                      or all((p, q[0][0], waits[q[0][1]]) in done for p in range(WORLD)))
        ]  # fmt: skip
        rank = order.choice(ready)
        call, name, action = queues[rank].pop(0)
        action()
        done.add((rank, call, name))


@pytest.mark.parametrize("seed", range(3))
def test_dispatch_and_combine_need_no_barrier(seed, device):
    lay = Layout(WORLD, 6, 128, 2, 4, 96, 16, 1, True)
    world = make_world(lay, device, programs=2)
    outs = {}

    def tokens(rank, call):
        g = torch.Generator().manual_seed(100 * call + rank)
        n = int(torch.randint(0, 5, (1,), generator=g))
        ids = torch.rand(n, 6, generator=g).argsort(1)[:, :2].int().to(device)
        x = torch.randint(1, 8, (n, 128), generator=g).bfloat16()
        x[:, 0] = 448  # the scale is one: digits are exact
        return x.to(device), ids, torch.ones(n, 2, device=device)

    def steps(rank, call):
        ep, (x, ids, weights) = world[rank], tokens(rank, call)
        received = {}

        def receive():
            received["rows"] = ep_dispatch.receive(ep, 0)

        def send_back():  # experts return what they are given
            data = received["rows"].float() * ep.slots[0].scale[0][:, None]
            ep_combine.send_back(ep, 0, data.bfloat16())

        def collect():
            out = ep_combine.collect(ep, 0, torch.empty_like(x))
            outs[rank, call] = torch.equal(out[:, 1:], 2 * x[:, 1:])

        yield "count", lambda: ep_plan.count(ep, 0, ids)
        yield "arrange", lambda: ep_plan.arrange(ep, 0)
        yield "send", lambda: ep_dispatch.send(ep, 0, x, ids, weights)
        yield "receive", receive
        yield "send back", send_back
        yield "collect", collect

    run_in_random_order(
        steps, {"arrange": "count", "receive": "send", "collect": "send back"}, seed
    )
    assert len(outs) == WORLD * CALLS and all(outs.values())
    assert all(int(ep.status) == 0 for ep in world)


@pytest.mark.parametrize("seed", range(3))
def test_alltoallv_needs_no_barrier(seed, device):
    capacity, size = 256, 2 * Staging.half_bytes(WORLD, 256)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(WORLD)]
    peers = torch.tensor([b.data_ptr() for b in buffers], device=device)
    patience = 50_000_000 if device != "cpu" else 20
    ends = [
        Staging(
            WORLD, r, capacity, buffers[r], peers,
            torch.zeros(8, dtype=torch.int32, device=device), *make_status(device), patience, 2,
            device != "cpu",
        )
        for r in range(WORLD)
    ]  # fmt: skip
    right = {}

    def code(source, to, call):
        return 1 + source + 10 * to + 100 * call

    def steps(rank, call):
        send = torch.tensor([code(rank, to, call) for to in range(WORLD)], device=device)
        recv, got = torch.zeros_like(send), torch.zeros_like(send)

        def take():
            ep_alltoallv.take(ends[rank], recv, got, 8, 0)
            right[rank, call] = recv.tolist() == [code(s, rank, call) for s in range(WORLD)]

        yield "put", lambda: ep_alltoallv.put(ends[rank], send, torch.ones_like(send), recv, 8, 0)
        yield "take", take

    run_in_random_order(steps, {"take": "put"}, seed)
    assert len(right) == WORLD * CALLS and all(right.values())
