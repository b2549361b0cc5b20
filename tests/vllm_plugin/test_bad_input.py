# SPDX-License-Identifier: Apache-2.0
"""Everything that cannot be served is refused by the front end, before a worker exists.

Through vLLM's own argument parsing, so that what a user would see is what is tested.
"""

import json
import re

import pytest

from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.vllm_plugin import checks, compat
from moe_backend.vllm_plugin.entry import TmaFp8Entry

vllm_args = pytest.importorskip("vllm.engine.arg_utils")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEEP = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def start(folder, *, preset="tiny-deepseek", quantization=KEEP, config=None, **arguments):
    """What `vllm serve --quantization tma_fp8` does before it starts an engine."""
    name = f"{abs(hash((preset, repr(quantization), repr(config))))}"
    model = write_checkpoint(folder / name, preset, weights="none")
    described = json.loads((model / "config.json").read_text()) | (config or {})
    if quantization is None:
        described.pop("quantization_config")
    elif quantization is not KEEP:
        described["quantization_config"] = quantization
    (model / "config.json").write_text(json.dumps(described))
    arguments = {"max_model_len": 128, "quantization": "tma_fp8", **arguments}
    return vllm_args.EngineArgs(model=str(model), **arguments).create_engine_config()


CASES = {
    "not quantized": ({"quantization": None}, "no quantization_config", "Use a checkpoint"),
    "per-tensor": (
        {"quantization": {"quant_method": "fp8", "activation_scheme": "static"}},
        "per-tensor FP8",
        "Use a checkpoint",
    ),
    "other blocks": (
        {"quantization": {**BLOCKS, "weight_block_size": [64, 64]}},
        r"weight_block_size is \[64, 64\]",
        "Use a checkpoint",
    ),
    "malformed blocks": (
        {"quantization": {**BLOCKS, "weight_block_size": [128]}},
        r"weight_block_size is \[128\]",
        "Use a checkpoint",
    ),
    "static activations": (
        {"quantization": {**BLOCKS, "activation_scheme": "static"}},
        "activation_scheme is 'static'",
        "Use a checkpoint",
    ),
    "another method": (
        {"quantization": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
        "quant_method is 'awq'",
        "Use a checkpoint",
    ),
    "hidden size": ({"config": {"hidden_size": 320}}, "hidden size 320", "Use the engine's"),
    "intermediate size": (
        {"config": {"moe_intermediate_size": 192}},
        "intermediate size 192",
        "Start without",
    ),
    "tensor parallel cut": (
        {"tensor_parallel_size": 4},
        "tensor parallel size 4 cuts .* 256 into 64 rows",
        "tensor-parallel size of 2, or --enable-expert-parallel",
    ),
    "activation": ({"config": {"hidden_act": "gelu"}}, "activation 'gelu'", "Start without"),
    "LoRA": ({"enable_lora": True}, "LoRA is enabled", "Merge the adapter"),
    "engine's kernels": ({"moe_backend": "triton"}, "--moe-backend triton", "Drop one"),
    "dual batch": ({"enable_dbo": True}, "dual-batch overlap", "Drop --enable-dbo"),
    "all-to-all": (
        {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "all2all_backend": "deepep_low_latency",
        },
        "--all2all-backend deepep_low_latency",
        "Use --all2all-backend",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_what_why_and_what_to_do(folder, case):
    arguments, why, remedy = CASES[case]
    with pytest.raises(ValueError, match=rf"(?s)tma_fp8: .*{why}.*{remedy}") as caught:
        start(folder, **arguments)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("MOE_BACKEND_FALBACK", "allow", "unknown environment variable MOE_BACKEND_FALBACK. Known"),
        ("MOE_BACKEND_FALLBACK", "perhaps", "should be 'refuse' or 'allow'"),
    ],
)
def test_environment_is_checked(folder, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        start(folder)


@pytest.mark.parametrize("preset", ["tiny-deepseek", "tiny-qwen3-moe"])
def test_good_models_are_accepted(folder, preset):
    assert start(folder, preset=preset).quant_config.get_name() == "tma_fp8"


def test_without_the_flag_nothing_is_ours(folder):
    config = vllm_args.EngineArgs(
        model=str(write_checkpoint(folder / "plain", "tiny-deepseek", weights="none")),
        max_model_len=128,
    ).create_model_config()
    assert config.quantization == "fp8"


def test_expert_parallelism_keeps_experts_whole(folder):
    config = start(folder, tensor_parallel_size=4, enable_expert_parallel=True)
    assert config.quant_config.get_name() == "tma_fp8"


def test_fallback_lets_a_bad_model_start(folder, monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_FALLBACK", "allow")
    assert start(folder, config={"hidden_act": "gelu"}).quant_config.refused == ""
    half = start(folder, quantization={**BLOCKS, "weight_block_size": [64, 64]})
    assert "[64, 64]" in half.quant_config.refused
    with pytest.raises(ValueError, match="no quantization_config"):
        start(folder, quantization=None)


@pytest.mark.parametrize(
    "platform, message",
    [
        (("cuda", (8, 0)), "the GPU is sm_80, the kernels are built for sm_90"),
        (("cuda", (10, 0)), "the GPU is sm_100"),
        (("rocm", None), "the platform is 'rocm'"),
    ],
)
def test_wrong_device_is_refused_with_a_remedy(folder, monkeypatch, platform, message):
    monkeypatch.setattr(compat, "platform", lambda: platform)
    with pytest.raises(ValueError, match=f"{message}.*without --quantization tma_fp8"):
        start(folder)


def test_hopper_is_accepted(folder, monkeypatch):
    monkeypatch.setattr(compat, "platform", lambda: ("cuda", (9, 0)))
    assert start(folder)


def test_all_reasons_come_at_once():
    model = checks.ModelFacts(hidden=320, intermediate=256, num_experts=8, activation="gelu")
    engine = checks.EngineFacts(lora=True, elastic=True)
    reasons = checks.model_refusals(model, engine, ("cpu", None))
    assert len(reasons) == 4
    with pytest.raises(checks.Refused, match="gelu.*hidden size 320.*LoRA.*elastic"):
        checks.refuse(reasons)


@pytest.mark.parametrize(
    "setting, facts, platform, message",
    [
        ("symm", {"ep_size": 2}, "cpu", "MOE_BACKEND_EP=symm needs CUDA. Unset it"),
        ("engine", {"ep_size": 2}, "cpu", "MOE_BACKEND_EP=engine needs CUDA. Unset it"),
        ("auto", {"tp_size": 2}, "cpu", "all-gather of unequal sizes.*--enable-expert-parallel"),
        ("symm", {"tp_size": 2}, "cuda", "needs whole experts. Add --enable-expert-parallel"),
        ("nccl", {"ep_size": 2}, "cuda", "CUDA graphs cannot capture. Add --enforce-eager"),
        ("nccl", {"ep_size": 2, "graphs": False}, "cuda", ""),
        ("auto", {"ep_size": 2}, "cpu", ""),
        ("symm", {"ep_size": 2}, "cuda", ""),
        ("engine", {"tp_size": 2}, "cuda", ""),
    ],
)
def test_transport_is_checked(monkeypatch, setting, facts, platform, message):
    monkeypatch.setenv("MOE_BACKEND_EP", setting)
    engine = checks.EngineFacts(travels=True, **facts)
    where = (platform, (9, 0) if platform == "cuda" else None)
    reasons = checks.model_refusals(checks.ModelFacts(), engine, where)
    assert bool(reasons) == bool(message)
    assert not message or re.search(message, reasons[0])


def test_models_without_experts_only_warn():
    """A draft model may have none, and must not stop the server."""
    dense = type("Config", (), {"hidden_size": 300, "intermediate_size": 77, "hidden_act": "gelu"})
    TmaFp8Entry.from_config(BLOCKS).maybe_update_config("draft", hf_config=dense())
