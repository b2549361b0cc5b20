# SPDX-License-Identifier: Apache-2.0
"""Payloads that say (rank, token, step) and routings that every rank can predict, so that each
received row is checked exactly. Shared by the tests of all transports."""

from __future__ import annotations

import random

import torch

from moe_backend import Routing
from moe_backend.distributed import EPConfig, ExpertParallel, combine, dispatch
from moe_backend.reference import dequant_fp8

EXPERTS, HIDDEN, TOP_K, ALIGN = 8, 256, 3, 16
KINDS = ("uniform", "one rank", "skew", "absent")


def config(**changes) -> EPConfig:
    sizes = dict(
        num_experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=64, align=ALIGN, wire="fp8"
    )
    return EPConfig(**{**sizes, **changes})


def coded_tokens(rank, num_tokens, step, dtype=torch.bfloat16):
    """Rows whose first columns are digits of (rank, token, step), exact in e4m3.

    448 in every group of 128 makes the group's scale one."""
    x = torch.zeros(num_tokens, HIDDEN)
    x[:, ::128] = 448
    t = torch.arange(num_tokens)
    x[:, 1], x[:, 2], x[:, 3], x[:, 4] = rank + 1, t // 8 + 1, t % 8 + 1, step % 8 + 1
    return x.to(dtype)


def random_routing(rank, step, num_tokens, kind, world) -> Routing:
    """The same on every process for the same arguments, so that all can predict all rows."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.rand(num_tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
    if kind == "one rank":
        ids = ids % (EXPERTS // world) + EXPERTS // world * (step % world)
        ids[:, 2:] = -1
        ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    if kind == "skew":
        ids[torch.rand(num_tokens, generator=g) < 0.7] = torch.tensor([5, 0, 4])
    if kind == "absent":
        ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
        ids[torch.rand(ids.shape, generator=g) < 0.1] = EXPERTS + 3  # stale ids of padding
    weights = 2.0 ** torch.randint(0, 3, ids.shape, generator=g)
    return Routing(ids.int(), weights, EXPERTS)


def sizes(step, world):
    r = random.Random(step)
    return [r.choice([0, 0, 1, 3, 17, 40, 64]) for _ in range(world)]


def expected_rows(rank, step, place, world):
    """(expert, source, token) of every valid row of this rank in the layout's order."""
    out = []
    for row in range(EXPERTS // world):
        expert = place.index(rank * (EXPERTS // world) + row)
        for source, num_tokens in enumerate(sizes(step, world)):
            ids = random_routing(source, step, num_tokens, KINDS[step % 4], world).topk_ids
            for token, slot in (ids == expert).nonzero().tolist():
                out.append((row, source, token, slot))
    return out


def check_rows(rows, rank, step, place, world):
    """Every received row, its expert and its place."""
    align, valid = rows.align, []
    for tile, (expert, count) in enumerate(
        zip(rows.tile_expert.tolist(), rows.tile_rows.tolist(), strict=True)
    ):
        valid += [(expert, tile * align + i) for i in range(count)]
    want = expected_rows(rank, step, place, world)
    assert [e for e, _ in valid] == [w[0] for w in want]
    at = torch.tensor([r for _, r in valid], dtype=torch.long)
    found = _plain(rows).cpu()[at]
    coded = [coded_tokens(source, 64, step)[token].float() for _, source, token, _ in want]
    if coded:
        assert torch.equal(found, torch.stack(coded))


def _plain(rows) -> torch.Tensor:
    return rows.data.float() if rows.scale is None else dequant_fp8(rows.data, rows.scale.T)


def one_iteration(ep, rank, step, place, device="cpu", look_at_rows=True):
    """Dispatch, check rows, combine, check sums: half of an expert's result is its number, telling
    what experts a token has seen, the other half the row's digits, telling whose it was."""
    world, local = ep.world_size, EXPERTS // ep.world_size
    num_tokens, kind = sizes(step, world)[rank], KINDS[step % 4]
    r = random_routing(rank, step, num_tokens, kind, world)
    x = coded_tokens(rank, num_tokens, step)
    moved = Routing(r.topk_ids.to(device), r.topk_weights.to(device), EXPERTS)
    rows, handle = dispatch(x.to(device), moved, ep)
    if look_at_rows:
        check_rows(rows, rank, step, place, world)
    numbers = torch.tensor([place.index(rank * local + i) for i in range(local)], device=device) + 1
    results = torch.zeros(rows.num_rows, HIDDEN, device=device)
    results[:, :128] = numbers[rows.tile_expert.clamp_min(0).long()].repeat_interleave(ALIGN)[
        :, None
    ]
    results[:, 128:132] = _plain(rows)[:, 1:5]
    y = combine(results.bfloat16(), handle).float().cpu()
    weights = r.topk_weights.masked_fill((r.topk_ids < 0) | (r.topk_ids >= EXPERTS), 0.0)
    want = torch.zeros(num_tokens, HIDDEN)  # at most 96 everywhere: exact in bf16
    want[:, :128] = ((r.topk_ids + 1) * weights).sum(1)[:, None]
    want[:, 128:132] = x[:, 1:5].float() * weights.sum(1)[:, None]
    assert torch.equal(y, want)


def check_gradients(rank, world, backend, device):
    """Expert e computes tanh(factor_e · x): gradients of x and of the weights, against one
    process that holds all experts."""
    ep = ExpertParallel(config(dtype=torch.float32, wire="native"), backend=backend)
    local, g = EXPERTS // world, torch.Generator().manual_seed(rank)
    x = torch.randn(10, HIDDEN, generator=g).to(device).requires_grad_()
    ids = torch.rand(10, EXPERTS, generator=g).argsort(1)[:, :TOP_K].int().to(device)
    ids[3] = -1
    weights = torch.rand(10, TOP_K, generator=g).to(device).requires_grad_()
    upstream = torch.randn(10, HIDDEN, generator=g).to(device)
    factors = torch.linspace(-1, 1, EXPERTS, device=device)
    rows, handle = dispatch(x, Routing(ids, weights, EXPERTS), ep)
    factor = factors[rank * local + rows.tile_expert.long()].repeat_interleave(ALIGN)[:, None]
    y = combine(torch.tanh(rows.data * factor), handle)
    y.backward(upstream)
    found = y.detach(), x.grad, weights.grad
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    routes = torch.tanh(x[:, None] * factors[ids.clamp_min(0).long()][..., None])
    alone = (routes * (weights * (ids >= 0))[..., None]).sum(1)
    alone.backward(upstream)
    for ours, theirs in zip(found, (alone.detach(), x.grad, weights.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
