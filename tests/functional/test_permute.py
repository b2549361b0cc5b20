# SPDX-License-Identifier: Apache-2.0
"""Permutation and back: values and gradients against plain indexing, and its known defects."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_backend import functional as F
from moe_backend import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def routing(tokens, experts, topk, device, drop=0.2):
    """A mask with tokens of fewer routes and tokens of none, and the same as indices."""
    ids = torch.rand(tokens, experts, device=device).topk(topk).indices
    ids[torch.rand(tokens, topk, device=device) < drop] = -1
    mask = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=device)
    return mask.scatter_(1, ids.where(ids >= 0, experts), True)[:, :experts], ids.int()


def by_expert(mask, align=1):
    """(token, expert, row) of every route, plainly."""
    expert, token = mask.T.nonzero(as_tuple=True)
    counts = mask.sum(0)
    targets = (counts + align - 1) // align * align
    start = targets.cumsum(0) - targets
    inside = torch.arange(len(token), device=mask.device) - (counts.cumsum(0) - counts)[expert]
    return token, expert, start[expert] + inside, targets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "hidden", "align"),
    [(5, 8, 2, 128, 16), (40, 12, 3, 200, 8), (7, 4, 1, 136, 1), (3, 300, 11, 128, 4)],
)
def test_permute_and_pad(dtype, tokens, experts, topk, hidden, align, device):
    mask, _ = routing(tokens, experts, topk, device)
    x = torch.randn(tokens, hidden, device=device)
    probs = torch.rand(tokens, experts, device=device, requires_grad=True)
    x, scale = reference.quant_fp8(x) if dtype is torch.float8_e4m3fn else (x.to(dtype), None)
    inp = x if scale is None else F.Fp8Rows(x, scale)
    token, expert, row, targets = by_expert(mask, align)
    out, moved, row_map, pads, padded = F.moe_permute_and_pad_with_probs(
        inp, probs, mask, mask.sum(0), align
    )
    rows = out if scale is None else out.data
    assert torch.equal(padded, targets) and rows.shape == (int(targets.sum()), hidden)
    want = torch.zeros(rows.shape, device=device).index_copy(0, row, x.float()[token])
    assert torch.equal(rows.float(), want), "rows, and zeros between them"
    if scale is not None:
        want = scale.new_zeros(out.scale.shape).index_copy(0, row, scale[token])
        assert torch.equal(out.scale, want)
    want = torch.zeros_like(moved).index_copy(0, row, probs.detach()[token, expert])
    assert torch.equal(moved, want)
    grad = torch.rand_like(moved)
    (back,) = torch.autograd.grad(moved, probs, grad)
    want = torch.zeros_like(probs)
    want[token, expert] = grad[row]
    assert torch.equal(back, want)


def test_gradients_against_float64(device):
    mask, _ = routing(9, 6, 3, device)
    x = torch.randn(9, 40, device=device, requires_grad=True)
    probs = torch.rand(9, 6, device=device, requires_grad=True)
    rows, moved, row_map, pads, targets = F.moe_permute_and_pad_with_probs(
        x, probs, mask, mask.sum(0), 8
    )
    merged = F.moe_unpermute(rows * 2 + rows**2, row_map, probs, pad_offsets=pads)
    loss = (merged * merged.cos()).sum() + (moved**3).sum()
    got = torch.autograd.grad(loss, (x, probs))

    exact = [t.detach().double().requires_grad_() for t in (x, probs)]
    weight = torch.where(mask, exact[1], 0.0)
    merged = (exact[0] * 2 + exact[0] ** 2) * weight.sum(1, keepdim=True)
    want = torch.autograd.grad((merged * merged.cos()).sum() + (weight**3).sum(), exact)
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max() <= 1e-4 * w.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mask", "index"])
def test_unpermute_sums_what_permute_spread(kind, dtype, device):
    mask, ids = routing(11, 8, 3, device)
    x = torch.randn(11, 72, device=device).to(dtype).requires_grad_()
    route = mask if kind == "mask" else ids
    rows, row_map = F.moe_permute(x, route, ids.numel(), map_type=kind)
    token, _, row, _ = by_expert(mask)
    assert torch.equal(rows[row], x.detach()[token]) and not rows[len(row) :].any()
    out = F.moe_unpermute(rows, row_map, map_type=kind, restore_shape=x.shape)
    torch.testing.assert_close(out, x.detach() * mask.sum(1, keepdim=True).to(dtype))
    grad = torch.randn_like(out)
    (back,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(back, grad * mask.sum(1, keepdim=True).to(dtype))
    weight = torch.rand(11, route.shape[1], device=device, requires_grad=True)
    out = F.moe_unpermute(rows.detach(), row_map, map_type=kind, probs=weight)
    used = torch.where(mask if kind == "mask" else ids >= 0, weight, 0.0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), x.float() * used, atol=2e-2, rtol=2e-2)


def test_topk_of_one(device):
    """TE leaves it untested: an index map of one column is no mask of no experts."""
    ids = torch.tensor([[2], [0], [2], [1]], dtype=torch.int32, device=device)
    x = torch.randn(4, 16, device=device)
    rows, row_map = F.moe_permute(x, ids, map_type="index")
    assert torch.equal(rows, x[[1, 3, 0, 2]])
    assert torch.equal(F.moe_unpermute(rows, row_map, map_type="index"), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_on_cpu_or_device_and_int64_ids(dtype, device):
    mask, ids = routing(6, 8, 2, device)
    x, probs = torch.randn(6, 16, device=device), torch.rand(6, 8, device=device)
    for home in ("cpu", device):
        counts = mask.sum(0).to(home, dtype)
        out = F.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
        assert out[4].device.type == torch.device(home).type and out[4].dtype is torch.int64
        assert out[0].shape[0] == int(out[4].sum())
    rows, _ = F.moe_permute(x, ids.to(dtype), map_type="index")
    assert torch.equal(rows, F.moe_permute(x, ids, map_type="index")[0])


def test_given_capacity_leaves_zero_rows_at_the_end(device):
    mask, _ = routing(6, 8, 2, device)
    x, probs = torch.randn(6, 16, device=device), torch.rand(6, 8, device=device)
    exact = F.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4)
    loose = F.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4, num_out_tokens=60)
    used = exact[0].shape[0]
    assert torch.equal(loose[0][:used], exact[0]) and not loose[0][used:].any()
    assert loose[0].shape[0] == 60 and torch.equal(loose[4], exact[4])


def test_no_tokens_and_no_routes(device):
    x = torch.empty(0, 16, device=device, requires_grad=True)
    mask = torch.empty(0, 8, dtype=torch.bool, device=device)
    probs = torch.empty(0, 8, device=device, requires_grad=True)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    rows, moved, row_map, pads, _ = F.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
    out = F.moe_unpermute(rows, row_map, probs, pad_offsets=pads)
    (out.sum() + moved.sum()).backward()
    assert rows.shape == out.shape == x.grad.shape == (0, 16) and probs.grad.shape == (0, 8)
    x = torch.randn(3, 16, device=device, requires_grad=True)
    rows, row_map = F.moe_permute(x, torch.zeros(3, 8, device=device).bool(), 5)
    out = F.moe_unpermute(rows, row_map)
    out.sum().backward()
    assert rows.shape == (5, 16) and not rows.any() and not out.any() and not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_sort_chunks(dtype, device):
    sizes = torch.tensor([3, 0, 5, 1], device=device)
    order = torch.tensor([2, 3, 1, 0], device=device)
    x = torch.randn(9, 128, device=device).to(dtype)
    probs = torch.rand(9, device=device, requires_grad=True)
    index = [3, 4, 5, 6, 7, 8, 0, 1, 2]
    out, moved = F.moe_sort_chunks_by_index_with_probs(x, probs, sizes.cpu(), order.cpu())
    assert torch.equal(out.float(), x.float()[index]) and torch.equal(moved, probs[index])
    grad = torch.rand(9, device=device)
    (back,) = torch.autograd.grad(moved, probs, grad)
    assert torch.equal(back[index], grad)
    if dtype is torch.float32:
        leaf = x.clone().requires_grad_()
        (back,) = torch.autograd.grad(F.moe_sort_chunks_by_index(leaf, sizes, order), leaf, x)
        assert torch.equal(back[index], x)
    else:
        scale = torch.rand(9, 1, device=device)
        out = F.moe_sort_chunks_by_index(F.Fp8Rows(x, scale), sizes, order)
        assert torch.equal(out.scale, scale[index])


def test_sort_chunks_of_nothing(device):
    x = torch.empty(0, 8, device=device, requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64, device=device)
    F.moe_sort_chunks_by_index(x, none, none + torch.arange(2, device=device)).sum().backward()
    assert x.grad.shape == (0, 8)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_round_trip_of_any_mask(device, data):
    tokens = data.draw(st.integers(1, 12), "tokens")
    experts = data.draw(st.integers(1, 20), "experts")
    align = data.draw(st.sampled_from([1, 2, 16]), "align")
    mask = torch.rand(tokens, experts) < data.draw(st.floats(0, 1), "density")
    mask = mask.to(device)
    x, probs = torch.randn(tokens, 24, device=device), torch.rand(tokens, experts, device=device)
    rows, _, row_map, pads, targets = F.moe_permute_and_pad_with_probs(
        x, probs, mask, mask.sum(0), align
    )
    token, _, row, want = by_expert(mask, align)
    assert torch.equal(rows[row], x[token]) and torch.equal(targets, want)
    out = F.moe_unpermute(rows, row_map, pad_offsets=pads)
    torch.testing.assert_close(out, x * mask.sum(1, keepdim=True), atol=1e-5, rtol=1e-5)


MASK = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(inp=torch.zeros(2)), r"inp: expected \[num_tokens, hidden\], found shape \(2,\)"),
        (dict(inp=torch.zeros(2, 4).double()), "inp: expected dtype"),
        (dict(routing_map=MASK[:1]), r"routing_map: expected shape \(2, num_experts\)"),
        (dict(routing_map=MASK.float()), "routing_map: expected bool or integers"),
        (dict(routing_map=MASK.to("meta")), "routing_map: expected device cpu, found meta"),
        (dict(probs=torch.ones(2, 4)), r"probs: expected shape \(2, 3\), found \(2, 4\)"),
        (dict(probs=torch.ones(2, 3).long()), "probs: expected dtype"),
        (dict(tokens_per_expert=torch.ones(4).int()), r"tokens_per_expert: expected shape \(3,\)"),
        (dict(tokens_per_expert=torch.ones(3)), "tokens_per_expert: expected integers"),
        (dict(align_size=0), "align_size: expected at least 1, found 0"),
        (dict(align_size=-4), "align_size: expected at least 1, found -4"),
        (dict(num_out_tokens=5), "num_out_tokens: expected at least 12, found 5"),
        (
            dict(inp=F.Fp8Rows(torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 2))),
            r"inp.scale: expected shape \(2, 1\), found \(2, 2\)",
        ),
    ],
)
def test_permute_names_what_is_wrong(change, message):
    good = dict(
        inp=torch.zeros(2, 4), probs=torch.ones(2, 3), routing_map=MASK,
        tokens_per_expert=MASK.sum(0), align_size=4, num_out_tokens=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        F.moe_permute_and_pad_with_probs(**(good | change))


def test_too_few_rows_name_the_number_needed():
    with pytest.raises(ValueError, match="num_out_tokens: expected at least 4, found 3"):
        F.moe_permute(torch.zeros(2, 4), MASK, 3)
    with pytest.raises(ValueError, match="map_type: expected 'mask' or 'index', found 'ids'"):
        F.moe_permute(torch.zeros(2, 4), MASK, 4, map_type="ids")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(inp=torch.zeros(4)), "inp: expected"),
        (dict(inp=torch.zeros(4, 4).to(torch.float8_e4m3fn)), "inp: expected dtype"),
        (dict(row_id_map=torch.zeros(2, 7)), "row_id_map: expected int32"),
        (dict(row_id_map=torch.zeros(2, 6).int()), "row_id_map: expected the map of a mask"),
        (dict(merging_probs=torch.ones(2, 4)), r"merging_probs: expected shape \(2, 3\)"),
        (dict(restore_shape=(3, 4)), r"restore_shape: expected \(2, 4\), found \(3, 4\)"),
        (dict(pad_offsets=torch.zeros(4).int()), r"pad_offsets: expected shape \(3,\)"),
    ],
)
def test_unpermute_names_what_is_wrong(change, message):
    good = dict(inp=torch.zeros(4, 4), row_id_map=torch.zeros(2, 7, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        F.moe_unpermute(**(good | change))
