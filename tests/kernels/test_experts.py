# SPDX-License-Identifier: Apache-2.0
"""The layer on our kernels against the oracle that rounds where they round.

Tolerance: 4e-3 relative L2 in the interpreter, which adds exactly: the bf16 output alone costs
1.7e-3, the rest is FP8 codes of the intermediate that flip when a sum is taken in another order.
On a GPU 6e-3: tensor cores add FP8 products with some 14 bits, so that more codes flip (measured
up to 5.5e-3 on large layers).
"""

import dataclasses

import factories
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_backend.kernels import grouped_gemm as gg
from moe_backend.kernels.schedule import schedule

from moe_backend import execution, reference
from moe_backend.types import Activation, ExpertWeights, GemmConfig, KernelConfig, Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 6e-3 if DEVICE == "cuda" else 4e-3
PLAIN = GemmConfig(swap=False)
CONFIGS = {
    "swapped": KernelConfig(16),
    "upright": KernelConfig(64, up=PLAIN, down=PLAIN),
    "unrolled and streaming": KernelConfig(
        16, up=GemmConfig(unroll=2, num_stages=2), down=GemmConfig(span=3)
    ),
    "slabs": KernelConfig(32, down=GemmConfig(block_n=64), slab=128),
    "direct": KernelConfig(16, direct=True),
}


def run(x, routing, weights, config, *, activation=None, expert_map=None, shared=None):
    args = (x, routing.topk_ids, routing.topk_weights, weights, activation or Activation())
    out = execution.run_experts(*args, expert_map, shared, config)
    return out, reference.fused_experts(*args, expert_map, shared)


def layer(tokens, experts, top_k, hidden, inter, seed=0):
    weights = factories.expert_weights(experts, hidden, inter, device=DEVICE, seed=seed)
    routing = factories.routing(tokens, experts, top_k, device=DEVICE, seed=seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, device=DEVICE).bfloat16()
    return x, routing, weights


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "activation", [Activation(), Activation(alpha=1.7, limit=0.5)], ids=["silu", "clamped"]
)
def test_every_path(config, activation, poisoned_memory):
    """Tails of N and K: I = 80 is less than a block, 384 columns in spans of 3 or slabs."""
    x, routing, weights = layer(6, 5, 2, 384, 80)
    routing.topk_ids[0] = -1  # a token without experts
    routing.topk_ids[1, 1] = 9  # a stale id
    shared = torch.randn_like(x)
    out, want = run(x, routing, weights, config, activation=activation, shared=shared)
    assert factories.relative_error(out, want) <= TOLERANCE
    assert torch.equal(out[0], shared[0])


@given(
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 3),
    experts=st.integers(3, 6),
    hidden=st.sampled_from([128, 256, 320]),
    inter=st.sampled_from([16, 64, 128, 192]),
    config=st.sampled_from(list(CONFIGS.values())),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15, deadline=None)
def test_any_shape(tokens, top_k, experts, hidden, inter, config, seed):
    x, routing, weights = layer(tokens, experts, top_k, hidden, inter, seed)
    out, want = run(x, routing, weights, config)
    assert factories.relative_error(out, want) <= TOLERANCE


@pytest.mark.parametrize("shared", [False, True])
def test_decode_reduces_on_the_way_where_columns_fill_the_gpu(shared, monkeypatch):
    """Wide models at one or two tokens take a kernel of their own; absent slots, a whole token."""
    from moe_backend.kernels import decode

    monkeypatch.setattr(decode, "_WIDE", 1)
    x, routing, weights = layer(2, 5, 3, 320, 208)
    routing.topk_ids[0, 1] = -1
    routing.topk_ids[1] = -1
    extra = torch.randn_like(x) if shared else None
    out, want = run(x, routing, weights, CONFIGS["direct"], shared=extra)
    assert factories.relative_error(out, want) <= TOLERANCE
    assert torch.equal(out[1], extra[1] if shared else torch.zeros_like(out[1]))


