# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmark and tuner that need no GPU."""

import io
import json

import pytest

from moe_backend.measure import bench_experts, timing, tuner
from moe_backend.measure.roofline import experts_roofline
from moe_backend.types import MoEShape

DEEPSEEK = {
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "hidden_size": 7168,
    "num_experts_per_tok": 8,
}


def test_percentiles():
    assert timing.percentiles([5.0, 1.0, 4.0, 2.0, 3.0]) == timing.Timing(2.0, 3.0, 5.0)
    assert timing.percentiles([7.0]).as_dict() == {"p20": 7.0, "p50": 7.0, "p80": 7.0}
    with pytest.raises(ValueError, match="at least one"):
        timing.percentiles([])


@pytest.mark.parametrize(
    ("routes", "live", "us", "bound"),
    [(8, 8, 10, "memory"), (131072, 256, 931, "tensor cores")],  # as published for TP8
)
def test_roofline_of_deepseek(routes, live, us, bound):
    floor = experts_roofline(bench_experts.SHAPES["deepseek-v3-tp8"], routes, live)
    assert floor.us == pytest.approx(us, rel=0.02) and floor.bound == bound


def test_layers_are_named_or_given_by_their_sizes():
    assert bench_experts.shape_of("E8-H1024-I64-K2") == MoEShape(8, 8, 1024, 64, 2)
    shapes = [bench_experts.shape_of(name) for name in bench_experts.OTHERS]
    assert {s.intermediate for s in shapes} >= {64, 192, 320, 704, 1408, 1536, 4096}
    with pytest.raises(ValueError, match="top_k"):
        bench_experts.shape_of("E2-H1024-I64-K3")


def test_shape_of_a_model_under_tensor_and_expert_parallelism():
    assert tuner.shape_of_model(DEEPSEEK, 8, 1) == MoEShape(256, 256, 7168, 256, 8)
    assert tuner.shape_of_model(DEEPSEEK, 8, 8) == MoEShape(256, 32, 7168, 2048, 8, ep_size=8)
    qwen = {
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "hidden_size": 2048,
        "num_experts_per_tok": 8,
    }
    assert tuner.shape_of_model(qwen, 1, 1) == bench_experts.SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("config", "tp", "ep", "message"),
    [
        ({"hidden_size": 4096}, 1, 1, "mixture of experts"),
        (DEEPSEEK, 3, 1, "--tp 3 does not divide"),
        (DEEPSEEK, 1, 3, "--ep 3 does not divide"),
    ],
)
def test_a_model_that_cannot_be_cut_is_named(config, tp, ep, message):
    with pytest.raises(ValueError, match=message):
        tuner.shape_of_model(config, tp, ep)


def test_traces(tmp_path):
    path = tmp_path / "counts"
    path.write_text(json.dumps([3, 0, 1]))
    assert tuner.popularity_of_trace(path, 3) == [3.0, 0.0, 1.0]
    path.write_text("3\n0\n1\n")
    assert tuner.popularity_of_trace(path, 3) == [3.0, 0.0, 1.0]
    for text in ("[1, 2]", "[0, 0, 0]", '["a", 1, 2]', "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="counts"):
            tuner.popularity_of_trace(path, 3)


def rows():
    ok = bench_experts.Row("s", 64, "uniform", 100.0, 10**12, 10**9)
    ok.us = {n: {"p20": t, "p50": t, "p80": t} for n, t in (("ours", 200.0), ("triton", 300.0))}
    ok.config = {"source": "exact"}
    bad = bench_experts.Row("s", 128, "uniform", 100.0)
    bad.failed = {"ours": "relative error 1.00e+00 exceeds 6e-03"}
    return [ok, bad]


def test_rows_tell_ratios_and_failures(tmp_path):
    from rich.console import Console

    ok, bad = rows()
    assert ok.as_dict()["times_faster_than"] == {"triton": 1.5}
    assert "FAILED" in bench_experts.line(bad) and "200.0" in bench_experts.line(ok)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(bench_experts.table([ok, bad]))
    text = console.export_text()
    assert "1.50×" in text and "50%" in text and "relative error" in text
    pytest.importorskip("matplotlib")
    bench_experts.plot([ok, bad], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_every_candidate_is_compiled_before_it_is_timed():
    for shape in bench_experts.SHAPES.values():
        for tokens in (1, 64, 8192):
            assert tuner.candidates(shape, tokens)
