# SPDX-License-Identifier: Apache-2.0
"""The serving router against its oracle, and the routing defects that happened elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_backend import reference
from moe_backend.types import RouterSpec

WEIGHT_TOLERANCE = 1e-5  # fp32 exponentials of a GPU against torch's: a few ulp of values below 3
DEEPSEEK = RouterSpec(8, "sigmoid", 8, 4, 0, True, 2.5)


def run(logits, spec, bias=None, counts=None):
    from moe_backend.kernels.router_topk import router_topk

    return router_topk(logits, spec, bias, counts)


def separated(num_tokens, num_experts, device, dtype=torch.float32):
    """Logits no two of which are near: rounding cannot swap them. bf16 holds 256 such values."""
    order = torch.rand(num_tokens, num_experts, device=device).argsort(1)
    return ((order - num_experts / 2) * (8.0 / num_experts)).to(dtype)


def check_invariants(out, num_tokens, num_experts, spec):
    ids = out.topk_ids.long().cpu()
    assert ids.shape == (num_tokens, spec.top_k) and out.topk_weights.dtype is torch.float32
    assert ((ids >= 0) & (ids < num_experts)).all()
    ordered = ids.sort(1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all(), "an expert was chosen twice"
    groups = ids // (num_experts // spec.num_groups)
    assert all(len(set(row)) <= spec.top_groups for row in groups.tolist())
    histogram = torch.bincount(ids.flatten(), minlength=num_experts)
    assert torch.equal(out.counts.long().cpu(), histogram)


def check(logits, spec, bias=None):
    out = run(logits, spec, bias)
    ids, weights, counts = reference.router_topk(logits, spec, bias)
    check_invariants(out, *logits.shape, spec)
    assert torch.equal(out.topk_ids, ids)
    assert torch.equal(out.counts, counts)
    torch.testing.assert_close(
        out.topk_weights, weights, atol=WEIGHT_TOLERANCE, rtol=WEIGHT_TOLERANCE, equal_nan=True
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "spec"),
    [
        (1, 256, DEEPSEEK),  # one program stores its counts
        (21, 256, DEEPSEEK),  # several programs, a last block with dead rows
        (9, 128, RouterSpec(8, "softmax", renormalize=True)),
        (6, 512, RouterSpec(10, "softmax")),
        (5, 257, RouterSpec(22, "sqrtsoftplus", renormalize=True)),  # not a power of two
        (3, 2304, RouterSpec(36, "sigmoid")),  # several warps a row
        (4, 60, RouterSpec(6, "softmax", 5, 3)),  # neither groups nor members a power of two
        (4, 96, RouterSpec(6, "sigmoid", 3, 2, 3)),  # a group's three best count
        (4, 7, RouterSpec(7, "sigmoid")),  # every expert
        (3, 1, RouterSpec(1, "softmax")),
        (3, 64, RouterSpec(8, "sigmoid", 64, 8)),  # groups of one expert
    ],
)
def test_ids_weights_and_counts(num_tokens, num_experts, spec, device, poisoned_memory):
    bias = torch.linspace(-0.1, 0.1, num_experts, device=device)
    check(separated(num_tokens, num_experts, device), spec, bias)
    check(separated(num_tokens, num_experts, device), spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_every_dtype_are_scored_in_fp32(dtype, device):
    check(separated(5, 128, device, dtype), RouterSpec(8, "sigmoid", 4, 2))


def test_strided_rows_and_columns(device):
    wide = separated(5, 128, device)
    check(wide[:, 32:96], RouterSpec(4, "softmax"))
    check(wide.T[:96], RouterSpec(2, "softmax", 5, 2, 1))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_nan_logits_never_repeat_an_expert_and_spare_the_neighbours(poison, score, device):
    spec = RouterSpec(8, score, 8, 4, 0, True)
    logits = separated(7, 64, device)
    clean = run(logits, spec)
    logits[2], logits[5, 3] = poison, poison
    check(logits, spec)
    dirty = run(logits, spec)
    spared = [0, 1, 3, 4, 6]
    assert torch.equal(dirty.topk_ids[spared], clean.topk_ids[spared])
    assert torch.equal(dirty.topk_weights[spared], clean.topk_weights[spared])


def test_sigmoid_underflow_is_not_zero_over_zero(device):
    out = run(torch.full((2, 256), -100.0, device=device), DEEPSEEK)
    assert out.topk_weights.isfinite().all()


def test_ties_go_to_the_lowest_id_and_the_lowest_group(device):
    check(torch.zeros(2, 64, device=device), RouterSpec(8, "sigmoid"))
    check(torch.zeros(2, 64, device=device), RouterSpec(8, "sigmoid", 8, 4))
    coarse = torch.randint(0, 3, (9, 64), device=device).float()
    check(coarse, RouterSpec(8, "sigmoid"))
    check(coarse, RouterSpec(8, "sigmoid", 8, 3))


def test_bias_of_seven_keeps_its_low_bits_and_never_weighs(device):
    logits = torch.zeros(3, 256, device=device)
    bias = 6.8 + 0.3 * torch.rand(256, device=device).argsort() / 256
    out = run(logits, RouterSpec(8, "sigmoid"), bias)
    assert torch.equal(out.topk_ids[0].long(), bias.argsort(descending=True)[:8])
    assert (out.topk_weights == 0.5).all()


def test_scale_is_applied_once_after_renormalising(device):
    weights = run(separated(4, 256, device), DEEPSEEK).topk_weights
    torch.testing.assert_close(weights.sum(1), torch.full((4,), 2.5, device=device))


def test_group_totals_of_infinities_do_not_exclude_every_group(device):
    logits = separated(2, 16, device)
    bias = torch.zeros(16, device=device)
    bias[0], bias[1], bias[5] = float("inf"), float("-inf"), float("nan")
    check(logits, RouterSpec(4, "sigmoid", 4, 2), bias)


def test_no_tokens(device, poisoned_memory):
    out = run(torch.empty(0, 256, device=device), DEEPSEEK)
    assert out.topk_ids.shape == (0, 8) and not out.counts.any()


def test_counts_may_be_left_out(device):
    from moe_backend.kernels.router_topk import router_topk

    logits, spec = separated(9, 32, device), RouterSpec(4, "sigmoid")
    out = router_topk(logits, spec, want_counts=False)
    assert out.counts is None and torch.equal(out.topk_ids, run(logits, spec).topk_ids)


def test_callers_counts_are_added_to(device):
    logits, spec = separated(9, 32, device), RouterSpec(4, "sigmoid")
    counts = torch.zeros(32, dtype=torch.int32, device=device)
    once = run(logits, spec).counts
    run(logits, spec, counts=counts)
    run(logits, spec, counts=counts)
    assert torch.equal(counts, 2 * once)


def test_line_of_counters_is_left_zero(device, monkeypatch):
    """128 tokens a group: the second group is where the tickets and copies first meet."""
    from moe_backend.kernels import router_topk as module

    line = torch.zeros(2048, dtype=torch.int32, device=device)
    monkeypatch.setattr(module, "zeroed_line", lambda device, size: line)
    spec = RouterSpec(2, "sigmoid")
    for num_tokens in (2, 129):
        out = run(separated(num_tokens, 32, device), spec)
        assert not line.any()
        assert torch.equal(out.counts.long(), torch.bincount(out.topk_ids.flatten(), minlength=32))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_gives_valid_routes(data):
    groups = data.draw(st.integers(1, 6), "groups")
    num_experts = groups * data.draw(st.integers(1, 20), "per group")
    top_groups = data.draw(st.integers(1, groups), "top groups")
    reach = num_experts // groups * top_groups
    top_k = data.draw(st.integers(1, min(36, reach)), "k")
    candidates = min(num_experts // groups, max(1, top_k // top_groups))
    score = data.draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]), "score")
    spec = RouterSpec(top_k, score, groups, top_groups, candidates, data.draw(st.booleans()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = data.draw(st.integers(1, 9), "tokens")
    check(separated(tokens, num_experts, device), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.zeros(2, 8, dtype=torch.int32)), "logits: expected a floating"),
        (dict(logits=torch.zeros(8)), r"logits: .*found shape \(8,\)"),
        (dict(spec=RouterSpec(9)), "top_k: expected 1 to 8, found 9"),
        (dict(spec=RouterSpec(2, num_groups=3)), "num_groups: expected a divisor of 8, found 3"),
        (dict(spec=RouterSpec(3, num_groups=4)), "top_k: expected 1 to 2, found 3"),
        (dict(bias=torch.zeros(7)), r"bias: expected shape \(8,\)"),
        (dict(bias=torch.zeros(8, device="meta")), "bias: .*on cpu, found .*on meta"),
        (dict(counts=torch.zeros(8)), "counts: expected int32"),
    ],
)
def test_bad_input_names_tensor_expected_and_found(change, message):
    good = dict(logits=torch.zeros(2, 8), spec=RouterSpec(2), bias=None, counts=None)
    with pytest.raises(ValueError, match=message):
        run(**(good | change))


@pytest.mark.gpu
def test_two_thousand_repeats_are_bit_identical():
    logits = torch.randn(4096, 256, device="cuda")
    first = run(logits, DEEPSEEK)
    for _ in range(2000):
        again = run(logits, DEEPSEEK)
        assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_captured_launch_follows_new_logits():
    static = torch.randn(4096, 256, device="cuda")
    run(static, DEEPSEEK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, DEEPSEEK)
        again = run(static, DEEPSEEK)
    for _ in range(100):
        static.normal_()
        graph.replay()
        expected = run(static, DEEPSEEK)
        assert all(map(torch.equal, out, expected)) and torch.equal(again.counts, out.counts)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 1024, 16384])
def test_full_size(num_tokens):
    bias = torch.linspace(-0.1, 0.1, 256, device="cuda")
    check(separated(num_tokens, 256, "cuda"), DEEPSEEK, bias)
    check(separated(num_tokens, 512, "cuda"), RouterSpec(10, "softmax"))
    check(separated(num_tokens, 2304, "cuda"), RouterSpec(36, "sigmoid"))


@pytest.mark.gpu
def test_more_than_two_billion_logits():
    num_tokens = 2**31 // 2304 + 1000
    logits = torch.randn(num_tokens, 2304, device="cuda", dtype=torch.bfloat16)
    out = run(logits, RouterSpec(8, "sigmoid"))
    tail = run(logits[-1000:], RouterSpec(8, "sigmoid"))
    assert torch.equal(out.topk_ids[-1000:], tail.topk_ids)
    assert out.counts.sum() == num_tokens * 8