@pytest.mark.parametrize("name", ["swapped", "upright"])
@pytest.mark.parametrize("tokens", [7, 130])  # one launch for schedule and quantisation, or several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_single_row_goes_straight_to_its_token(name, tokens, dtype, poisoned_memory, monkeypatch):
    """Top-1: no partial rows, no reduction; tokens without an expert here are zero."""
    from moe_backend.kernels import schedule_quant

    monkeypatch.setattr(schedule_quant, "MAX_ROUTES", 100)
    x, routing, weights = layer(tokens, 4, 1, 256, 80)
    routing.topk_ids[3] = -1
    expert_map = torch.tensor([2, -1, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    routing = dataclasses.replace(routing, num_experts=5)
    out, want = run(x.to(dtype), routing, weights, CONFIGS[name], expert_map=expert_map)
    assert out.dtype == dtype
    assert factories.relative_error(out, want) <= TOLERANCE
    absent = (routing.topk_ids[:, 0] == 1) | (routing.topk_ids[:, 0] < 0)
    assert absent.sum() > 1 and not out[absent].any()


def test_the_partial_rows_buffer_is_bounded(monkeypatch):
    """At 200,000 tokens it would be 23 GB; slabs bound it and change no bit."""
    x, routing, weights = layer(9, 4, 2, 640, 128)
    whole, _ = run(x, routing, weights, CONFIGS["swapped"])
    monkeypatch.setattr(execution, "_ROWS_BYTES", 1)
    assert execution._slab(CONFIGS["swapped"], 10, 640) == 256
    assert torch.equal(run(x, routing, weights, CONFIGS["swapped"])[0], whole)


def test_one_launch_for_schedule_and_quantisation_changes_nothing():
    from moe_backend.kernels.quant_fp8 import quant_permute
    from moe_backend.kernels.schedule_quant import MAX_ROUTES, schedule_quant

    x, routing, _ = layer(20, 6, 3, 320, 128)
    routing.topk_ids[4, 1] = -1
    plan, q, scale = schedule_quant(x, routing.topk_ids, 6, 16)
    want = schedule(routing.topk_ids, 6, 16)
    want_q, want_scale = quant_permute(x, want.route_row, want.num_rows)
    for name in ("route_row", "tile_expert", "tile_rows", "num_tiles"):
        assert torch.equal(getattr(plan, name), getattr(want, name)), name
    live = plan.route_row[plan.route_row >= 0].long()
    assert torch.equal(q[live].view(torch.uint8), want_q[live].view(torch.uint8))
    assert torch.equal(scale[:, live], want_scale[:, live])
    many = torch.zeros(MAX_ROUTES + 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="routes"):
        schedule_quant(x, many, 6, 16)


@pytest.mark.parametrize("config", ["swapped", "direct"])
def test_extreme_scales_stay_finite(config):
    """Weight scales of 0, 1e-30, 1e-23 and 6e4 once gave NaN."""
    x, routing, weights = layer(4, 4, 2, 256, 128)
    scales = torch.tensor([0.0, 1e-30, 1e-23, 6e4], device=DEVICE)
    w13_scale = weights.w13_scale.clone()
    w13_scale[:] = scales[:, None, None]
    weights = dataclasses.replace(weights, w13_scale=w13_scale)
    out, want = run(x, routing, weights, CONFIGS[config])
    assert out.isfinite().all()
    assert factories.relative_error(out, want) <= TOLERANCE


@pytest.mark.parametrize("config", ["swapped", "upright", "direct"])
def test_one_nan_row_stays_alone(config):
    x, routing, weights = layer(5, 3, 2, 256, 128)
    good, _ = run(x, routing, weights, CONFIGS[config])
    x[2] = torch.nan
    out, _ = run(x, routing, weights, CONFIGS[config])
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], good[others])


