# SPDX-License-Identifier: Apache-2.0
"""doctor's answers on this machine and on machines it only hears of."""

from __future__ import annotations

import importlib.metadata

import pytest

from moe_backend.measure import doctor
from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.model_config import read_model

HOPPER, AMPERE, CPU = ("cuda", (9, 0)), ("cuda", (8, 0)), ("cpu", None)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return read_model(str(write_checkpoint(tmp_path_factory.mktemp("m") / "r1", "deepseek-r1")))


def tiny(tmp_path, **fields):
    return read_model(str(write_checkpoint(tmp_path / "m", weights="none", **fields)))


def by_kind(groups):
    return {g.kind: g for g in groups}


def test_layers_on_hopper(deepseek):
    found = by_kind(doctor.layer_groups(deepseek, HOPPER, 8, False))
    assert found["experts"].backend == "moe_backend" and found["experts"].numbers() == "3–60"
    assert found["experts"].shape["intermediate"] == 256
    assert "sigmoid + bias, 4 of 8 groups" in found["experts"].routing
    assert found["dense"].backend == "engine" and found["next token"].layers == (61,)


def test_old_gpu_refuses_and_fallback_hands_over(deepseek, monkeypatch):
    refused = by_kind(doctor.layer_groups(deepseek, AMPERE, 8, False))["experts"]
    assert refused.backend == "refused" and "sm_80" in refused.reason
    monkeypatch.setenv("MOE_BACKEND_FALLBACK", "allow")
    handed = by_kind(doctor.layer_groups(deepseek, AMPERE, 8, False))["experts"]
    assert handed.backend == "engine" and handed.reason == refused.reason


def test_tensor_parallelism_that_cuts_a_block(tmp_path):
    model = tiny(tmp_path)
    cut = by_kind(doctor.layer_groups(model, HOPPER, 4, False))["experts"]
    assert cut.backend == "refused" and "tensor-parallel size of 2" in cut.reason
    whole = by_kind(doctor.layer_groups(model, HOPPER, 4, True))["experts"]
    assert whole.backend == "moe_backend" and whole.shape["num_local_experts"] == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 320}, "hidden size 320 is not a multiple of 128"),
        ({"quantization_config.weight_block_size": [64, 64]}, r"\[64, 64\]"),
        ({"quantization_config.weight_block_size": None}, "per-tensor FP8"),
        ({"quantization_config.quant_method": "gptq"}, "'gptq', not 'fp8'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path, fields, words):
    import re

    group = by_kind(doctor.layer_groups(tiny(tmp_path, **fields), CPU, 1, False))["experts"]
    assert group.backend == "refused" and re.search(words, group.reason)


def test_experts_that_the_checkpoint_keeps_unquantised(tmp_path):
    model = tiny(tmp_path)
    model.quantization["modules_to_not_convert"] = ["model.layers.2.mlp.experts.0.up_proj"]
    groups = [g for g in doctor.layer_groups(model, HOPPER, 1, False) if g.kind == "experts"]
    assert [(g.layers, g.backend) for g in groups] == [((1, 3, 4), "moe_backend"), ((2,), "engine")]


def test_model_without_experts_is_no_failure(tmp_path):
    (group,) = doctor.layer_groups(tiny(tmp_path, first_k_dense_replace=5), CPU, 1, False)
    assert group.backend == "engine" and "no expert layers" in group.reason


def test_registration_error_is_reported_not_raised(monkeypatch):
    """A vLLM that lost a name must end in this line, not in a traceback."""
    pytest.importorskip("vllm")
    from moe_backend.vllm_plugin import compat

    monkeypatch.setattr(compat, "missing", lambda: ["vllm.config.VllmConfig"])
    finding = doctor._registration()
    assert finding.ok is False and "vllm.config.VllmConfig" in finding.note


def test_registration_succeeds_here():
    pytest.importorskip("vllm")
    assert doctor._registration().ok


def test_plugins_switched_off_and_entry_point_missing(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda *names: "not installed")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = {f.name: f for f in doctor._plugin()}
    assert found["VLLM_PLUGINS"].ok is False and "tma_fp8" in found["VLLM_PLUGINS"].note
    monkeypatch.setattr(doctor, "entry_points", lambda group: importlib.metadata.EntryPoints())
    found = {f.name: f for f in doctor._plugin()}
    assert found["entry point"].ok is False and "pip install" in found["entry point"].note


def test_environment_shows_values_defaults_and_unknown_names(monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_EP", "nccl")
    found = {f.name: f for f in doctor._environment()}
    assert found["MOE_BACKEND_EP"].value == "nccl (set)"
    assert found["MOE_BACKEND_FALLBACK"].value == "refuse (default)"
    monkeypatch.setenv("MOE_BACKEND_FALBACK", "allow")
    report = doctor.Report(list(doctor._environment()), [])
    assert any("MOE_BACKEND_FALBACK" in line for line in report.blockers)


def test_missing_vllm_blocks(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda *names: "not installed")
    report = doctor.Report(list(doctor._versions(CPU)), [])
    assert report.blockers and "install vLLM" in report.blockers[0]
    report = doctor.Report(list(doctor._versions(HOPPER)), [])
    assert any("triton" in line for line in report.blockers)
