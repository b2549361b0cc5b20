# SPDX-License-Identifier: Apache-2.0
"""Row maps, permutation and merging as kernels: exact against plain torch, in poisoned memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_backend import reference_training as oracle


def routing(tokens, experts, topk, device, drop=0.3):
    ids = torch.rand(tokens, experts, device=device).topk(topk).indices
    ids[torch.rand(tokens, topk, device=device) < drop] = -1
    mask = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=device)
    return mask.scatter_(1, ids.where(ids >= 0, experts), True)[:, :experts], ids.int()


def check_map(got, want, experts, padded):
    for name, g, w in zip(("offsets", "pad_offsets", "targets"), got[1:], want[1:], strict=True):
        assert torch.equal(g, w), name
    pads = want[2] if padded else None
    ours, theirs = (oracle.routes(m, experts, pads) for m in (got[0], want[0]))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "align"),
    [
        (1, 1, 1, 1),
        (31, 8, 2, 16),  # less than a word of tokens
        (33, 8, 2, 128),  # a word and a bit
        (70, 20, 3, 8),
        (5, 300, 9, 4),  # more than one block of columns
        (2, 2304, 36, 128),
        (0, 8, 2, 16),
    ],
)
def test_rows_of_mask_and_ids(tokens, experts, topk, align, device, poisoned_memory):
    from moe_backend.kernels.row_map import row_map_of_ids, row_map_of_mask

    mask, ids = routing(tokens, experts, topk, device)
    got, pending = row_map_of_mask(mask, align)
    check_map(got, oracle.row_map_of_mask(mask, align), experts, True)
    assert pending.row_map is got.row_map
    got = row_map_of_ids(ids, experts, align)
    check_map(got, oracle.row_map_of_ids(ids, experts, align), experts, True)


def test_more_blocks_than_one_step_of_the_scan(device, monkeypatch):
    from moe_backend.kernels import row_map

    monkeypatch.setattr(row_map, "_IDS_PER_BLOCK", 16)
    ids = torch.randint(-1, 3, (16 * 520, 1), dtype=torch.int32, device=device)
    check_map(row_map.row_map_of_ids(ids, 3), oracle.row_map_of_ids(ids, 3), 3, False)


def test_stale_ids_in_padding_have_no_row(device):
    """−1 and ids beyond the experts are absent, never an index."""
    from moe_backend.kernels.row_map import row_map_of_ids

    ids = torch.tensor([[0, 9], [-1, 1], [77, -5]], dtype=torch.int32, device=device)
    assert row_map_of_ids(ids, 4).row_map.tolist() == [[0, -1], [-1, 1], [-1, -1]]


def test_every_column_of_integers_counts_as_routed(device):
    from moe_backend.kernels.row_map import row_map_of_mask

    mask = torch.tensor([[0, 3], [-1, 1]], dtype=torch.int32, device=device)
    assert row_map_of_mask(mask)[0].targets.tolist() == [1, 2]


def test_ticket_is_left_zero(device, monkeypatch):
    from moe_backend.kernels import row_map

    line = torch.zeros(32, dtype=torch.int32, device=device)
    monkeypatch.setattr(row_map, "zeroed_line", lambda device, size: line)
    mask, _ = routing(40, 300, 4, device)
    row_map.row_map_of_mask(mask, 8)
    assert not line.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["mask", "ids"])
def test_permute_writes_every_row_and_nothing_else(dtype, kind, device, poisoned_memory):
    """Rows without a route are zeros, whatever the memory held; a canary row stands behind."""
    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_ids, row_map_of_mask

    mask, ids = routing(9, 6, 3, device)
    x, scale = torch.randn(9, 200, device=device).to(dtype), torch.rand(9, 2, device=device)
    got = row_map_of_mask(mask, 8)[0] if kind == "mask" else row_map_of_ids(ids, 6, 8)
    where = oracle.routes(got.row_map, 6, got.pad_offsets)
    out = permute(
        x, got.row_map, 6, 70, offsets=got.offsets, pad_offsets=got.pad_offsets, scale=scale
    )
    assert torch.equal(out.out.float(), oracle.permute(x, where, 70).float())
    assert torch.equal(out.scale, oracle.permute(scale, where, 70))
    plain = permute(x, got.row_map, 6, 70, pad_offsets=got.pad_offsets)  # no offsets: zeroed first
    assert torch.equal(plain.out.float(), out.out.float())


@pytest.mark.parametrize("hidden", [1, 40, 8200])
def test_any_hidden_size(hidden, device):
    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_mask
    from moe_backend.kernels.unpermute import unpermute

    mask, _ = routing(3, 4, 2, device, drop=0.0)
    x = torch.randn(3, hidden, device=device)
    got = row_map_of_mask(mask)[0]
    rows = permute(x, got.row_map, 4, 6, offsets=got.offsets).out
    assert torch.equal(rows, oracle.permute(x, oracle.routes(got.row_map, 4, None), 6))
    assert torch.equal(unpermute(rows, got.row_map, 4)[0], 2 * x)


def test_rows_of_other_tokens_and_padding_never_leak(device):
    """NaN in padding rows, and in one token's rows, stays out of every other token."""
    from moe_backend.kernels.row_map import row_map_of_mask
    from moe_backend.kernels.unpermute import unpermute, unpermute_backward

    mask = torch.ones(4, 3, dtype=torch.bool, device=device)
    got = row_map_of_mask(mask, 8)[0]
    token, _, row = oracle.routes(got.row_map, 3, got.pad_offsets)
    rows = torch.full((24, 40), float("nan"), device=device)
    clean = token != 2
    rows[row[clean]] = 1.0
    weight = torch.rand(4, 3, device=device)
    out, _ = unpermute(rows, got.row_map, 3, weight=weight, pad_offsets=got.pad_offsets)
    assert out[[0, 1, 3]].isfinite().all() and out[2].isnan().all()
    grad, grad_weight = unpermute_backward(
        torch.ones(4, 40, device=device), rows, got.row_map, 3, weight, got.pad_offsets
    )
    assert grad.isfinite().all() and grad_weight[[0, 1, 3]].isfinite().all()


