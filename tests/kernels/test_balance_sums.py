# SPDX-License-Identifier: Apache-2.0
"""The balance counters' kernel against the torch execution of the same operator."""

import pytest
import torch

from moe_backend import RouterSpec, balance, ops, reference


def sums(device, ids, logits, padding, score, experts):
    from moe_backend.kernels.balance_sums import balance_sums

    counters = balance.Counters(experts, device)
    for _ in range(2):  # adds, and does not write
        balance_sums(counters.tokens, counters.scores, ids, logits, padding, score)
    return counters


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 8, 2), (9, 256, 8), (5, 7, 1), (3, 2304, 36)],  # one block, all rows, odd sizes, wide
)
def test_like_the_reference(device, tokens, experts, top_k, score):
    logits = torch.randn(tokens, experts, device=device)
    ids = reference.router_topk(logits, RouterSpec(top_k, score), None)[0]
    padding = torch.arange(tokens, device=device) % 3 == 2
    for some in (None, padding):
        for values in (logits, None):
            found = sums(device, ids, values, some, score, experts)
            wanted = balance.Counters(experts, device)
            for _ in range(2):
                balance.add_in_torch(wanted.tokens, wanted.scores, ids, values, some, score)
            assert torch.equal(found.tokens, wanted.tokens)
            torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-9)


def test_absent_stale_and_broken_rows(device):
    ids = torch.tensor([[0, -1], [3, 99], [1, 2]], dtype=torch.int32, device=device)
    logits = torch.zeros(3, 4, device=device)
    logits[1, 2] = torch.nan
    found = sums(device, ids, logits, None, "softmax", 4)
    assert found.tokens.tolist() == [2, 2, 2, 2]
    assert found.scores.tolist() == [1.0, 1.0, 1.0, 1.0], "the row with NaN adds nothing"


def test_strided_logits_and_other_dtypes(device):
    wide = torch.randn(6, 40, device=device).bfloat16()
    ids = torch.randint(0, 16, (6, 4), device=device)
    found = sums(device, ids, wide[:, 8:24], None, "sigmoid", 16)
    wanted = sums(device, ids.int(), wide[:, 8:24].float().contiguous(), None, "sigmoid", 16)
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores, wanted.scores)


def test_nothing_to_count(device):
    empty = torch.empty(0, 2, dtype=torch.int32, device=device)
    found = sums(device, empty, torch.empty(0, 8, device=device), None, "softmax", 8)
    assert not found.tokens.any() and not found.scores.any()


@pytest.mark.gpu
def test_a_graph_follows_logits_and_padding():
    """Replays read what lies in the buffers then: counters move, the mask is the new one."""
    spec = RouterSpec(8, "sigmoid", 8, 4, 0, True)
    logits, bias = torch.randn(64, 256, device="cuda"), torch.rand(256, device="cuda")
    padding = torch.zeros(64, dtype=torch.bool, device="cuda")
    counters = balance.Counters(256, "cuda")

    def step():
        ids, _, _ = torch.ops.moe_backend.router_topk(logits, bias, *ops.flat(spec))
        balance.observe(counters, ids, logits=logits, spec=spec, padding=padding)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    counters.clear()
    wanted = balance.Counters(256)
    for seed in range(20):
        logits.copy_(torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)))
        padding.copy_(torch.arange(64) >= 64 - seed)
        graph.replay()
        ids = reference.router_topk(logits.cpu(), spec, bias.cpu())[0]
        balance.observe(wanted, ids, logits=logits.cpu(), spec=spec, padding=padding.cpu())
    assert torch.equal(counters.tokens.cpu(), wanted.tokens)
    torch.testing.assert_close(counters.scores.cpu(), wanted.scores, rtol=1e-5, atol=1e-9)
