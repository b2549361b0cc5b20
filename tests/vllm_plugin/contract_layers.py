# SPDX-License-Identifier: Apache-2.0
"""Checks of what a layer computes: routing, scaling, maps, the input left alone."""

from __future__ import annotations

import torch
from contract_engine import DEEPSEEK_V3, Case, checkpoint
from contract_kit import assert_close, check, environment, inputs, oracle
from vllm.forward_context import set_forward_context

from moe_backend import Activation, RouterSpec, reference
from moe_backend.vllm_plugin import exchange, status


def assert_layer(engine, case, *, bias=None, candidates=None):
    x, logits = inputs(case)
    runner = engine.build(case, bias=bias)
    before = x.clone()
    out = engine.run(runner, x, logits)
    assert torch.equal(x, before), "the input was changed"
    assert out.data_ptr() != x.data_ptr(), "the output aliases the input"
    assert runner.routed_experts.quant_method.is_monolithic, status.moe_status()[-1]["routing"]
    assert_close(out, oracle(case, x, logits, bias, candidates))


@check
def deepseek_v3_scales_once(engine):
    """The runner multiplies by 2.5 itself: twice would be 6.25."""
    assert_layer(engine, DEEPSEEK_V3, bias=torch.rand(8) * 0.1 + 6.8, candidates=2)


@check
def factor_in_the_weights_scales_once(engine):
    case = Case(**{**DEEPSEEK_V3.__dict__, "apply_routed_scale_to_output": False})
    assert_layer(engine, case, bias=torch.rand(8), candidates=2)


@check
def grouped_softmax_without_bias(engine):
    case = Case(use_grouped_topk=True, num_expert_group=4, topk_group=2, renormalize=False)
    assert_layer(engine, case, candidates=1)


@check
def softmax_top_k(engine):
    assert_layer(engine, Case())
    assert_layer(engine, Case(renormalize=False, top_k=3))


