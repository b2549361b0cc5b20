# SPDX-License-Identifier: Apache-2.0
"""Warm-up sizes and the self-test; the parts that need no GPU."""

from dataclasses import replace

import pytest
import torch
from factories import expert_weights

from moe_backend import Activation, MoEShape, RouterSpec, pipeline
from moe_backend.vllm_plugin import readiness
from moe_backend.vllm_plugin.checks import Refused


@pytest.fixture
def subject():
    spec = RouterSpec(2, "sigmoid", renormalize=True, scale=2.5)
    return readiness.Subject(
        name="model.layers.3.mlp.experts",
        weights=expert_weights(8),
        shape=MoEShape(8, 8, 256, 128, 2),
        spec=spec,
        activation=Activation(),
        bias=torch.rand(8),
        expert_map=None,
        max_tokens=65,
    )


@pytest.mark.parametrize("most", [1, 7, 512, 8192, 16385])
def test_every_configuration_is_met(most):
    """A configuration that no warm-up size selects would compile under a user's request."""

    def choose(tokens):
        return min(tokens.bit_length(), 12), tokens > 300, tokens == most

    sizes = readiness.token_counts(choose, most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    everything = [n for n in range(1, most + 1) if n <= 512 or n % 16 == 0 or n == most]
    assert {choose(n) for n in sizes} == {choose(n) for n in everything}
    for config in {choose(n) for n in sizes}:
        mine = [n for n in sizes if choose(n) == config]
        all_of_it = [n for n in everything if choose(n) == config]
        assert any(n % 2 for n in mine) or not any(n % 2 for n in all_of_it)
        assert any(n % 16 == 0 for n in mine) or not any(n % 16 == 0 for n in all_of_it)
    assert len(sizes) < 80


def test_right_layer_passes(subject):
    readiness.self_test(subject, subject.max_tokens)


@pytest.mark.parametrize("fault", ["twice the factor", "one row lost", "NaN"])
def test_wrong_layer_stops_the_start(monkeypatch, subject, fault):
    right = pipeline.moe_layer

    def wrong(x, *args, **kwargs):
        out = right(x, *args, **kwargs)
        if fault == "twice the factor":
            return out * 2.5
        out[-1] = 0 if fault == "one row lost" else torch.nan
        return out

    monkeypatch.setattr(pipeline, "moe_layer", wrong)
    with pytest.raises(Refused, match=r"layer model.layers.3.mlp.experts: the self-test at 65"):
        readiness.self_test(subject, subject.max_tokens)


def test_dummy_weights_without_values_pass(subject):
    """Dummy loading may leave zeros or NaN scales: no oracle to compare with."""
    weights = subject.weights
    for value in (0.0, torch.nan):
        broken = replace(weights, w13_scale=torch.full_like(weights.w13_scale, value))
        readiness.self_test(replace(subject, weights=broken), 65)


def test_layers_of_equal_size_are_readied_once(monkeypatch, subject):
    done = []
    monkeypatch.setattr(
        readiness, "self_test", lambda layer, tokens: done.append((layer.name, tokens))
    )
    monkeypatch.setattr(readiness, "_ready", set())
    monkeypatch.setattr(readiness, "token_counts", lambda choose, most: [1, most])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name in ("a", "b"):
        readiness.make_ready(replace(subject, name=name))
    readiness.make_ready(replace(subject, spec=replace(subject.spec, scale=1.0)))
    assert done == [(name, n) for name in ("a", "model.layers.3.mlp.experts") for n in (1, 65)]


def test_samples_stay_in_range_while_the_engine_loads_in_bf16(subject, monkeypatch):
    """Under a bf16 default dtype, 8,191 as a default float is 8,192: one past the last row."""
    most = 8192
    large = replace(subject, max_tokens=most)
    monkeypatch.setattr(readiness.Subject, "run", lambda self, x, logits: torch.zeros_like(x))
    monkeypatch.setattr(readiness.Subject, "oracle", lambda self, x, logits: torch.zeros_like(x))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        readiness.self_test(large, most)
    finally:
        torch.set_default_dtype(before)
