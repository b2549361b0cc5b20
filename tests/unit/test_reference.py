# SPDX-License-Identifier: Apache-2.0
"""The oracle of all kernels against straightforward float64 loops."""

import math

import pytest
import torch
from factories import expert_weights, relative_error, routing
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_backend import Activation, RouterSpec, reference
from moe_backend.types import FP8


def loop_quant(row: list[float]) -> tuple[list[float], list[float]]:
    """One row by the book: fp32 scale from the group's largest magnitude, nearest e4m3."""
    values, scales = [], []
    for start in range(0, len(row), 128):
        group = torch.tensor(row[start : start + 128], dtype=torch.float32)
        scale = torch.tensor(max(float(group.abs().max()), 1e-10)) * torch.tensor(1 / 448.0)
        inverse = torch.tensor(1.0) / scale
        for value in group:
            scaled = min(max(float(value * inverse), -448.0), 448.0)
            values.append(float(torch.tensor(scaled).to(FP8).float()))
        scales.append(float(scale))
    return values, scales


@given(
    columns=st.integers(1, 400),
    magnitude=st.sampled_from([0, 1e-30, 1e-4, 1.0, 3e4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_quant_fp8_equals_the_loop_to_the_bit(columns, magnitude, seed):
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(seed)) * magnitude
    q, scale = reference.quant_fp8(x)
    values, scales = loop_quant(x[0].tolist())
    assert q.float()[0].tolist() == values
    assert scale[0].tolist() == scales


def test_quant_fp8_of_zeros_and_extremes_is_finite():
    for value in (0.0, 1e-38, 1e-23, 6e4, 3e38):
        q, scale = reference.quant_fp8(torch.full((2, 256), value))
        assert q.float().isfinite().all() and scale.isfinite().all()
        back = reference.dequant_fp8(q, scale)
        assert torch.allclose(back, torch.full((2, 256), value), rtol=0.07, atol=1e-12)


def test_quant_fp8_keeps_one_rows_nan_to_itself():
    x = torch.randn(3, 256)
    clean = reference.quant_fp8(x)
    x[1, 7] = float("nan")
    q, scale = reference.quant_fp8(x)
    for row in (0, 2):
        assert torch.equal(q[row].view(torch.uint8), clean[0][row].view(torch.uint8))
        assert torch.equal(scale[row], clean[1][row])


def loop_router(logits: list[float], bias: list[float], spec: RouterSpec):
    """One token in float64 with sorted() as the only tool."""
    if spec.score == "softmax":
        top = max(logits)
        parts = [math.exp(v - top) for v in logits]
        score = [p / sum(parts) for p in parts]
    elif spec.score == "sigmoid":
        score = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        score = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    key = [s + b for s, b in zip(score, bias, strict=True)]
    size = len(key) // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    best = [sum(sorted((key[e] for e in g), reverse=True)[: spec.group_candidates]) for g in groups]
    chosen = sorted(range(spec.num_groups), key=lambda g: (-best[g], g))[: spec.top_groups]
    allowed = [e for g in chosen for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-key[e], e))[: spec.top_k]
    weights = [score[e] for e in ids]
    total = sum(weights) if spec.renormalize else 1.0
    return ids, [w / total * spec.scale for w in weights]


@given(
    seed=st.integers(0, 999),
    score=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    groups=st.sampled_from([(1, 1, 1), (4, 2, 2), (8, 4, 2), (4, 1, 1)]),
    renormalize=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_router_equals_the_loop(seed, score, groups, renormalize, biased):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 32, generator=generator) * 2
    bias = torch.randn(32, generator=generator) * 0.3 * biased
    spec = RouterSpec(4, score, *groups, renormalize, 2.5)
    ids, weights, counts = reference.router_topk(logits, spec, bias)
    for token in range(3):
        want_ids, want_weights = loop_router(logits[token].tolist(), bias.tolist(), spec)
        assert ids[token].tolist() == want_ids
        assert weights[token].tolist() == pytest.approx(want_weights, rel=2e-5)
    assert counts.tolist() == torch.bincount(ids.flatten().long(), minlength=32).tolist()


def loop_layer(x, route, weights, activation, shared):
    """Token by token and route by route in float64; rounds where the contract says."""

    def matrix(w, scale):
        full = torch.zeros(w.shape, dtype=torch.float64)
        for i in range(w.shape[0]):
            for j in range(0, w.shape[1], 128):
                full[i, j : j + 128] = w[i, j : j + 128].double() * scale[i // 128, j // 128]
        return full

    def rounded(row):
        values, scales = loop_quant(row.tolist())
        each = [v * scales[i // 128] for i, v in enumerate(values)]
        return torch.tensor(each, dtype=torch.float64)

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        row = rounded(x[token].float())
        for slot in range(route.top_k):
            expert = int(route.topk_ids[token, slot])
            if expert < 0:
                continue
            i = weights.intermediate
            blocks = weights.w13_scale.shape[1] // 2
            gate_w = matrix(weights.w13[expert, :i], weights.w13_scale[expert, :blocks])
            up_w = matrix(weights.w13[expert, i:], weights.w13_scale[expert, blocks:])
            gate, up = gate_w @ row, up_w @ row
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                up = up.clamp(-activation.limit, activation.limit)
            hidden = rounded((gate / (1 + torch.exp(-activation.alpha * gate)) * up).float())
            down = (matrix(weights.w2[expert], weights.w2_scale[expert]) @ hidden).bfloat16()
            out[token] += float(route.topk_weights[token, slot]) * down.double()
        out[token] += shared[token].double()
    return out


@pytest.mark.parametrize("intermediate", [128, 192, 80], ids=["block", "tail-half", "below-block"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_layer_equals_the_loop(intermediate, limit):
    weights = expert_weights(4, 256, intermediate)
    route = routing(5, 4, 2)
    route.topk_ids[1, 0] = -1
    x, shared = torch.randn(5, 256).bfloat16(), torch.randn(5, 256).bfloat16()
    activation = Activation(1.1, limit)
    out = reference.fused_experts(
        x, route.topk_ids, route.topk_weights, weights, activation, None, shared
    )
    # bf16 output alone: 2^-9 / sqrt(3) = 1.1e-3; fp32 sums may flip a few e4m3 codes beside it
    assert relative_error(out, loop_layer(x, route, weights, activation, shared)) < 4e-3


def test_swapped_gate_and_up_would_be_seen():
    weights = expert_weights(4, 256, 128)
    route, x = routing(8, 4, 2), torch.randn(8, 256).bfloat16()
    right = reference.fused_experts(x, route.topk_ids, route.topk_weights, weights)
    weights.w13.copy_(torch.cat(weights.w13.chunk(2, 1)[::-1], 1))
    wrong = reference.fused_experts(x, route.topk_ids, route.topk_weights, weights)
    assert relative_error(wrong, right) > 0.1


def test_expert_map_sends_each_rank_its_own_routes():
    """Sum over the ranks equals the whole; local and global ids differ on every rank but 0."""
    weights, route = expert_weights(8, 256, 128), routing(16, 8, 3)
    x = torch.randn(16, 256).bfloat16()
    args = (x, route.topk_ids, route.topk_weights)
    whole = reference.fused_experts(*args, weights).float()
    total = torch.zeros_like(whole)
    for rank in range(2):
        mine = slice(rank * 4, rank * 4 + 4)
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(4, dtype=torch.int32)
        part = type(weights)(
            *(
                t[mine].contiguous()
                for t in (weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)
            )
        )
        total += reference.fused_experts(*args, part, expert_map=expert_map).float()
    assert relative_error(total, whole) < 4e-3


def test_absent_routes_give_zero_even_with_nan_weight():
    weights, x = expert_weights(), torch.randn(3, 256).bfloat16()
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    out = reference.fused_experts(x, ids, torch.full((3, 2), float("nan")), weights)
    assert torch.equal(out, torch.zeros_like(out))


def test_empty_batch():
    weights = expert_weights()
    ids = torch.empty(0, 2, dtype=torch.int32)
    out = reference.fused_experts(torch.empty(0, 256).bfloat16(), ids, ids.float(), weights)
    assert out.shape == (0, 256)
