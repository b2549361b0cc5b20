# SPDX-License-Identifier: Apache-2.0
"""Turns, figures and ratios of a load test; the load generator is a stand-in."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_backend.measure import loadtest, vllm_bench
from moe_backend.measure.loadtest import Plan, Run, Side, percentile, summarise
from moe_backend.measure.vllm_bench import Load, LoadError

A, B = Side("default", "a"), Side("tma_fp8", "b")
SLOW, FAST = Load(1, 8, 4, 2), Load(math.inf, 8, 4, 2)


def plan(**fields) -> Plan:
    return Plan(**{"sides": (A, B), "loads": (SLOW, FAST), "rounds": 4, **fields})


def run(side: Side, load: Load, number: int, factor: float) -> Run:
    return Run(side.name, load.name, number, [factor, 3 * factor], [factor / 10], 100 / factor, 1.0)


def test_sides_take_turns_and_swap_their_order():
    turns = plan().turns()
    pairs = [(turns[i][0].name, turns[i + 1][0].name) for i in range(0, len(turns), 2)]
    assert len(turns) == 2 * 2 * 4
    assert pairs.count(("default", "tma_fp8")) == pairs.count(("tma_fp8", "default"))
    for i in range(0, len(turns), 2):
        assert turns[i][1:] == turns[i + 1][1:], "a pair has the same load and round"


def test_servers_that_cannot_be_up_together_change_once_a_round():
    names = [side.name for side, _, _ in plan(together=False).turns()]
    changes = sum(a != b for a, b in zip(names, names[1:], strict=False))
    assert changes == 4, "A B, B A, A B, B A: the server of a round's end stays for the next"


def test_both_sides_get_the_same_prompts_and_no_round_repeats_them():
    p = plan()
    seeds = {}
    for side, load, number in p.turns():
        seeds.setdefault((load, number), set()).add((side.name, p.seed_of(load, number)))
    assert all(len({seed for _, seed in found}) == 1 for found in seeds.values())
    assert len({next(iter(found))[1] for found in seeds.values()}) == len(seeds)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.sampled_from([0, 50, 90, 99, 100]),
)
def test_percentiles_are_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_ratio_and_spread_are_taken_round_by_round():
    factors = [2.0, 3.0, 4.0]
    runs = [run(A, load, n, 1.0) for load in (SLOW, FAST) for n in range(3)]
    runs += [run(B, load, n, f) for load in (SLOW, FAST) for n, f in enumerate(factors)]
    found = summarise(plan(rounds=3), runs)
    one = found["ratios"][0]["ttft_p50_ms"]
    assert (one["low"], one["median"], one["high"]) == (2.0, 3.0, 4.0)
    assert found["ratios"][0]["output_tokens_per_s"]["median"] == pytest.approx(1 / 3)
    row = next(r for r in found["results"] if r["side"] == "tma_fp8" and r["rate"] == 1)
    assert row["requests"] == 6 and row["ttft_p99_ms"] <= 12


def test_one_side_alone_has_no_ratio():
    found = summarise(plan(sides=(B,), rounds=1), [run(B, x, 0, 1.0) for x in (SLOW, FAST)])
    assert found["ratios"] == [] and len(found["results"]) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": -1}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 1}, "time per token"),
        ({"num_prompts": 0}, "num_prompts"),
    ],
)
def test_a_load_that_measures_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Load(**{"rate": 1, "input_len": 8, "output_len": 4, "num_prompts": 2, **fields})


@pytest.fixture
def generator(monkeypatch, tmp_path):
    """Replaces vLLM's generator, in the process that runs loads, by a body that sees ``args``."""

    def use(body: str) -> None:
        script = tmp_path / "generator.py"
        head = (
            "import json, sys, time\nfrom moe_backend.measure import vllm_bench\n"
            "def option(args, name): return args[args.index(name) + 1]\n"
            "def write(args, result):\n"
            "    path = option(args, '--result-dir') + '/' + option(args, '--result-filename')\n"
            "    json.dump(result, open(path, 'w'))\n"
            "def run(args):\n"
        )
        indented = "".join(f"    {line}\n" for line in body.splitlines())
        script.write_text(head + indented + "vllm_bench.run_jobs(sys.argv[2], run)\n")
        monkeypatch.setattr(vllm_bench, "COMMAND", (sys.executable, str(script)))

    return use


def one_load(*args):
    with vllm_bench.Generator() as running:
        return running.run("http://x", "m", SLOW, *args)


RESULT = {
    "completed": 2, "errors": ["", ""], "ttfts": [0.01, 0.03],
    "itls": [[0.002] * 3] * 2, "output_lens": [4, 4],
    "output_throughput": 5.0, "request_throughput": 1.0,
}  # fmt: skip


