# SPDX-License-Identifier: Apache-2.0
"""The judge must pass what is right and notice what is wrong: one scale, one factor, one swap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_backend import reference
from moe_backend.measure import parity_judge as judge
from moe_backend.measure.model_tensors import quantize_blocks
from moe_backend.types import Activation, ExpertWeights, RouterSpec

HIDDEN, INTER, EXPERTS, TOKENS = 256, 128, 8, 64
SPEC = RouterSpec(2, "sigmoid", 2, 1, 2, True, 2.5)
BLOCK = [128, 128]


def experts():
    def one(rows, columns):
        return quantize_blocks(torch.randn(rows, columns) / columns**0.5, BLOCK)

    w13 = [one(2 * INTER, HIDDEN) for _ in range(EXPERTS)]
    w2 = [one(HIDDEN, INTER) for _ in range(EXPERTS)]
    stacked = [torch.stack(part) for pairs in (w13, w2) for part in zip(*pairs, strict=True)]
    return ExpertWeights(*stacked)


@pytest.fixture
def layer():
    facts = judge.LayerFacts(3, experts(), SPEC, torch.randn(EXPERTS) * 0.05, Activation())
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS).bfloat16()
    shared = torch.randn(TOKENS, HIDDEN).bfloat16()
    return facts, {"x": x, "logits": logits, "shared": shared}


def engine(facts, parts, *, exact=False, factor=1.0):
    """What an engine with these weights would have recorded, rounded as engines round."""
    ids, weights, _ = reference.router_topk(parts["logits"], facts.spec, facts.bias)
    run = judge.exact_experts if exact else reference.fused_experts
    out = run(parts["x"], ids, weights * factor, facts.weights, facts.activation).bfloat16()
    return parts | {"out": out + parts["shared"]}


def passes(layers, **differences):
    tokens = judge.TokenParity(4, 1.0, [], 1.0, differences.get("values", [0.01, -0.02, 0.0, 0.03]))
    checks = judge.verdict(layers, tokens, judge.Bounds())
    return {check.name: check.ok for check in checks}


def test_right_engines_pass_with_room(layer):
    facts, parts = layer
    found = judge.judge_layer(facts, engine(facts, parts, exact=True), engine(facts, parts))
    assert all(passes([found]).values())
    assert found.error < 3e-3 and found.worst_cell < 1e-2, "the derivation: bf16 alone"
    # The derivation: three e4m3 roundings of 2.6e-2 each, and none on the default's side.
    assert 3e-2 < found.rounding < 5.5e-2 and found.default_rounding < 6e-3
    assert found.num_tokens == TOKENS and found.layer == 3


def test_large_shared_experts_do_not_break_parity(layer):
    """Adding them rounds the sum, which looked like a fault beside the routed part alone."""
    facts, parts = layer
    parts["shared"] = parts["shared"] * 10
    default = engine(facts, parts)
    assert all(passes([judge.judge_layer(facts, default, engine(facts, parts))]).values())


def falsified(facts, name, change):
    weights = facts.weights
    tensors = {n: getattr(weights, n).clone() for n in ("w13", "w13_scale", "w2", "w2_scale")}
    tensors[name] = change(tensors[name]).contiguous()
    return replace(facts, weights=ExpertWeights(**tensors))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            lambda f: falsified(f, "w2_scale", lambda s: scaled(s, (1, 0, 0), 1.25)),
            id="one block scale of one expert",
        ),
        pytest.param(
            lambda f: falsified(f, "w13_scale", lambda s: s.flip(-1)), id="scales transposed"
        ),
        pytest.param(
            lambda f: falsified(f, "w13", lambda w: w.roll(INTER, dims=1)), id="gate and up swapped"
        ),
        pytest.param(lambda f: replace(f, spec=replace(SPEC, scale=6.25)), id="factor twice"),
        pytest.param(lambda f: replace(f, bias=None), id="bias forgotten"),
        pytest.param(
            lambda f: replace(f, spec=replace(SPEC, renormalize=False)), id="not renormalised"
        ),
        pytest.param(lambda f: replace(f, spec=replace(SPEC, num_groups=1)), id="no groups"),
    ],
)
def test_wrong_plugins_fail(layer, wrong):
    facts, parts = layer
    default = engine(facts, parts, exact=True)
    found = judge.judge_layer(facts, default, engine(wrong(facts), parts))
    named = passes([found])
    assert not (named["layer_error"] and named["layer_worst_cell"])


def scaled(tensor, index, factor):
    tensor[index] *= factor
    return tensor


def test_default_that_computes_something_else_fails(layer):
    """A default that scales differently means that we misread the model, not that we are right."""
    facts, parts = layer
    default = engine(facts, parts, exact=True, factor=0.4)
    assert not passes([judge.judge_layer(facts, default, engine(facts, parts))])["default_rounding"]


def test_nan_never_passes(layer):
    facts, parts = layer
    ours = engine(facts, parts)
    ours["out"][5, 7] = float("nan")
    named = passes([judge.judge_layer(facts, engine(facts, parts), ours)])
    assert not named["layer_error"] and not named["layer_rounding"]
    good = judge.judge_layer(facts, engine(facts, parts), engine(facts, parts))
    assert not passes([good], values=[float("nan"), 0.0])["mean_logprob_difference"]


def side(rows, output):
    return {
        "sequences": [[9, 1, 2]],
        "forced": [rows],
        "greedy": [{"prompt": [9], "output": output}],
    }


def test_tokens_are_compared_on_the_same_text():
    default = side([[[1, -0.1], [2, -2.5]], [[2, -0.4], [1, -0.9]]], [1, 2])
    ours = side([[[1, -0.2], [2, -2.0]], [[1, -0.5], [2, -0.6]]], [1, 1])
    found = judge.compare_tokens(default, ours)
    assert found.differences == pytest.approx([-0.1, -0.2])
    assert found.num_positions == 2 and found.agreement == 0.5
    assert found.flip_gaps == pytest.approx([0.5]) and found.greedy_agreement == 0.5


def test_flip_to_an_unlisted_token_counts_at_least_the_last_alternative():
    default = side([[[1, -0.1], [2, -3.1]], [[2, -0.4], [1, -0.9]]], [1])
    ours = side([[[7, -0.1], [1, -0.2]], [[2, -0.4], [1, -0.9]]], [7])
    assert judge.compare_tokens(default, ours).flip_gaps == pytest.approx([3.0])


def test_quantile_counts_from_the_smallest():
    values = [float(v) for v in range(1, 101)]
    assert judge.quantile(values, 0.99) == 99.0 and judge.quantile(values, 0.5) == 50.0
    assert judge.quantile([4.0], 0.5) == 4.0


def test_prefix_agreement_stops_at_the_first_difference():
    assert judge.prefix_agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert judge.prefix_agreement([1, 2], [1, 2]) == 1.0
