# SPDX-License-Identifier: Apache-2.0
"""Checks of the live balance statistics on the engine's own layers."""

from __future__ import annotations

import torch
from contract_engine import DEEPSEEK_V3, Case, checkpoint, load
from contract_kit import assert_close, check, environment, inputs, oracle
from contract_layers import last_two
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.forward_context import set_forward_context

from moe_backend import RouterSpec, balance, reference
from moe_backend.vllm_plugin import compat, exchange, live_balance, status

SPEC = RouterSpec(2, "sigmoid", 4, 2, 2, True)


class OurOperators(TorchDispatchMode):
    """Names of our operators in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_backend":
            self.seen.append(function.name().split("::")[1])
        return function(*args, **(kwargs or {}))


def counting(engine, case, **more):
    with environment(MOE_BACKEND_BALANCE="1"):
        return engine.build(case, **more)


def reading(runner) -> dict:
    name = runner.routed_experts.layer_name
    return next(row for row in live_balance.moe_balance() if row["layer"] == name)


@check
def balance_off_runs_what_ran_before(engine):
    """One operator, no counters, nothing that another would have to look at."""
    runner = engine.build(DEEPSEEK_V3, bias=torch.rand(8))
    x, logits = inputs(DEEPSEEK_V3)
    with OurOperators() as operators:
        engine.run(runner, x, logits)
    assert operators.seen == ["moe_layer"], operators.seen
    assert not [n for n, _ in runner.named_buffers() if live_balance.COUNTERS in n]
    names = {row["layer"] for row in status.StatusExtension().moe_balance()}
    assert runner.routed_experts.layer_name not in names


@check
def balance_counts_what_is_routed(engine):
    bias = torch.rand(8) * 0.1 + 6.8
    runner = counting(engine, DEEPSEEK_V3, bias=bias)
    wanted, scores = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.float64)
    for seed in (1, 2):
        x, logits = inputs(DEEPSEEK_V3, tokens=33, seed=seed)
        with OurOperators() as operators:
            out = engine.run(runner, x, logits)
        assert_close(out, oracle(DEEPSEEK_V3, x, logits, bias, 2))
        ids = reference.router_topk(logits, SPEC, bias)[0]
        wanted += ids.flatten().long().bincount(minlength=8)
        s = logits.sigmoid()
        scores += (s / s.sum(-1, keepdim=True)).sum(0, dtype=torch.float64)
    assert operators.seen == ["router_topk", "observe_engine_batch", "fused_experts"]
    row = reading(runner)
    assert row["tokens"] == wanted.tolist() and row["top_k"] == 2 and not row["physical"]
    torch.testing.assert_close(torch.tensor(row["scores"]).double(), scores, rtol=1e-6, atol=0)
    assert (row["source"], row["num_sources"]) == ("all", 1)


@check
def balance_leaves_out_rows_that_are_no_token(engine):
    """Padding of a captured batch, idle steps of a data-parallel rank and warm-up have no slot."""
    runner = counting(engine, DEEPSEEK_V3, bias=torch.rand(8))
    x, logits = inputs(DEEPSEEK_V3, tokens=6)

    def counted(slots):
        before = sum(reading(runner)["tokens"])
        with set_forward_context(None, engine.config, num_tokens=6, slot_mapping=slots):
            runner(x, logits)
        return (sum(reading(runner)["tokens"]) - before) // 2

    some, none = torch.tensor([7, 8, 0, -1, 3, -1]), torch.full((6,), -1)
    assert counted(None) == counted({}) == 6
    assert counted({"a": some, "b": some}) == 4 and counted({"a": none}) == 0
    assert counted({"a": none, "b": some}) == 4, "a group of caches without slots"
    assert counted({"a": some[:3]}) == 3 and counted({"a": torch.arange(9)}) == 6
    scores = torch.tensor(reading(runner)["scores"])
    assert abs(float(scores.sum()) - (12 + 4 + 4 + 3 + 6)) < 1e-3
    live_balance.compat.slots_tell_padding, original = lambda: False, compat.slots_tell_padding
    try:  # context parallelism: a slot may lie on another rank
        with environment(MOE_BACKEND_BALANCE="1"):
            live_balance.attach(runner.routed_experts, exchanged=False, scored=True)
        assert counted({"a": none}) == 6
    finally:
        live_balance.compat.slots_tell_padding = original


@check
def balance_counters_are_named_buffers_of_no_checkpoint(engine):
    """Sleep level 2 saves and restores named buffers; a loader must not look for them."""
    runner = counting(engine, DEEPSEEK_V3, bias=torch.rand(8))
    mine = [n for n, _ in runner.named_buffers() if live_balance.COUNTERS in n]
    assert len(mine) == 2, mine
    assert not [n for n in runner.state_dict() if live_balance.COUNTERS in n]
    assert not [n for n, _ in runner.named_parameters() if live_balance.COUNTERS in n]


@check
def balance_goes_on_over_reloads(engine):
    """Same storage, or captured graphs would count into freed memory; same processing order."""
    from vllm.model_executor.model_loader.reload import layerwise

    case = DEEPSEEK_V3
    x, logits = inputs(case)
    bias = torch.nn.Parameter(torch.rand(8), requires_grad=False)
    with environment(MOE_BACKEND_BALANCE="1"):
        runner = engine.bare(case, bias=bias)
        layer = runner.routed_experts
        layerwise.record_metadata_for_reloading(runner)
        load(layer, checkpoint(case))
        layer.quant_method.process_weights_after_loading(layer)
        engine.run(runner, x, logits)
        once = reading(runner)["tokens"]
        storage = layer.moe_balance.tokens.data_ptr()
        for turn, seed in enumerate((3, 0), 2):
            layerwise.initialize_layerwise_reload(runner)
            load(layer, checkpoint(case, seed))
            assert layer.w13_weight.device.type == "cpu", "the layer waited for our counters"
            layerwise.finalize_layerwise_reload(runner, None)
            engine.run(runner, x, logits)
            assert reading(runner)["tokens"] == [turn * n for n in once]
        assert layer.moe_balance.tokens.data_ptr() == storage


@check
def balance_counts_ids_of_the_engines_router(engine):
    runner = counting(engine, Case(), custom_routing_function=last_two)
    layer = runner.routed_experts
    x, logits = inputs(Case())
    engine.run(runner, x, logits)
    method = layer.quant_method
    ids = torch.tensor([[0, -1], [3, 9]], dtype=torch.int32)  # nobody's, and a stale one
    method.apply(layer, x[:1], torch.ones(1, 2), ids[:1], None, None)
    live_balance.observe(layer, ids[1:])
    row = reading(runner)
    assert row["tokens"] == [1, 0, 0, 1, 0, 0, 9, 9] and row["scores"] is None


@check
def balance_sums_over_ranks_that_bring_their_own_tokens(engine):
    x, logits = inputs(DEEPSEEK_V3)
    original = exchange.run
    exchange.run = lambda x, *rest: x * 2
    bias, found = torch.rand(8), []
    try:
        for rank in range(2):
            runner = counting(engine, DEEPSEEK_V3, bias=bias, ep=(2, rank), dp=2)
            layer = runner.routed_experts
            layer.quant_method.apply_monolithic(layer, x, logits)
            found.append(reading(runner))
    finally:
        exchange.run = original
    assert [row["source"] for row in found] == ["dp 0 pcp 0", "dp 1 pcp 0"]
    assert {row["num_sources"] for row in found} == {2}
    assert [sum(row["tokens"]) for row in found] == [18, 18]
    tensor_parallel = [
        reading(counting(engine, DEEPSEEK_V3, bias=bias, ep=(2, rank))) for rank in range(2)
    ]
    assert {row["source"] for row in tensor_parallel} == {"all"}


@check
def balance_is_left_to_one_rank_of_replicas(engine):
    runner = counting(engine, DEEPSEEK_V3, bias=torch.rand(8))
    original = live_balance.compat.tensor_parallel_rank
    live_balance.compat.tensor_parallel_rank = lambda: 1
    try:
        layer = runner.routed_experts
        with environment(MOE_BACKEND_BALANCE="1"):
            live_balance.attach(layer, exchanged=False, scored=True)
    finally:
        live_balance.compat.tensor_parallel_rank = original
    assert layer.layer_name not in {row["layer"] for row in live_balance.moe_balance()}


@check
def balance_compiles_into_one_graph(engine):
    """The engine's compiler for a CPU traces through; the counters must still move."""
    for more in ({}, {"custom_routing_function": last_two}):
        runner = counting(engine, Case(), **more)
        compiled = torch.compile(runner.forward, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (5, 9):
            x, logits = inputs(Case(), tokens)
            for tensor in (x, logits):
                torch._dynamo.mark_dynamic(tensor, 0)
            with set_forward_context(None, engine.config, num_tokens=tokens):
                compiled(x, logits)
        assert sum(reading(runner)["tokens"]) == 2 * (5 + 9)


@check
def balance_is_compiled_before_the_server_is_ready(engine):
    """Sizes of every variant are met, and what they counted is forgotten."""
    runner = counting(engine, DEEPSEEK_V3, bias=torch.rand(8))
    layer, sizes = runner.routed_experts, []
    original = balance.observe
    balance.observe = lambda *args, **kw: (sizes.append(args[1].shape[0]), original(*args, **kw))
    try:
        live_balance.make_ready(layer, SPEC, 600)
        met = len(sizes)
        live_balance.make_ready(layer, SPEC, 600)
    finally:
        balance.observe = original
    assert {1, 600} <= set(sizes) and len(sizes) == met and max(sizes) == 600
    assert {(n > 1, n > 128, n > 256, n % 16 == 0) for n in sizes if n > 1} == {
        (True, big > 128, big > 256, even) for big in (2, 129, 257) for even in (True, False)
    }
    assert sum(reading(runner)["tokens"]) == 0