def test_tokens_of_more_routes_than_one_step(device):
    from moe_backend.kernels.row_map import row_map_of_mask
    from moe_backend.kernels.unpermute import unpermute, unpermute_backward

    mask, _ = routing(3, 30, 19, device, drop=0.1)
    got = row_map_of_mask(mask)[0]
    where = oracle.routes(got.row_map, 30, None)
    rows = torch.randn(int(mask.sum()), 24, device=device)
    weight, moved = torch.rand(3, 30, device=device), torch.rand(len(rows), device=device)
    out, back = unpermute(rows, got.row_map, 30, weight=weight, moved=moved)
    torch.testing.assert_close(out, oracle.unpermute(rows, where, 3, weight))
    want = torch.zeros(3, 30, device=device)
    want[where[0], where[1]] = moved[where[2]]
    assert torch.equal(back, want)
    grad = torch.randn(3, 24, device=device)
    got_grads = unpermute_backward(grad, rows, got.row_map, 30, weight)
    for g, w in zip(got_grads, oracle.unpermute_backward(grad, rows, where, weight), strict=True):
        torch.testing.assert_close(g, w)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_mask(data):
    from moe_backend.kernels.row_map import row_map_of_mask

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = data.draw(st.integers(0, 70), "tokens")
    experts = data.draw(st.integers(1, 40), "experts")
    align = data.draw(st.sampled_from([1, 3, 64]), "align")
    mask = (torch.rand(tokens, experts) < data.draw(st.floats(0, 1), "density")).to(device)
    got, want = row_map_of_mask(mask, align)[0], oracle.row_map_of_mask(mask, align)
    check_map(got, want, experts, True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 1024, 16384])
def test_full_size(tokens):
    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_ids, row_map_of_mask

    mask, ids = routing(tokens, 256, 8, "cuda", drop=0.05)
    check_map(row_map_of_mask(mask, 128)[0], oracle.row_map_of_mask(mask, 128), 256, True)
    check_map(row_map_of_ids(ids, 256, 128), oracle.row_map_of_ids(ids, 256, 128), 256, True)
    x = torch.randn(tokens, 7168, device="cuda").bfloat16()
    got, pending = row_map_of_mask(mask, 128, assign=False)
    rows = int(got.targets.sum()) + 77
    out = permute(x, pending, 256, rows, offsets=got.offsets, pad_offsets=got.pad_offsets)
    where = oracle.routes(got.row_map, 256, got.pad_offsets)
    assert torch.equal(out.out, oracle.permute(x, where, rows))