def test_expert_map_of_a_later_rank():
    x, routing, weights = layer(6, 3, 2, 256, 128)
    routing.topk_ids.add_(3)  # global ids of the second rank of two
    routing.topk_ids[0, 0] = 1  # lives on the other rank
    expert_map = torch.tensor([-1, -1, -1, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    for name in ("swapped", "direct"):
        expert_map = expert_map.to(torch.int64)  # as the engine's may be
        out, want = run(x, routing, weights, CONFIGS[name], expert_map=expert_map)
        assert factories.relative_error(out, want) <= TOLERANCE, name


def test_every_scale_counts():
    """Each mutation a bug could make moves the result far beyond the tolerance."""
    x, routing, weights = layer(4, 3, 2, 256, 256)
    want = run(x, routing, weights, CONFIGS["swapped"])[1]
    doubled = weights.w13_scale.clone()
    doubled[:, -1, -1] *= 2
    swapped = torch.cat(weights.w13.chunk(2, 1)[::-1], 1)
    one = weights.w2_scale.clone()
    one[:, -1, -1] = 1
    for change in ({"w13_scale": doubled}, {"w13": swapped}, {"w2_scale": one}):
        out, _ = run(x, routing, dataclasses.replace(weights, **change), CONFIGS["swapped"])
        assert factories.relative_error(out, want) > 4 * TOLERANCE, change.keys()


def test_grouped_gemm_alone():
    """Rows of shuffled groups against the oracle, columns of a slab, canaries round the buffer."""
    sizes = (0, 1, 15, 16, 17, 33)
    experts, n, k = len(sizes), 256, 192
    ids = torch.cat([torch.full((s,), e) for e, s in enumerate(sizes)]).int()
    ids = ids[torch.randperm(ids.numel())].view(-1, 1).to(DEVICE)
    plan = schedule(ids, experts, 16)
    weights = factories.expert_weights(experts, k, n // 2, device=DEVICE)
    b, b_scale = weights.w13, weights.w13_scale
    a, a_scale = reference.quant_fp8(torch.randn(plan.num_rows, k, device=DEVICE).bfloat16())
    row_expert = plan.tile_expert.repeat_interleave(16)
    want = reference.grouped_gemm(a, a_scale, b, b_scale, row_expert)[:, 128:]
    guarded = torch.full((plan.num_rows + 2, 128), 7.0, dtype=torch.bfloat16, device=DEVICE)
    operands = gg.Operands(a, a_scale.T.contiguous(), b, b_scale)
    gg.grouped_gemm(operands, plan, gg.Tiles(), first_column=128, out=guarded[1:-1])
    live = plan.route_row.flatten().long()
    assert factories.relative_error(guarded[1:-1][live], want[live]) <= 2e-3
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(16, 128)}, "a: expected contiguous float8_e4m3fn"),
        ({"a_scale": torch.zeros(2, 16)}, "a_scale: expected"),
        ({"b_scale": torch.zeros(2, 1, 2)}, "b_scale: expected"),
        ({"a": torch.zeros(16, 112, dtype=torch.float8_e4m3fn)}, "a: expected 128 columns"),
        (
            {"b": torch.zeros(2, 128, 136, dtype=torch.float8_e4m3fn)[..., :120]},
            "b: expected contiguous",
        ),
    ],
)
def test_bad_operands_are_named(change, message):
    good = {
        "a": torch.zeros(16, 128, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(1, 16),
        "b": torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn),
        "b_scale": torch.zeros(2, 1, 1),
    }
    with pytest.raises(ValueError, match=message):
        gg.Operands(**(good | change))


@pytest.mark.parametrize("config", ["swapped", "direct"])
def test_views_and_half_precision(config):
    """Strided weights and shared output, fp16 activations: what an engine may hand over."""
    x, routing, weights = layer(5, 4, 2, 256, 128)
    routing = Routing(routing.topk_ids, routing.topk_weights.T.contiguous().T, 4)
    shared = torch.randn(256, 5, device=DEVICE).half().T
    out, want = run(x.half(), routing, weights, CONFIGS[config], shared=shared)
    assert out.dtype is torch.float16
    assert factories.relative_error(out, want) <= TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
def test_empty_batch_and_weights_types(config):
    _, _, weights = layer(1, 3, 2, 256, 128)
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    out = execution.run_experts(
        x,
        ids,
        torch.empty(0, 2, device=DEVICE),
        weights,
        Activation(),
        None,
        None,
        CONFIGS[config],
    )
    assert out.shape == (0, 256)
    with pytest.raises(ValueError, match="w13"):
        ExpertWeights(weights.w13.float(), weights.w13_scale, weights.w2, weights.w2_scale)
