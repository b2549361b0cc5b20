# SPDX-License-Identifier: Apache-2.0
"""Dense router, scores and balance loss: values and gradients against float64, bad input."""

import pytest
import torch

from moe_backend import functional as F
from moe_backend import reference_training as oracle
from moe_backend.types import RouterSpec

# fp32 exponentials and sums of up to 2,304 terms against float64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def tolerance(dtype, experts):
    return max(TOLERANCE[dtype], 4e-7 * experts)


def route(logits, topk, score="sigmoid", pre=False, groups=None, top_groups=None, scale=None, **kw):
    bias = kw.pop("bias", None)
    return F.fused_topk_with_score_function(
        logits, topk, pre, groups, top_groups, scale, score, bias, **kw
    )


def separated(tokens, experts, device):
    """Logits that rounding cannot swap."""
    order = torch.rand(tokens, experts, device=device).argsort(1)
    return (order - experts / 2) * (8.0 / experts)


CASES = [  # tokens, experts, topk, score, pre, groups, top_groups, scale
    (3, 256, 8, "sigmoid", False, 8, 4, 2.5),  # DeepSeek
    (3, 64, 8, "softmax", True, None, None, None),
    (3, 64, 8, "softmax", False, None, None, 1.5),
    (3, 60, 6, "sqrtsoftplus", False, 5, 3, None),  # nothing is a power of two
    (2, 257, 22, "sigmoid", False, None, None, None),
    (2, 2304, 36, "softmax", True, None, None, None),  # thousands of experts
    (3, 12, 1, "sigmoid", False, None, None, 2.0),  # top-1 does not renormalise
    (3, 1, 1, "softmax", False, None, None, None),
    (3, 8, 8, "sqrtsoftplus", False, None, None, None),  # every expert
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_probs_map_and_gradient(case, biased, device):
    tokens, experts, topk, score, pre, groups, top_groups, scale = case
    logits = separated(tokens, experts, device).requires_grad_()
    bias = torch.linspace(-0.1, 0.1, experts, device=device) if biased else None
    probs, routing_map = route(logits, topk, score, pre, groups, top_groups, scale, bias=bias)
    grad = torch.randn_like(probs)
    (got,) = torch.autograd.grad(probs, logits, grad)

    exact = logits.detach().double().requires_grad_()
    spec = RouterSpec(topk, score, groups or 1, top_groups or 1, 0, False, scale or 1.0)
    want, want_map = oracle.router_dense(exact, spec, pre, bias)
    (want_grad,) = torch.autograd.grad(want, exact, grad.double())
    limit = tolerance(torch.float32, experts)
    assert routing_map.dtype is torch.bool and torch.equal(routing_map, want_map)
    assert (probs.double() - want).abs().max() <= limit
    assert (got.double() - want_grad).abs().max() <= limit
    assert not probs[~routing_map].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype, device):
    logits = separated(4, 64, device).to(dtype).requires_grad_()
    probs, routing_map = route(logits, 8)
    want, want_map = oracle.router_dense(logits.detach().double(), RouterSpec(8, "sigmoid"))
    assert probs.dtype is dtype and torch.equal(routing_map, want_map)
    assert (probs.double() - want).abs().max() <= TOLERANCE[dtype]
    probs.sum().backward()
    assert logits.grad.dtype is dtype and logits.grad.isfinite().all()


@pytest.mark.parametrize("form", ["bitmap_u8", 1, F.RoutingMapFormat.BITMAP_U8])
@pytest.mark.parametrize(("experts", "groups"), [(64, None), (60, 5), (7, None)])
def test_bits_are_the_map(form, experts, groups, device):
    logits = separated(3, experts, device).requires_grad_()
    top_groups = groups and 2
    probs, chosen = route(logits, 4, groups=groups, top_groups=top_groups)
    same, bits = route(logits, 4, groups=groups, top_groups=top_groups, routing_map_format=form)
    assert torch.equal(bits, oracle.pack_bits(chosen)) and torch.equal(probs, same)
    grad = torch.randn_like(probs)
    first, second = (torch.autograd.grad(p, logits, grad)[0] for p in (probs, same))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_indices_are_written_to_the_callers_buffer(dtype, device):
    logits = separated(5, 64, device).requires_grad_()
    buffer = torch.full((5, 8), -7, dtype=dtype, device=device)
    probs, indices = route(logits, 8, topk_indices=buffer)
    assert indices is buffer
    assert torch.equal(indices.long(), probs.nonzero()[:, 1].view(5, 8))
    probs.sum().backward()
    assert logits.grad.isfinite().all()


def test_any_leading_dimensions_and_strides(device):
    wide = separated(6, 32, device)
    flat, flat_map = route(wide[:, :16], 4)
    probs, routing_map = route(wide.view(2, 3, 32)[..., :16], 4)
    assert probs.shape == (2, 3, 16) and torch.equal(probs.view(6, 16), flat)
    assert torch.equal(routing_map.view(6, 16), flat_map)
    assert torch.equal(route(wide[1, :16], 4)[0], flat[1])


def test_ties_go_to_the_lowest_id(device):
    _, routing_map = route(torch.zeros(2, 32, device=device), 5)
    assert routing_map[:, :5].all() and not routing_map[:, 5:].any()
    coarse = torch.randint(0, 3, (6, 300), device=device).float()
    _, routing_map = route(coarse, 9, "softmax")
    assert torch.equal(routing_map, oracle.router_dense(coarse, RouterSpec(9))[1])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("score", "pre"), [("softmax", True), ("softmax", False), ("sigmoid", 0)])
