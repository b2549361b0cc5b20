# SPDX-License-Identifier: Apache-2.0
"""What the plugin expects of vLLM and promises to it, shown on real layers of one version.

Run as a script it prints one line of JSON: check -> "ok" or what went wrong. test_contract.py
runs it against the installed vLLM and against source trees of the others.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import traceback
from contextlib import contextmanager

import torch
from contract_engine import BLOCKS, DEEPSEEK_V3, Case, Engine, checkpoint, load

from moe_backend import Activation, RouterSpec, reference
from moe_backend.vllm_plugin import METHOD, checks, compat, register, status

CHECKS = {}
TOLERANCE = 8e-3  # two roundings to bf16 (the engine scales in place), 2 ** -8 each


def check(function):
    CHECKS[function.__name__] = function
    return function


def refusal(build, *args, **kwargs) -> str:
    try:
        build(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@contextmanager
def environment(**values: str):
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def inputs(case: Case, tokens: int = 9, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, case.hidden_size, generator=generator).bfloat16()
    logits = torch.randn(tokens, case.num_experts, generator=generator)
    return x, logits


def oracle(case: Case, x, logits, bias=None, candidates=None, scale=None):
    spec = RouterSpec(
        case.top_k,
        case.scoring_func,
        case.num_expert_group or 1,
        case.topk_group or 1,
        candidates,
        case.renormalize,
        case.routed_scaling_factor if scale is None else scale,
    )
    ids, weights, _ = reference.router_topk(logits, spec, bias)
    return reference.fused_experts(x, ids, weights, checkpoint(case), Activation())


def assert_close(out, wanted) -> None:
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    assert error <= TOLERANCE, f"relative error {error:.2e} > {TOLERANCE}"


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
def every_name_is_there(engine):
    assert compat.missing() == [], compat.missing()


@check
def version_is_accepted(engine):
    compat.check()


@check
def registered_once(engine):
    from vllm.model_executor.layers import quantization

    register()
    register()
    assert quantization.QUANTIZATION_METHODS.count(METHOD) == 1
    found = quantization.get_quantization_config(METHOD)
    assert found.override_quantization_method(BLOCKS, METHOD, hf_config=None) == METHOD
    assert found.override_quantization_method(BLOCKS, None) is None
    assert found.override_quantization_method(BLOCKS, "fp8") is None


@check
def config_survives_pickle(engine):
    config = engine.quant_config(modules_to_not_convert=["model.layers.0.mlp"])
    again = pickle.loads(pickle.dumps(config))
    assert (again.get_name(), again.weight_block_size) == (METHOD, [128, 128])
    assert again.ignored_layers == ["model.layers.0.mlp"]


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
    case, ep = Case(), (2, 1)
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


@check
def own_routing_function_stays_the_engines(engine):
    def last_two(hidden_states, gating_output, topk, renormalize):
        ids = torch.tensor([[6, 7]], dtype=torch.int32).repeat(len(hidden_states), 1)
        return torch.full(ids.shape, 0.5), ids

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
def reload_twice_equals_cold_start(engine):
    from vllm.model_executor.model_loader.reload import layerwise

    case = DEEPSEEK_V3
    x, logits = inputs(case)
    bias = torch.nn.Parameter(torch.rand(8), requires_grad=False)  # the gate's, not the layer's
    runner = engine.bare(case, bias=bias)
    layer = runner.routed_experts
    layerwise.record_metadata_for_reloading(runner)
    load(layer, checkpoint(case))
    layer.quant_method.process_weights_after_loading(layer)
    cold = engine.run(runner, x, logits)
    storage = layer.w13_weight.data_ptr()
    for seed in (3, 0):
        layerwise.initialize_layerwise_reload(runner)
        load(layer, checkpoint(case, seed))
        layerwise.finalize_layerwise_reload(runner, None)
        warm = engine.run(runner, x, logits)
        assert torch.equal(warm, cold) == (seed == 0)
    assert layer.w13_weight.data_ptr() == storage, "captured graphs would read freed memory"


@check
def refused_layers_say_why(engine):
    for text, case, more in (
        ("biases", Case(), {"has_bias": True}),
        ("activation 'gelu'", Case(), {"activation": "gelu"}),
        ("intermediate size 192", Case(intermediate_size=192), {}),
        ("hidden size 320", Case(hidden_size=320), {}),
        ("router weights into the experts' input", Case(), {"apply_router_weight_on_input": True}),
    ):
        message = refusal(engine.bare, case, **more)
        assert text in message and ", layer model.layers." in message, message


@check
def fallback_takes_the_engines_method_or_says_both(engine):
    """Whether the engine has an FP8 MoE for a CPU depends on its version."""
    with environment(MOE_BACKEND_FALLBACK="allow"):
        try:
            layer = engine.bare(Case(), activation="gelu").routed_experts
        except ValueError as error:
            message = str(error)
            assert "activation 'gelu'" in message and "cannot serve it either" in message, message
            return
    assert type(layer.quant_method).__name__ == "Fp8MoEMethod"
    entry = status.of(layer)
    assert entry.backend == "engine" and "activation 'gelu'" in entry.reason


@check
def skipped_layers_stay_unquantized(engine):
    prefix = f"model.layers.{engine.count + 1}.mlp.experts"
    config = engine.quant_config(modules_to_not_convert=[prefix])
    runner = engine.bare(Case(), quant_config=config)
    kind = type(runner.routed_experts.quant_method).__name__
    assert kind == "UnquantizedFusedMoEMethod", kind


@check
def cpu_linear_dequantises_once(engine):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.model_loader.reload import layerwise

    with set_current_vllm_config(engine.config):
        linear = MergedColumnParallelLinear(
            256, [256, 192], bias=False, quant_config=engine.quant_config(), prefix="model.kv_a"
        )
    layerwise.record_metadata_for_reloading(linear)
    x = torch.randn(5, 256)

    def fill(seed):
        generator = torch.Generator().manual_seed(seed)
        wanted = []
        for shard, rows in enumerate((256, 192)):
            w = torch.randn(rows, 256, generator=generator).to(torch.float8_e4m3fn)
            s = torch.rand((rows + 127) // 128, 2, generator=generator)
            for parameter, tensor in ((linear.weight, w), (linear.weight_scale_inv, s)):
                parameter.weight_loader(parameter, tensor, shard)
            wanted.append(reference.dequant_blocks(w, s))
        return torch.cat(wanted)

    wanted = fill(0)
    linear.quant_method.process_weights_after_loading(linear)
    linear.quant_method.process_weights_after_loading(linear)  # idempotent
    torch.testing.assert_close(linear(x)[0], x @ wanted.T)
    storage = linear.weight.data_ptr()
    for seed in (1, 2):
        layerwise.initialize_layerwise_reload(linear)
        wanted = fill(seed)
        layerwise.finalize_layerwise_reload(linear, None)
        torch.testing.assert_close(linear(x)[0], x @ wanted.T)
    assert linear.weight.data_ptr() == storage


@check
def engine_facts_are_read(engine):
    facts = checks.EngineFacts.of(engine.config)
    assert facts == checks.EngineFacts(), facts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine, found = Engine(f"{folder}/store"), {}
        for name, function in CHECKS.items():
            try:
                function(engine)
                found[name] = "ok"
            except Exception:
                found[name] = traceback.format_exc(limit=-6)
    print(json.dumps({"version": compat.engine_version(), "checks": found}), file=sys.stderr)


if __name__ == "__main__":
    main()
