# SPDX-License-Identifier: Apache-2.0
"""What only a Hopper GPU shows: the Gluon kernels, CUDA graphs, repeatability, long addresses."""

import dataclasses

import factories
import pytest
import torch
from moe_backend.kernels import grouped_gemm as gg
from moe_backend.kernels.schedule import schedule

from moe_backend import execution
from moe_backend.measure import tensor_core
from moe_backend.types import Activation, GemmConfig, KernelConfig, Routing

pytestmark = pytest.mark.gpu

# Against the oracle that adds as the tensor cores do. Where a sum of the kernel and of the oracle
# differ in the last bit of fp32, an FP8 code of the intermediate may still flip.
TOLERANCE = 4e-3
GLUON = GemmConfig(kernel="gluon")
NO_TURNS = GemmConfig(kernel="gluon", turns=False)
PLAIN = GemmConfig(num_warps=8, swap=False)
CONFIGS = {
    "direct": KernelConfig(16, direct=True),
    "swapped": KernelConfig(16, up=GemmConfig(unroll=2, num_stages=3), down=GemmConfig(span=2)),
    "upright": KernelConfig(64, up=PLAIN, down=PLAIN),
    "gluon": KernelConfig(128, up=GLUON, down=GLUON),
    "gluon gathered": KernelConfig(128, up=GLUON, down=NO_TURNS, gather=True),
    "gluon slabs": KernelConfig(128, up=NO_TURNS, down=GLUON, gather=True, slab=512),
}
SIZES = (0, 1, 63, 64, 65, 127, 128, 129)


def run(x, routing, weights, config, **options):
    return execution.run_experts(
        x, routing.topk_ids, routing.topk_weights, weights,
        options.get("activation", Activation()), options.get("expert_map"),
        options.get("shared"), config,
    )  # fmt: skip


def oracle(x, routing, weights, **options):
    return tensor_core.fused_experts(
        x, routing.topk_ids, routing.topk_weights, weights,
        options.get("activation", Activation()), options.get("expert_map"), options.get("shared"),
    )  # fmt: skip


def layer(tokens, experts=8, top_k=2, hidden=1024, inter=512, seed=0):
    weights = factories.expert_weights(experts, hidden, inter, device="cuda", seed=seed)
    routing = factories.routing(tokens, experts, top_k, device="cuda", seed=seed)
    return torch.randn(tokens, hidden, device="cuda").bfloat16(), routing, weights


@pytest.mark.parametrize("k", [32, 128])
@pytest.mark.parametrize("spread", [0, 6], ids=["alike", "spread"])
def test_the_oracle_adds_as_the_tensor_cores_do(k, spread):
    """Every bit of an MMA, also where addends differ by many powers of two."""
    generator = torch.Generator("cuda").manual_seed(k)

    def operand():
        x = torch.randn(128, 128, generator=generator, device="cuda")
        power = torch.randint(-spread, spread + 1, x.shape, generator=generator, device="cuda")
        x[:, k:] = 0
        return (x * power.float().exp2()).clamp(-448, 448).to(torch.float8_e4m3fn)

    a, b = operand(), operand()
    one = torch.ones(128, 1, device="cuda")
    plan = schedule(torch.zeros(128, 1, dtype=torch.int32, device="cuda"), 1, 64)
    x = gg.Operands(a, one.T.contiguous(), b[None], torch.ones(1, 1, 1, device="cuda"))
    want = tensor_core.matmul(a, one, b, one[:1])
    exact = a.float() @ b.float().T
    for tiles in (gg.Tiles(num_warps=8, swap=False), gg.Tiles()):
        out = gg.grouped_gemm(x, plan, tiles)
        assert torch.equal(out, want.bfloat16())
    assert not torch.equal(want, exact)  # or the oracle would show nothing


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("limit", [None, 7.0])
def test_groups_round_the_tile(config, limit, poisoned_memory):
    """Uneven, shuffled groups, a stale id, an absent token, a clamp and a shared expert."""
    ids = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(SIZES)])
    ids = ids[torch.randperm(ids.numel())].view(-1, 1)
    second = (ids + 3) % len(SIZES)
    ids = torch.cat([ids, second], 1).cuda()
    ids[5] = -1
    ids[6, 1] = 99
    x, _, weights = layer(ids.shape[0], len(SIZES))
    routing = Routing(ids, torch.rand(ids.shape, device="cuda"), len(SIZES))
    options = {"activation": Activation(limit=limit), "shared": torch.randn_like(x)}
    out = run(x, routing, weights, config, **options)
    assert factories.relative_error(out, oracle(x, routing, weights, **options)) <= TOLERANCE


@pytest.mark.parametrize("inter", [64, 80, 192, 320, 704, 1408])
@pytest.mark.parametrize("tokens", [3, 40, 700])
def test_shapes_that_nobody_tuned(inter, tokens, monkeypatch):
    from moe_backend.tuning.heuristics import heuristic
    from moe_backend.types import MoEShape

    x, routing, weights = layer(tokens, 6, 3, 1152, inter)
    config = heuristic(MoEShape(6, 6, 1152, inter, 3), tokens)
    out = run(x, routing, weights, config)
    assert factories.relative_error(out, oracle(x, routing, weights)) <= TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graph_replays_with_other_routings(config):
    """Captured with one routing and content, replayed with others: equals eager."""
    tokens = 4 if config.direct else 200
    x, routing, weights = layer(tokens)
    run(x, routing, weights, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, routing, weights, config)
    for seed in range(1, 60):
        other = factories.routing(tokens, 8, 2, device="cuda", seed=seed)
        if seed % 3 == 0:
            other.topk_ids[:] = seed % 8  # all tokens to one expert
        if seed % 5 == 0:
            other.topk_ids[: tokens // 2] = -1
        routing.topk_ids.copy_(other.topk_ids)
        routing.topk_weights.copy_(other.topk_weights)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, run(x, other, weights, config)), seed


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_two_thousand_repeats_are_identical(config):
    tokens = 4 if config.direct else 300
    x, routing, weights = layer(tokens)
    first = run(x, routing, weights, config)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(2000):
        differs |= (run(x, routing, weights, config) != first).any()
    assert not differs.item()