def test_the_generators_result_and_progress_come_back(generator):
    generator(
        "print('Starting main benchmark run...', flush=True)\n"
        "print(' 50%|#  | 1/2 [00:00', file=sys.stderr, flush=True)\n"
        "time.sleep(.3)\n"
        "print('100%|## | 2/2 [00:00', file=sys.stderr, flush=True)\n"
        f"write(args, json.loads({json.dumps(RESULT)!r}) | {{'seed': option(args, '--seed')}})\n"
    )
    seen = []
    result = one_load(7, lambda *counts: seen.append(counts))
    assert result["seed"] == "7" and seen[-1] == (2, 2)
    measured = loadtest._run(A, SLOW, 0, result)
    assert measured.ttft_ms == [10.0, 30.0] and measured.tpot_ms == pytest.approx([2.0, 2.0])


def test_one_process_runs_many_loads(generator):
    """Importing the engine takes longer than most loads."""
    generator(
        f"import os\nwrite(args, json.loads({json.dumps(RESULT)!r}) | {{'pid': os.getpid()}})"
    )
    with vllm_bench.Generator() as running:
        assert len({running.run("http://x", "m", SLOW, n)["pid"] for n in range(3)}) == 1


def test_after_a_load_that_failed_the_next_one_runs(generator):
    generator(
        "if option(args, '--seed') == '0': raise ValueError('no such tokenizer')\n"
        f"write(args, json.loads({json.dumps(RESULT)!r}))\n"
    )
    with vllm_bench.Generator() as running:
        with pytest.raises(LoadError, match="code 1:\n(.*\n)*ValueError: no such tokenizer"):
            running.run("http://x", "m", SLOW, 0)
        assert running.run("http://x", "m", SLOW, 1)["completed"] == 2


def test_warm_up_progress_is_not_counted(generator):
    generator(
        "print(' 50%|#  | 1/2 [00:00', file=sys.stderr, flush=True)\n"
        "time.sleep(.3)\n"
        f"write(args, json.loads({json.dumps(RESULT)!r}))\n"
    )
    seen = []
    one_load(0, lambda *counts: seen.append(counts))
    assert seen == []


def test_failed_requests_are_an_error_though_the_generator_ends_with_0(generator):
    failed = RESULT | {"completed": 1, "errors": ["", "Traceback\nConnectionRefusedError: no"]}
    generator(f"write(args, json.loads({json.dumps(failed)!r}))\n")
    with pytest.raises(LoadError, match="1 of 2 requests failed: ConnectionRefusedError: no"):
        one_load(0)


@pytest.mark.parametrize("end", ["sys.exit(3)", "import os; os._exit(3)"])
def test_a_generator_that_fails_is_quoted(generator, end):
    generator(f"print('no such tokenizer', flush=True)\n{end}\n")
    with pytest.raises(LoadError, match="code 3:\nno such tokenizer"):
        one_load(0)


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("8192:32:2/s:16", Load(2.0, 8192, 32, 16)),
        ("8192:32:inf:16", Load(math.inf, 8192, 32, 16)),
        ("1024:64:128c:256", Load(math.inf, 1024, 64, 256, clients=128)),
    ],
)
def test_loads_are_read(text, load):
    assert Load.parse(text) == load


@pytest.mark.parametrize("text", ["", "8192", "1:2:3:4", "1:2:0c:4", "1:2:1/s", "a:2:inf:4"])
def test_loads_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="expected|rate"):
        Load.parse(text)


def test_a_turn_without_its_counterpart_is_left_out():
    """An interruption between A and B must not compare three rounds with two."""
    p = plan(rounds=2)
    runs = [run(A, SLOW, 0, 1.0), run(B, SLOW, 0, 2.0), run(B, SLOW, 1, 9.0), run(A, FAST, 0, 1.0)]
    found = summarise(p, runs)
    assert [(r["side"], r["requests"]) for r in found["results"]] == [
        ("default", 2),
        ("tma_fp8", 2),
    ]
    assert found["ratios"][0]["ttft_p50_ms"]["high"] == 2.0 and found["ratios"][0]["rounds"] == 1
    assert found["not_reached"] == [FAST.name]


def test_the_generator_is_vllms_own():
    """The class behind `vllm bench serve` must know every option that we give."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    BenchmarkServingSubcommand.add_cli_args(parser)
    parsed = parser.parse_args(FAST.arguments(3))
    assert parsed.max_concurrency is None and parsed.temperature == 0
    assert parser.parse_args(Load.parse("8:4:3c:5").arguments(0)).max_concurrency == 3
    assert parsed.request_rate == math.inf and parsed.seed == 3 and parsed.ignore_eos
    assert parsed.random_input_len == 8 and parsed.num_prompts == 2
