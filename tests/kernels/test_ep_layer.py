# SPDX-License-Identifier: Apache-2.0
"""Dispatch, grouped GEMMs and combine as kernels, two ranks in one process, against one process."""

import pytest
import torch
from ep_world import make_world
from factories import expert_weights, relative_error, routing
from moe_backend.kernels import ep_combine, ep_dispatch, ep_plan
from moe_backend.kernels.ep_buffers import Layout
from moe_backend.kernels.schedule import schedule

from moe_backend import Activation, ExpertWeights, fused_experts
from moe_backend.distributed.handle import ExpertRows
from moe_backend.distributed.layer import run_kernels
from moe_backend.distributed.plan import plan_receive

# Both round rows to bf16; over ranks the partial sums are rounded once more, and so is the
# difference of the sums: sqrt(2) * 1.7e-3.
TOLERANCE = 3e-3


def test_the_chain_of_kernels_equals_the_layer_of_one_process(device):
    hidden, experts, tokens = 256, 4, 5
    w = expert_weights(experts, hidden, 128, device=device)
    lay = Layout(2, experts, hidden, 2, 8, 96, 16, 1, True)
    world = make_world(lay, device)
    for ep in world:  # rank 1 holds experts 0 and 3: places are not the experts' numbers
        ep.place.copy_(torch.tensor([2, 0, 1, 3]))
    held = [[1, 2], [0, 3]]
    inputs = [
        (
            torch.randn(tokens, hidden, device=device).bfloat16(),
            routing(tokens, experts, 2, device=device, seed=r),
        )
        for r in range(2)
    ]
    for ep, (_, r) in zip(world, inputs, strict=True):
        ep_plan.count(ep, 0, r.topk_ids)
    for ep in world:
        ep_plan.arrange(ep, 0)
    for ep, (x, r) in zip(world, inputs, strict=True):
        ep_dispatch.send(ep, 0, x, r.topk_ids, r.topk_weights)
    for ep, mine in zip(world, held, strict=True):
        data, slot = ep_dispatch.receive(ep, 0), ep.slots[0]
        tiles = slot.tile_expert, slot.tile_rows, slot.num_tiles
        tensors = (w.w13, w.w13_scale, w.w2, w.w2_scale)
        share = ExpertWeights(*(t[mine].contiguous() for t in tensors))
        y = run_kernels(ExpertRows(data, slot.scale, *tiles, lay.align), share, Activation())
        ep_combine.send_back(ep, 0, y)
    for ep, (x, r) in zip(world, inputs, strict=True):
        out = ep_combine.collect(ep, 0, torch.empty_like(x))
        assert relative_error(out, fused_experts(x, r, w)) < TOLERANCE


@pytest.mark.parametrize("payloads", [1, 33, 700])
def test_received_rows_have_the_grouped_gemms_own_order(payloads, device):
    """What lands on a rank is what its schedule would have made of the received routes."""
    g = torch.Generator().manual_seed(payloads)
    ids = torch.rand(payloads, 5, generator=g).argsort(1)[:, :3].int() - 1  # -1 is elsewhere
    plan = plan_receive(ids, 4, 16, [payloads])
    theirs = schedule(ids.to(device), 4, 16)
    tiles = int(theirs.num_tiles)
    assert torch.equal(plan.route_row.int(), theirs.route_row.cpu())
    assert plan.tile_expert.tolist() == theirs.tile_expert[:tiles].tolist()
    assert plan.tile_rows.tolist() == theirs.tile_rows[:tiles].tolist()