def test_nan_rows_choose_k_experts_and_spare_the_others(poison, score, pre, device):
    logits = separated(5, 64, device)
    clean = route(logits, 6, score, pre)[0]
    logits[1], logits[3, 7] = poison, poison
    probs, routing_map = route(logits, 6, score, pre)
    assert (routing_map.sum(1) == 6).all()
    assert torch.equal(probs[[0, 2, 4]], clean[[0, 2, 4]])


def test_no_tokens_forward_and_backward(device):
    logits = torch.empty(0, 16, device=device, requires_grad=True)
    probs, routing_map = route(logits, 4)
    probs.sum().backward()
    assert probs.shape == routing_map.shape == logits.grad.shape == (0, 16)
    chosen, scores = F.fused_compute_score_for_moe_aux_loss(logits, 4, "softmax")
    assert chosen.shape == scores.shape == (0, 16)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("experts", "topk"), [(64, 8), (257, 1), (2304, 36)])
def test_scores_of_all_experts(score, experts, topk, device):
    logits = separated(3, experts, device).requires_grad_()
    chosen, scores = F.fused_compute_score_for_moe_aux_loss(logits, topk, score)
    bits, _ = F.fused_compute_score_for_moe_aux_loss(logits, topk, score, "bitmap_u8")
    grad = torch.randn_like(scores)
    (got,) = torch.autograd.grad(scores, logits, grad)
    exact = logits.detach().double().requires_grad_()
    want, want_map = oracle.router_scores(exact, topk, score)
    limit = tolerance(torch.float32, experts)
    assert scores.dtype is torch.float32 and torch.equal(chosen, want_map)
    assert torch.equal(bits, oracle.pack_bits(want_map))
    assert (scores.double() - want).abs().max() <= limit
    assert (got.double() - torch.autograd.grad(want, exact, grad.double())[0]).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "experts", "sequences"), [(9, 16, 1), (70, 60, 3), (2, 2304, 1)])
def test_aux_loss_and_gradient(dtype, rows, experts, sequences, device):
    probs = torch.rand(rows, experts * sequences, device=device).to(dtype).requires_grad_()
    counts = torch.randint(0, 99, (experts * sequences,), device=device)
    total = torch.tensor(rows * sequences, device=device)
    for tokens in (rows * sequences, total):
        loss = F.fused_moe_aux_loss(probs, counts, tokens, experts, 4 if experts > 4 else 1, 0.01)
        (grad,) = torch.autograd.grad(loss * 3, probs)
        factor = 0.01 * experts / 4
        exact = probs.detach().double().requires_grad_()
        want = oracle.aux_loss(exact, counts, rows * sequences, factor)
        (want_grad,) = torch.autograd.grad(want * 3, exact)
        assert loss.dtype is torch.float32 and loss.shape == ()
        assert abs(loss.item() / want.item() - 1) < 1e-5
        assert (grad.double() - want_grad).abs().max() <= want_grad.abs().max() * (
            1e-6 if dtype is torch.float32 else 2**-7
        )


def test_aux_loss_without_tokens(device):
    probs = torch.empty(0, 8, device=device, requires_grad=True)
    loss = F.fused_moe_aux_loss(probs, torch.zeros(8, device=device), 1, 8, 2, 0.1)
    loss.backward()
    assert loss == 0 and probs.grad.shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.zeros(2, 8).double()), "logits: expected dtype .*float64"),
        (dict(topk=9), "topk: expected 1 to the 8 experts, found 9"),
        (dict(topk=0), "topk: expected 1 to the 8 experts, found 0"),
        (dict(score="relu"), "score_function: expected one of"),
        (dict(groups=3, top_groups=1), "num_groups: expected a divisor of the 8 experts, found 3"),
        (dict(groups=4, top_groups=5), "group_topk: expected 1 to 4, found 5"),
        (dict(groups=4, top_groups=1, topk=3), "topk: expected at most the 2 experts"),
        (dict(groups=4), "group_topk: expected num_groups and group_topk together"),
        (dict(bias=torch.zeros(7)), r"expert_bias: expected shape \(8,\), found \(7,\)"),
        (dict(bias=torch.zeros(8, device="meta")), "expert_bias: expected device cpu, found meta"),
        (dict(routing_map_format="bits"), "routing_map_format: expected .* found 'bits'"),
        (dict(routing_map_format=2), "routing_map_format: expected .* found 2"),
        (dict(topk_indices=torch.zeros(2, 2).int()), r"topk_indices: expected shape \(2, 3\)"),
        (dict(topk_indices=torch.zeros(2, 3)), "topk_indices: expected int16, int32 or int64"),
        (dict(topk_indices=torch.zeros(3, 2).int().T), "topk_indices: expected a contiguous"),
    ],
)
def test_router_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        route(**(dict(logits=torch.zeros(2, 8), topk=3) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(probs=torch.zeros(2)), "probs: expected .* found shape"),
        (dict(probs=torch.zeros(2, 8).long()), "probs: expected dtype"),
        (dict(num_experts=3), "num_experts: expected a divisor of probs' 8 columns, found 3"),
        (dict(topk=9), "topk: expected 1 to 8, found 9"),
        (dict(tokens_per_expert=torch.zeros(4)), r"tokens_per_expert: expected shape \(8,\)"),
        (dict(total_num_tokens=0), "total_num_tokens: expected a positive number, found 0"),
        (dict(total_num_tokens=torch.ones(2)), "total_num_tokens: expected one value"),
    ],
)
def test_aux_loss_names_what_is_wrong(change, message):
    good = dict(
        probs=torch.zeros(2, 8), tokens_per_expert=torch.zeros(8), total_num_tokens=2,
        num_experts=8, topk=2, coeff=0.1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        F.fused_moe_aux_loss(**(good | change))
