# SPDX-License-Identifier: Apache-2.0
"""Checks of registration, loading, reloading and refusing."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from contract_engine import BLOCKS, DEEPSEEK_V3, Case, checkpoint, load
from contract_kit import check, environment, inputs, refusal

from moe_backend import reference
from moe_backend.vllm_plugin import METHOD, checks, compat, readiness, register, status


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
def engine_router_without_a_kernel_is_refused_at_load(engine):
    """Otherwise the first token ends in an AttributeError of the engine."""
    runner = engine.bare(Case())
    layer = runner.routed_experts
    method, kind = layer.quant_method, type(runner.router).__name__
    method._captured = True
    if kind == "CPURouter":  # plain torch
        method.process_weights_after_loading(layer)
        return
    message = refusal(method.process_weights_after_loading, layer)
    assert layer.layer_name in message and f"no kernel for its {kind} on a CPU" in message, message


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


@check
def nothing_is_derived_from_weights(engine):
    """Sleep frees weights and keeps named buffers: a tensor of ours would point nowhere."""
    runner = engine.build(DEEPSEEK_V3, bias=torch.rand(8))
    layer = runner.routed_experts
    held = [n for n, v in vars(layer.quant_method).items() if isinstance(v, torch.Tensor)]
    assert not held, held
    own = {n for n, v in vars(layer).items() if isinstance(v, torch.Tensor)}
    assert own <= {"e_score_correction_bias"}, own  # a plain tensor in this test, the gate's


@contextmanager
def hopper():
    """The plugin's view of an H100; the engine stays on its CPU."""
    original = compat.platform
    compat.platform = lambda: ("cuda", (9, 0))
    try:
        yield
    finally:
        compat.platform = original


@check
def dense_layers_are_the_engines_on_cuda(engine):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import fp8

    with set_current_vllm_config(engine.config), hopper():
        linear, original = ReplicatedLinear(128, 128, bias=False), fp8.Fp8LinearMethod
        fp8.Fp8LinearMethod = lambda config: SimpleNamespace(config=config)
        try:
            config = engine.quant_config()
            assert config.get_quant_method(linear, "model.q_proj").config is config
        finally:
            fp8.Fp8LinearMethod = original


@check
def layers_are_made_ready_on_cuda(engine):
    """Kernels are compiled and proved with exactly what the layer will run."""
    seen, chosen = [], {"1": {"source": "heuristic"}}
    originals = readiness.make_ready, readiness.chosen
    readiness.make_ready, readiness.chosen = seen.append, lambda *_: chosen
    try:
        with hopper():
            layer = engine.build(DEEPSEEK_V3, bias=torch.rand(8)).routed_experts
    finally:
        readiness.make_ready, readiness.chosen = originals
    (subject,) = seen
    assert subject.name == layer.layer_name and subject.weights.w13 is layer.w13_weight
    assert (subject.spec.score, subject.spec.num_groups, subject.spec.scale) == ("sigmoid", 4, 1.0)
    assert subject.bias is layer.e_score_correction_bias
    assert subject.max_tokens == engine.config.scheduler_config.max_num_batched_tokens
    entry = status.of(layer)
    assert entry.config == chosen and entry.reason == "kernels on sm_90"