@check
def sqrt_softplus_with_bias(engine):
    case = Case(scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    assert_layer(engine, case, bias=torch.randn(8))


@check
def shared_experts_see_the_input(engine):
    class Half(torch.nn.Module):
        def forward(self, x):
            return x * 0.5

    x, logits = inputs(DEEPSEEK_V3)
    bias = torch.rand(8)
    runner = engine.build(DEEPSEEK_V3, bias=bias, shared_experts=Half())
    out = engine.run(runner, x, logits)
    assert_close(out, oracle(DEEPSEEK_V3, x, logits, bias, 2).float() + x.float() * 0.5)


@check
def expert_map_on_every_rank(engine):
    """Ranks 0 and 1 hold half the experts each; rank 0 alone would hide swapped ids."""
    x, logits = inputs(DEEPSEEK_V3)
    bias, parts = torch.rand(8), []
    for rank in range(2):
        runner = engine.build(DEEPSEEK_V3, bias=bias, ep=(2, rank))
        layer = runner.routed_experts
        assert layer.w13_weight.shape[0] == 4 and int((layer.expert_map < 0).sum()) == 4
        parts.append(engine.run(runner, x, logits).float())
        assert status.of(layer).ep == {"size": 2, "rank": rank, "transport": "none"}
    assert_close(parts[0] + parts[1], oracle(DEEPSEEK_V3, x, logits, bias, 2))


@check
def eplb_hands_over_physical_ids(engine):
    """Two redundant copies, this rank holds physical experts 5 to 9; the engine routes."""
    case, ep = Case(use_grouped_topk=True, num_expert_group=2, topk_group=1), (2, 1)
    more = {"enable_eplb": True, "num_redundant_experts": 2}
    runner = engine.bare(case, ep=ep, **more)
    layer = runner.routed_experts
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    assert not method.is_monolithic and "EPLB" in status.of(layer).routing
    assert layer.w13_weight.shape[0] == 5 and layer.global_num_experts == 10
    whole = checkpoint(Case(num_experts=10))
    for name, source in (
        ("w13_weight", whole.w13),
        ("w13_weight_scale_inv", whole.w13_scale),
        ("w2_weight", whole.w2),
        ("w2_weight_scale_inv", whole.w2_scale),
    ):
        getattr(layer, name).data.copy_(source[5:])
    assert len(list(layer.get_expert_weights())) == 4, "a rebalancing must move every tensor"
    x, _ = inputs(case, tokens=4)
    ids = torch.tensor([[9, 1], [5, 7], [0, 4], [6, -1]], dtype=torch.int32)
    weights = torch.rand(4, 2)
    out = method.apply(layer, x, weights, ids, None, None)
    away = ids.masked_fill(ids < 5, -1)
    assert_close(out, reference.fused_experts(x, away, weights, whole, Activation()))
    assert not out[2].any()


@check
def simulated_routing_is_honoured(engine):
    """Equal rows would all go to the same experts if the layer routed by itself."""
    case = Case()
    x, _ = inputs(case, tokens=1)
    with environment(VLLM_MOE_ROUTING_SIMULATION_STRATEGY="uniform_random"):
        runner = engine.build(case)
        layer = runner.routed_experts
        assert not layer.quant_method.is_monolithic
        assert "SIMULATION" in status.of(layer).routing
        out = engine.run(runner, x.repeat(64, 1), torch.zeros(64, 8))
    assert len({tuple(row) for row in out.tolist()}) > 8


def last_two(hidden_states, gating_output, topk, renormalize):
    ids = torch.tensor([[6, 7]], dtype=torch.int32).repeat(hidden_states.shape[0], 1)
    return torch.full(ids.shape, 0.5), ids


@check
def own_routing_function_stays_the_engines(engine):
    case = Case()
    x, logits = inputs(case)
    runner = engine.build(case, custom_routing_function=last_two)
    out = engine.run(runner, x, logits)
    weights, ids = last_two(x, logits, 2, True)
    assert "function of its own" in status.of(runner.routed_experts).routing
    assert_close(out, reference.fused_experts(x, ids, weights, checkpoint(case), Activation()))


@check
def clamped_activation(engine):
    case = Case()
    x, logits = inputs(case)
    runner = engine.build(case, swiglu_limit=0.5)
    ids, weights, _ = reference.router_topk(logits, RouterSpec(2, renormalize=True))
    wanted = reference.fused_experts(x, ids, weights, checkpoint(case), Activation(limit=0.5))
    assert_close(engine.run(runner, x, logits), wanted)


@check
def compiles_into_one_graph(engine):
    """On a CPU the engine traces through the layer; sizes must stay dynamic in both forms."""
    case = Case()
    for more in ({}, {"custom_routing_function": last_two}):
        runner = engine.build(case, **more)
        compiled = torch.compile(runner.forward, fullgraph=True, dynamic=True, backend="eager")
        for tokens in (5, 9):
            x, logits = inputs(case, tokens)
            for tensor in (x, logits):  # as the engine does: fixing the size is an error
                torch._dynamo.mark_dynamic(tensor, 0)
            with set_forward_context(None, engine.config, num_tokens=tokens):
                assert torch.equal(compiled(x, logits), runner(x, logits))


@check
def our_exchange_replaces_the_engines(engine):
    """Under data parallelism the engine's runner must not gather tokens before us."""
    x, logits = inputs(DEEPSEEK_V3)
    bias, seen = torch.rand(8), []
    original = exchange.run
    exchange.run = lambda x, routing, *rest: seen.append((routing, *rest)) or x * 2
    try:
        runner = engine.build(DEEPSEEK_V3, bias=bias, ep=(2, 1), dp=2)
        layer = runner.routed_experts
        assert not runner.do_naive_dispatch_combine
        method = layer.quant_method
        out = method.apply_monolithic(layer, x, logits)
        ids, weights = seen[0][0]
        assert torch.equal(out, x * 2)
        assert torch.equal(method.apply(layer, x, weights, ids, None, None), x * 2)
    finally:
        exchange.run = original
    spec = RouterSpec(2, "sigmoid", 4, 2, 2, True)
    wanted = reference.router_topk(logits, spec, bias)
    assert torch.equal(ids, wanted[0]) and torch.equal(weights, wanted[1])
    assert status.of(layer).ep == {"size": 2, "rank": 1, "transport": "gloo"}
