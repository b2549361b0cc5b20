# SPDX-License-Identifier: Apache-2.0
"""Which transport a layer takes, and the operator through which the engine's layer uses it."""

import pytest
import torch
from factories import expert_weights, relative_error, routing
from ranks import run_ranks

from moe_backend import Activation, ExpertWeights, fused_experts
from moe_backend.distributed import EPConfig
from moe_backend.support import Support
from moe_backend.vllm_plugin import compat, exchange

EXPERTS, HIDDEN, TOP_K = 8, 256, 2


@pytest.fixture(autouse=True)
def _undecided():
    exchange.transport.cache_clear()
    yield
    exchange.transport.cache_clear()


@pytest.mark.parametrize(
    "setting, platform, replicated, peers, chosen",
    [
        ("auto", "cpu", False, None, "gloo"),
        ("auto", "cuda", False, Support(True), "engine"),
        ("symm", "cuda", False, Support(True), "symm"),
        ("auto", "cuda", False, Support(False, "no peer access"), "engine"),
        ("auto", "cuda", True, Support(True), "engine"),
        ("engine", "cuda", False, Support(True), "engine"),
        ("nccl", "cuda", False, Support(True), "nccl"),
    ],
)
def test_transport(monkeypatch, setting, platform, replicated, peers, chosen):
    monkeypatch.setattr(exchange, "symm_everywhere", lambda: peers)
    assert exchange.transport(setting, platform, replicated) == chosen


@pytest.mark.parametrize(
    "every, reachable, reason",
    [
        ([("a", 0), ("a", 1)], True, ""),
        ([("a", 0), ("b", 0)], True, "spans 2"),
        ([("a", 0), ("a", 1)], False, "no peer access to those of ranks 1"),
    ],
)
def test_symmetric_memory_needs_every_peer(monkeypatch, every, reachable, reason):
    monkeypatch.setattr(exchange, "_host", lambda: "a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reachable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        compat, "gather_from_experts", lambda word: every if isinstance(word, tuple) else [word]
    )
    answer = exchange.symm_everywhere()
    assert answer.ok == (not reason) and reason in answer.reason


def test_layers_of_equal_sizes_share_a_plan():
    config = EPConfig(EXPERTS, HIDDEN, TOP_K, max_tokens=16)
    first = exchange.register(config, "gloo", torch.arange(8))
    assert exchange.register(config, "gloo", torch.arange(8)) == first
    assert exchange.register(config, "gloo", torch.arange(8).flip(0)) != first
    assert exchange.describe(first, True) == "gloo"
    assert (exchange.describe(None, True), exchange.describe(None, False)) == ("engine", "none")


def _layer_on_a_rank(rank, world):
    """Round-robin placement, uneven batches, one of them empty; twice, as two layers would."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    compat.expert_group = lambda on_cpu: torch.distributed.group.WORLD
    whole = expert_weights(EXPERTS, HIDDEN)
    mine = torch.arange(rank, EXPERTS, world)
    place = torch.full((EXPERTS,), -1)
    place[mine] = torch.arange(len(mine))
    local = ExpertWeights(*(t[mine].contiguous() for t in vars(whole).values()))
    config = EPConfig(EXPERTS, HIDDEN, TOP_K, max_tokens=16)
    plan = exchange.register(config, "gloo", place)
    for step in range(4):
        tokens = (3 + 5 * rank) * (step + rank) % 16
        generator = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        before, choice = x.clone(), routing(tokens, EXPERTS, TOP_K, seed=step)
        pair = choice.topk_ids, choice.topk_weights
        out = exchange.run(x, pair, local, plan, Activation())
        assert torch.equal(x, before)
        wanted = fused_experts(x, choice, whole)
        assert relative_error(out, wanted) < 5e-3  # one more rounding to bf16 per rank
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = exchange.run(mode.from_tensor(x), pair, local, plan, Activation())
    assert fake.shape == out.shape and fake.dtype is out.dtype
    (opened,) = exchange._open.values()
    exchange.warm(opened, local, Activation(), (1, 7, 16))
    exchange.close()
    assert not exchange._open


def test_operator_over_two_ranks():
    run_ranks(_layer_on_a_rank, 2)
