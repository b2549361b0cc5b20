# SPDX-License-Identifier: Apache-2.0
"""Order by expert: integers, so every result is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_backend.kernels import schedule as module

SIZES = (0, 1, 63, 64, 65, 127, 128, 129)


def expected(ids, experts, align):
    """Rows, tile experts and valid rows of the tiles, by a loop."""
    members = [[i for i, e in enumerate(ids) if e == expert] for expert in range(experts)]
    row, tile_expert, tile_rows, first = [-1] * len(ids), [], [], 0
    for expert, routes in enumerate(members):
        for position, route in enumerate(routes):
            row[route] = first + position
        tiles = -(-len(routes) // align)
        tile_expert += [expert] * tiles
        tile_rows += [min(align, len(routes) - t * align) for t in range(tiles)]
        first += tiles * align
    return row, tile_expert, tile_rows


def check(plan, ids, experts, align):
    row, tile_expert, tile_rows = expected(ids, experts, align)
    live = len(tile_expert)
    tail = plan.tile_expert.numel() - live
    assert tail >= 0, "the worst case must hold every routing"
    assert plan.route_row.flatten().tolist() == row
    assert plan.num_tiles.item() == live
    assert plan.tile_expert.tolist() == tile_expert + [-1] * tail
    assert plan.tile_rows.tolist() == tile_rows + [0] * tail
    for route, r in enumerate(row):
        assert r < 0 or plan.row_route[r].item() == route


@given(
    tokens=st.integers(1, 12),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    align=st.sampled_from([16, 64, 128]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_any_routing(tokens, top_k, experts, align, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator, dtype=torch.int32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = module.schedule(ids.to(device), experts, align)
    kept = [e if 0 <= e < experts else -1 for e in ids.flatten().tolist()]
    check(plan, kept, experts, align)


@pytest.mark.parametrize("align", [64, 128])
def test_group_sizes_round_the_tile(device, align, poisoned_memory):
    """Boundaries finer than a tile once gave rows the wrong expert."""
    ids = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(SIZES)])
    ids = ids[torch.randperm(ids.numel())]
    plan = module.schedule(ids.view(-1, 1).to(device), len(SIZES), align)
    check(plan, ids.tolist(), len(SIZES), align)


@pytest.mark.parametrize("experts", [1, 5, 257])
def test_three_launches_agree_with_one(device, experts, monkeypatch, poisoned_memory):
    """More routes than one launch ranks take the other way round; same answer."""
    ids = torch.randint(-1, experts, (150, 4), dtype=torch.int32)
    one = module.schedule(ids.to(device), experts, 16)
    monkeypatch.setattr(module, "SINGLE_LAUNCH_ROUTES", 0)
    three = module.schedule(ids.to(device), experts, 16)
    check(three, ids.flatten().tolist(), experts, 16)
    assert torch.equal(one.route_row, three.route_row)


def test_expert_map_of_a_later_rank(device):
    """On rank 0 global and local ids coincide and hide a confusion of the two."""
    expert_map = torch.tensor([-1, -1, -1, 2, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [4, 5], [-1, 9], [3, 4]], dtype=torch.int32)
    plan = module.schedule(ids.to(device), 3, 16, expert_map=expert_map.to(device))
    check(plan, [-1, 2, 0, 1, -1, -1, 2, 0], 3, 16)


def test_nothing_is_routed(device):
    plan = module.schedule(torch.full((3, 2), -1, dtype=torch.int32, device=device), 4, 16)
    assert plan.num_tiles.item() == 0 and (plan.tile_expert == -1).all()
    empty = module.schedule(torch.empty((0, 2), dtype=torch.int32, device=device), 4, 16)
    assert empty.num_rows == 0


def test_bad_input_is_named(device):
    with pytest.raises(ValueError, match="topk_ids.*int64"):
        module.schedule(torch.zeros(2, 2, dtype=torch.int64, device=device), 4, 16)
    with pytest.raises(ValueError, match="expert_map"):
        module.schedule(
            torch.zeros(2, 2, dtype=torch.int32, device=device),
            4,
            16,
            expert_map=torch.zeros(4, device=device),
        )