@pytest.mark.parametrize("name", ["swapped", "gluon", "gluon gathered"])
def test_beyond_two_to_the_31_elements(name):
    """330,000 rows of 8,192 columns: 2.7e9 elements in the down projection's rows.

    Addresses exactly: rows do not depend on their neighbours, so the sampled tokens alone give the
    same bits. Then accuracy, on rows next to the boundaries.
    """
    tokens, hidden = 330_000, 8192
    x, routing, weights = layer(tokens, 4, 1, hidden, 128)
    out = run(x, routing, weights, CONFIGS[name])
    edges = torch.tensor([0, 131_040, 262_112, tokens - 64], device="cuda")
    some = (edges[:, None] + torch.arange(64, device="cuda")).flatten()
    part = Routing(routing.topk_ids[some], routing.topk_weights[some], 4)
    assert torch.equal(out[some], run(x[some], part, weights, CONFIGS[name]))
    some = torch.tensor([0, 1, 131_071, 131_073, 262_143, 262_145, tokens - 1], device="cuda")
    part = Routing(routing.topk_ids[some], routing.topk_weights[some], 4)
    assert factories.relative_error(out[some], oracle(x[some], part, weights)) <= TOLERANCE


def test_extreme_scales_stay_finite():
    x, routing, weights = layer(300, 8)
    scales = torch.tensor([0.0, 1e-30, 1e-23, 6e4, 1.0, 1.0, 1e-3, 0.0], device="cuda")
    w13_scale = weights.w13_scale * 0 + scales[:, None, None]
    weights = dataclasses.replace(weights, w13_scale=w13_scale)
    for config in CONFIGS.values():
        assert run(x, routing, weights, config).isfinite().all(), config


def test_one_nan_row_stays_alone():
    for name, config in CONFIGS.items():
        x, routing, weights = layer(5 if config.direct else 200)
        good = run(x, routing, weights, config)
        x[2] = torch.nan
        out = run(x, routing, weights, config)
        keep = torch.arange(x.shape[0], device="cuda") != 2
        assert torch.equal(out[keep], good[keep]), name


@pytest.mark.parametrize("name", ["swapped", "upright", "gluon"])
def test_a_single_row_goes_straight_to_its_token(name, poisoned_memory):
    """Top-1, groups of every size, absent tokens: no partial rows and no reduction."""
    ids = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(SIZES)])
    ids = ids[torch.randperm(ids.numel())].view(-1, 1).cuda()
    ids[5] = -1
    x, _, weights = layer(ids.shape[0], len(SIZES), hidden=1152)
    routing = Routing(ids, torch.rand(ids.shape, device="cuda"), len(SIZES))
    for dtype in (torch.bfloat16, torch.float16):
        out = run(x.to(dtype), routing, weights, CONFIGS[name])
        want = oracle(x.to(dtype), routing, weights)
        assert factories.relative_error(out, want) <= TOLERANCE
        assert not out[5].any()


def test_the_operator_serves_the_selected_configuration():
    from moe_backend import fused_experts

    for tokens in (1, 33, 1500):
        x, routing, weights = layer(tokens, 8, 2, 1024, 256)
        out = fused_experts(x, routing, weights)
        assert factories.relative_error(out, oracle(x, routing, weights)) <= TOLERANCE


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inter"),
    [(2000, 4, 1, 1024, 128), (2000, 4, 1, 1024, 512), (3000, 16, 2, 2048, 768)],
)
def test_gluon_equals_triton_bit_by_bit(tokens, experts, top_k, hidden, inter, turns):
    """Same sums in the same order. A tile with 20 of 128 rows and a K of one step once differed."""
    from moe_backend.kernels import grouped_gemm_sm90 as gluon
    from moe_backend.kernels.quant_fp8 import quant_permute

    x, routing, weights = layer(tokens, experts, top_k, hidden, inter)
    plan = schedule(routing.topk_ids, experts, 128)
    a, scale = quant_permute(x, plan.route_row, plan.num_rows)
    up = gg.Operands(a, scale, weights.w13, weights.w13_scale)
    tiles = gg.Tiles(num_warps=8, num_stages=3, swap=False)
    q, q_scale = gg.grouped_gemm_swiglu(up, plan, tiles)
    q9, q9_scale = gluon.grouped_gemm_swiglu(up, plan, turns=turns)
    live = plan.route_row.flatten().long()
    assert torch.equal(q[live].view(torch.uint8), q9[live].view(torch.uint8))
    assert torch.equal(q_scale[:, live], q9_scale[:, live])
    down = gg.Operands(q, q_scale, weights.w2, weights.w2_scale)
    rows = gg.grouped_gemm(down, plan, tiles)
    assert torch.equal(rows[live], gluon.grouped_gemm(down, plan, turns=turns)[live])
