# SPDX-License-Identifier: Apache-2.0
"""The public face: operators, torch.compile, bad input."""

import pytest
import torch
from factories import expert_weights, routing

from moe_backend import ExpertWeights, RouterSpec, Routing, fused_experts, moe_layer, ops, route
from moe_backend.types import FP8

SPEC = RouterSpec(2, "sigmoid", 4, 2, 1, True, 2.5)


@pytest.fixture
def comparable_fp8(monkeypatch):
    """opcheck compares inputs before and after with allclose, which torch lacks for e4m3."""
    allclose = torch.allclose

    def by_bytes(a, b, **kwargs):
        if a.dtype is FP8:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, **kwargs)

    monkeypatch.setattr(torch, "allclose", by_bytes)


def tensors(w: ExpertWeights):
    return w.w13, w.w13_scale, w.w2, w.w2_scale


def test_opcheck_router():
    for bias in (None, torch.randn(8)):
        args = (torch.randn(5, 8), bias, *ops.flat(SPEC))
        torch.library.opcheck(torch.ops.moe_backend.router_topk.default, args)


def test_opcheck_experts(comparable_fp8):
    w, r = expert_weights(8), routing(5, 8, 2)
    x = torch.randn(5, 256).bfloat16()
    for extra in ((None, None), (torch.arange(8, dtype=torch.int32), x.clone())):
        args = (x, r.topk_ids, r.topk_weights, *tensors(w), *extra, 1.0, None)
        torch.library.opcheck(torch.ops.moe_backend.fused_experts.default, args)


def test_opcheck_layer(comparable_fp8):
    x, logits = torch.randn(5, 256).bfloat16(), torch.randn(5, 8)
    args = (x, logits, None, *tensors(expert_weights(8)), None, *ops.flat(SPEC), 1.0, 7.0)
    torch.library.opcheck(torch.ops.moe_backend.moe_layer.default, args)


def test_layer_is_route_then_experts():
    w, x, logits = expert_weights(8), torch.randn(6, 256).bfloat16(), torch.randn(6, 8)
    bias = torch.randn(8)
    r = route(logits, 2, "sigmoid", bias, 4, 2, True, 2.5)
    parts = fused_experts(x, r, w)
    assert torch.equal(moe_layer(x, logits, w, SPEC, bias=bias), parts)


def test_shared_output_is_added_before_rounding():
    w, r, x = expert_weights(8), routing(6, 8, 2), torch.randn(6, 256).bfloat16()
    shared = torch.randn(6, 256).bfloat16()
    fused = fused_experts(x, r, w, shared_output=shared).float()
    apart = fused_experts(x, r, w).float() + shared.float()
    assert torch.allclose(fused, apart, rtol=2**-7, atol=2**-7)


def test_inputs_are_not_changed_and_the_result_is_fresh():
    w, r, x = expert_weights(8), routing(6, 8, 2), torch.randn(6, 256).bfloat16()
    before = x.clone()
    out = fused_experts(x, r, w)
    assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()


def test_compiles_into_one_graph():
    w, x, logits = expert_weights(8), torch.randn(6, 256).bfloat16(), torch.randn(6, 8)

    def layer(x, logits):
        return moe_layer(x, logits, w, SPEC) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, logits), layer(x, logits))
    assert torch.equal(compiled(x[:3], logits[:3]), layer(x[:3], logits[:3]))


def bad_experts():
    w, r, x = expert_weights(8), routing(6, 8, 2), torch.randn(6, 256).bfloat16()
    yield "x: expected dtype bfloat16", (x.float(), r, w), {}
    yield r"x: expected \[num_tokens, 256\]", (x[:, :128].contiguous(), r, w), {}
    yield "x: expected contiguous rows", (x.repeat(1, 2)[:, ::2], r, w), {}
    yield "routing: expected 5 tokens", (x[:5], r, w), {}
    yield "routing: expected 8 experts", (x, Routing(r.topk_ids, r.topk_weights, 9), w), {}
    yield "expert_map: expected one local id", (x, r, w), {"expert_map": torch.zeros(3).int()}
    yield "expert_map: expected dtype", (x, r, w), {"expert_map": torch.zeros(8)}
    yield "shared_output", (x, r, w), {"shared_output": x[:5]}
    yield "no gradient", (x.clone().requires_grad_(), r, w), {}


@pytest.mark.parametrize("case", range(9))
def test_bad_input_is_named(case):
    message, args, kwargs = list(bad_experts())[case]
    with pytest.raises(ValueError, match=message):
        fused_experts(*args, **kwargs)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: {**t, "w13": t["w13"].float()}, "w13: expected dtype float8"),
        (lambda t: {**t, "w13": t["w13"].transpose(1, 2)}, "w13: expected a contiguous"),
        (lambda t: {**t, "w2": t["w2"][:, :128].contiguous()}, r"w2: expected shape \(4, 256, 128"),
        (
            lambda t: {**t, "w13_scale": t["w13_scale"][:, :1]},
            r"w13_scale: expected shape \(4, 2, 2",
        ),
        (lambda t: {**t, "w2_scale": t["w2_scale"].double()}, "w2_scale: expected dtype float32"),
    ],
    ids=["dtype", "stride", "shape", "scale-shape", "scale-dtype"],
)
def test_bad_weights_are_named(change, message):
    w = expert_weights(4)
    named = dict(w13=w.w13, w13_scale=w.w13_scale, w2=w.w2, w2_scale=w.w2_scale)
    with pytest.raises(ValueError, match=message):
        ExpertWeights(**change(named))
