# SPDX-License-Identifier: Apache-2.0
"""The plugin inside real engines on tiny FP8 checkpoints."""

import json
import os
import subprocess
import sys
import time
from functools import lru_cache

import pytest

from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.server import GATEWAY_ARGS, VllmServer

from .engine_run import PROMPTS
from .engines import HERE, environment

pytestmark = pytest.mark.serving
KEYS = {"layer", "backend", "reason", "shape", "routing", "config", "ep"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@lru_cache
def engine(model, **arguments) -> dict:
    """What engine_run.py found; equal engines run once."""
    draft = arguments.pop("draft", None)
    if draft:
        arguments["speculative_config"] = {"method": draft, "num_speculative_tokens": 1}
    arguments = {"quantization": "tma_fp8", "enforce_eager": True, **arguments}
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_run.py"), str(model), json.dumps(arguments)],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_reload_twice_equals_cold_start(folder):
    """A layer that kept anything derived from its weights would answer with the old ones."""
    first = write_checkpoint(folder / "first", "tiny-deepseek", seed=0)
    second = write_checkpoint(folder / "second", "tiny-deepseek", seed=1)
    found = engine(first, reload=str(second))
    wanted = engine(second)["cold"]
    assert wanted != found["cold"]
    assert found["other"] == [wanted, wanted]
    assert found["again"] == [found["cold"], found["cold"]]


def test_status_lists_every_moe_layer_and_the_draft_model(folder):
    model = write_checkpoint(folder / "mtp", "tiny-deepseek", num_nextn_predict_layers=1)
    found = engine(model, draft="mtp")["status"]
    layers = [entry["layer"].split(".mlp")[0].split(".")[-1] for entry in found]
    assert layers == ["1", "2", "3", "4", "5"], "layer 0 is dense, layer 5 predicts the next token"
    for entry in found:
        assert set(entry) == KEYS
        assert entry["backend"] == "moe_backend"
        assert entry["routing"] == (
            "moe_backend: sigmoid + bias, 2 of 4 groups, renormalised, top 4"
        )
        assert entry["shape"]["num_experts"] == 32 and entry["ep"]["transport"] == "none"


def test_qwen_routes_as_its_own_bf16_model(folder):
    """The same weights dequantised, on stock vLLM: FP8 activations are the only difference."""
    fp8 = write_checkpoint(folder / "fp8", "tiny-qwen3-moe")
    bf16 = write_checkpoint(folder / "bf16", "tiny-qwen3-moe", weights="bf16")
    ours = engine(fp8)["cold"]
    stock = engine(bf16, quantization=None)["cold"]
    first = [(a[0][0], b[0][0], abs(a[1][0] - b[1][0])) for a, b in zip(ours, stock, strict=True)]
    same = [difference for mine, theirs, difference in first if mine == theirs]
    assert len(same) >= 2, f"first tokens differ: {first}"
    assert max(same) < 0.5, f"log-probabilities differ: {first}"


def test_two_ranks_exchange_tokens(folder):
    """Data and expert parallelism on two processes; the idle rank must bring a dummy batch."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores, one for each rank")
    model = write_checkpoint(folder / "fp8", "tiny-qwen3-moe")
    alone = engine(model)["cold"]
    arguments = "--quantization tma_fp8 --enforce-eager --max-model-len 128 --max-num-seqs 2"
    arguments += " --data-parallel-size 2 --enable-expert-parallel"
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}
    bind["MOE_BACKEND_BALANCE"] = "1"
    words = [*arguments.split(), *GATEWAY_ARGS]
    with VllmServer(model, words, env=bind, start_timeout=240) as server:
        name = server.get_json("/v1/models")["data"][0]["id"]
        body = {"model": name, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "seed": 0}
        body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
        answers = [server.post_json("/v1/completions", {**body, "prompt": p}) for p in PROMPTS]
        time.sleep(2.1)  # readings are not older than two seconds
        balance = server.get_json("/moe/balance")
    # Both ranks are heard, and the dummy batches of the idle one are not tokens.
    used = sum(answer["usage"]["prompt_tokens"] + 7 for answer in answers)
    assert balance["complete"] and {row["tokens"] for row in balance["layers"]} == {used}
    first = [answer["choices"][0]["logprobs"]["tokens"][0] for answer in answers]
    same = [
        f"token_id:{tokens[0]}" == token for (tokens, _), token in zip(alone, first, strict=True)
    ]
    assert sum(same) >= 2, f"{first} on two ranks, alone {[tokens[0] for tokens, _ in alone]}"


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny-deepseek", "tiny-qwen3-moe"])
def test_kernels_answer_like_the_default_backend(folder, preset):
    """Compiled, with CUDA graphs, beside vLLM's own FP8 kernels on the same checkpoint."""
    model = write_checkpoint(folder / preset, preset)
    ours = engine(model, enforce_eager=False)
    default = engine(model, enforce_eager=False, quantization=None)
    pairs = zip(ours["cold"], default["cold"], strict=True)
    first = [(a[0][0], b[0][0], abs(a[1][0] - b[1][0])) for a, b in pairs]
    same = [difference for mine, theirs, difference in first if mine == theirs]
    assert len(same) >= 2 and max(same) < 0.5, first
    assert not default["status"]
    for entry in ours["status"]:
        assert entry["reason"] == "kernels on sm_90" and entry["config"]
