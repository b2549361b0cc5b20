# SPDX-License-Identifier: Apache-2.0
"""Routing defects that happened in real systems, each as a test of the public face."""

import pytest
import torch
from factories import expert_weights

from moe_backend import RouterSpec, route
from moe_backend.pipeline import moe_layer


def unique_and_in_range(ids: torch.Tensor, num_experts: int) -> bool:
    sorted_ids = ids.sort(-1).values
    distinct = (sorted_ids[:, 1:] != sorted_ids[:, :-1]).all()
    return bool(distinct and (ids >= 0).all() and (ids < num_experts).all())


DEEPSEEK = dict(top_k=8, score="sigmoid", num_groups=8, top_groups=4, renormalize=True)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_poisoned_rows_give_unique_ids_and_leave_neighbours_alone(poison, score):
    logits = torch.randn(6, 64)
    args = dict(top_k=8, score=score, num_groups=8, top_groups=4, renormalize=True)
    clean = route(logits, **args)
    logits[2] = poison
    logits[4, 5] = poison
    dirty = route(logits, **args)
    assert unique_and_in_range(dirty.topk_ids, 64)
    for row in (0, 1, 3, 5):
        assert torch.equal(dirty.topk_ids[row], clean.topk_ids[row])
        assert torch.equal(dirty.topk_weights[row], clean.topk_weights[row])


def test_sigmoid_underflow_renormalises_to_finite_weights():
    weights = route(torch.full((2, 256), -100.0), **DEEPSEEK).topk_weights
    assert weights.isfinite().all()


def test_large_bias_keeps_its_low_bits():
    """A bias of 6.8 to 7.1 in bf16 has steps of 0.03: most tokens would change experts."""
    logits = torch.randn(512, 256) * 0.3  # the spread of a trained router
    bias = torch.rand(256) * 0.3 + 6.8
    exact = route(logits, bias=bias, **DEEPSEEK).topk_ids
    wide = route(logits.double().float(), bias=bias.double(), **DEEPSEEK).topk_ids
    coarse = route(logits, bias=bias.bfloat16(), **DEEPSEEK).topk_ids
    assert torch.equal(exact, wide)
    assert (exact.sort(-1).values != coarse.sort(-1).values).any(-1).float().mean() > 0.5


def test_bias_selects_and_never_weighs():
    logits, bias = torch.randn(16, 64), torch.randn(64) * 3
    routing = route(logits, top_k=4, score="sigmoid", bias=bias)
    assert torch.allclose(routing.topk_weights, logits.sigmoid().gather(1, routing.topk_ids.long()))


def test_scale_is_applied_once_and_after_renormalising():
    weights = route(torch.randn(16, 256), scale=2.5, **DEEPSEEK).topk_weights
    assert torch.allclose(weights.sum(-1), torch.full((16,), 2.5))


def test_ties_go_to_the_lowest_id():
    ids = route(torch.zeros(2, 64), top_k=8, score="sigmoid").topk_ids
    assert ids.tolist() == [list(range(8))] * 2


def test_ties_at_the_group_boundary_take_the_first_groups():
    ids = route(torch.zeros(1, 64), top_k=8, score="sigmoid", num_groups=8, top_groups=4).topk_ids
    assert ids.tolist() == [list(range(8))]


def test_unchosen_groups_stay_out_even_when_the_rest_is_minus_infinity():
    logits = torch.full((1, 16), float("-inf"))
    logits[0, 4] = 1.0
    routing = route(logits, top_k=4, score="softmax", num_groups=4, top_groups=1)
    assert routing.topk_ids.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("num_experts", [1, 7, 128, 257, 2304])
@pytest.mark.parametrize("top_k", [1, 8, 22, 32])
def test_any_number_of_experts_is_right_or_refused(num_experts, top_k):
    logits = torch.randn(4, num_experts)
    if top_k > num_experts:
        with pytest.raises(ValueError, match="top_k"):
            route(logits, top_k=top_k)
    else:
        routing = route(logits, top_k=top_k, score="sigmoid")
        assert unique_and_in_range(routing.topk_ids, num_experts)
        assert torch.allclose(routing.topk_weights, logits.sigmoid().topk(top_k).values)


@pytest.mark.parametrize(
    "wrong, named",
    [
        (dict(top_k=0), "top_k"),
        (dict(score="tanh"), "score"),
        (dict(num_groups=5, top_groups=1), "num_groups"),
        (dict(num_groups=4, top_groups=5), "top_groups"),
        (dict(bias=torch.zeros(3)), "bias"),
    ],
)
def test_bad_arguments_name_themselves(wrong, named):
    with pytest.raises(ValueError, match=named):
        route(torch.randn(2, 64), **{"top_k": 4, **wrong})


def test_integer_logits_are_refused():
    with pytest.raises(ValueError, match="logits: expected a floating dtype, found torch.int64"):
        route(torch.ones(2, 8, dtype=torch.int64), top_k=2)


def test_one_requests_nan_does_not_touch_another():
    weights, spec = expert_weights(8, 256, 128), RouterSpec(2, "sigmoid")
    x, logits = torch.randn(5, 256).bfloat16(), torch.randn(5, 8)
    clean = moe_layer(x, logits, weights, spec)
    x[3], logits[3] = float("nan"), float("nan")
    dirty = moe_layer(x, logits, weights, spec)
    keep = [0, 1, 2, 4]
    assert torch.equal(dirty[keep], clean[keep])
