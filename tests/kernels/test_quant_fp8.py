# SPDX-License-Identifier: Apache-2.0
"""Quantisation must equal the oracle bit by bit: a different code is a 6% error of that value."""

import pytest
import torch
from moe_backend.kernels.quant_fp8 import quant_fp8, quant_permute
from moe_backend.kernels.unpermute_reduce import unpermute_reduce

from moe_backend import reference


def activations(tokens, hidden, device):
    """Ordinary rows, then zeros, tiny, huge and one outlier per group."""
    x = torch.randn(tokens, hidden, device=device)
    x[1] = 0
    x[2] *= 1e-23
    x[3] *= 6e4
    x[4, ::128] = 3e4
    return x.bfloat16()


@pytest.mark.parametrize("hidden", [128, 384, 2176])
def test_equals_the_oracle(device, hidden, poisoned_memory):
    x = activations(7, hidden, device)
    q, scale = quant_fp8(x)
    want_q, want_scale = reference.quant_fp8(x)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    transposed = quant_fp8(x, by_token=False)[1]
    assert torch.equal(transposed, want_scale.T)


def test_permuted_rows_are_copies(device, poisoned_memory):
    x = activations(6, 256, device)
    rows = torch.tensor([[3, -1], [0, 9], [-1, -1], [7, 1], [2, 4], [8, -1]], dtype=torch.int32)
    q, scale = quant_permute(x, rows.to(device), 12)
    want_q, want_scale = reference.quant_fp8(x)
    for token, slots in enumerate(rows.tolist()):
        for row in slots:
            if row >= 0:
                assert torch.equal(q[row].view(torch.uint8), want_q[token].view(torch.uint8))
                assert torch.equal(scale[:, row], want_scale[token])
    for untouched in (5, 6, 10, 11):  # poisoned and no route names them
        assert (q[untouched].view(torch.uint8) == 0xFF).all()


def test_input_is_not_changed_and_strides_are_refused(device):
    x = activations(5, 256, device)
    before = x.clone()
    quant_fp8(x)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="x: expected a contiguous"):
        quant_fp8(x.T)


@pytest.mark.parametrize("top_k", [1, 3, 22])
def test_reduce_is_the_oracle_in_slot_order(device, top_k, poisoned_memory):
    tokens, hidden = 4, 384
    rows = torch.randn(tokens * top_k + 3, hidden, device=device).bfloat16()
    route_row = torch.randperm(rows.shape[0], device=device)[: tokens * top_k].int()
    route_row = route_row.view(tokens, top_k)
    route_row[0, 0] = -1
    rows[[r for r in range(rows.shape[0]) if r not in set(route_row.flatten().tolist())]] = (
        torch.nan
    )
    weights = torch.rand(tokens, top_k, device=device)
    shared = torch.randn(tokens, hidden, device=device).bfloat16()
    out = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    unpermute_reduce(rows, route_row, weights, out, shared=shared)
    gathered = rows[route_row.long().clamp_min(0)].masked_fill((route_row < 0)[..., None], 0)
    want = reference.unpermute_reduce(gathered, weights, shared).bfloat16()
    assert (out.float() - want.float()).abs().max() <= 0.0079 * want.float().abs().max()
    assert out.isfinite().all()


def test_reduce_writes_only_its_slab(device):
    out = torch.full((3, 512), 7.0, dtype=torch.bfloat16, device=device)
    rows = torch.ones(3, 128, dtype=torch.bfloat16, device=device)
    route_row = torch.arange(3, dtype=torch.int32, device=device).view(3, 1)
    unpermute_reduce(rows, route_row, torch.ones(3, 1, device=device), out, first_column=256)
    assert (out[:, 256:384] == 1).all()
    assert (out[:, :256] == 7).all() and (out[:, 384:] == 7).all()
    with pytest.raises(ValueError, match="do not fit"):
        unpermute_reduce(rows, route_row, torch.ones(3, 1, device=device), out, first_column=448)
