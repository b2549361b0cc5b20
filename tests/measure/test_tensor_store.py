# SPDX-License-Identifier: Apache-2.0
"""Reading experts out of shards, and the dequantised copy that stock vLLM serves on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.model_config import ModelError
from moe_backend.measure.tensor_store import TensorStore, dequantised_copy, load_experts

SMALL = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "vocab_size": 320,
}


@pytest.fixture(params=[2**31, 1_000_000], ids=["one file", "shards"])
def folder(tmp_path, request):
    return write_checkpoint(tmp_path / "m", max_shard_bytes=request.param, **SMALL)


def whole(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_experts_of_a_layer(folder):
    weights, bias = load_experts(TensorStore(folder), 1)
    assert weights.w13.shape == (8, 256, 256) and weights.w2.shape == (8, 256, 128)
    assert bias.shape == (8,) and bias.dtype is torch.float32
    found = whole(folder)
    prefix = "model.layers.1.mlp.experts.5"
    gate, up = weights.w13[5].view(torch.uint8).chunk(2)
    assert torch.equal(gate, found[f"{prefix}.gate_proj.weight"].view(torch.uint8))
    assert torch.equal(up, found[f"{prefix}.up_proj.weight"].view(torch.uint8))
    assert torch.equal(weights.w2_scale[5], found[f"{prefix}.down_proj.weight_scale_inv"])


def test_dequantised_copy_is_the_bf16_model_and_is_kept(tmp_path, folder):
    told = []
    copy = dequantised_copy(folder, tmp_path / "cache", lambda done, total: told.append(done))
    wanted = whole(write_checkpoint(tmp_path / "bf16", weights="bf16", **SMALL))
    found = whole(copy)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())
    assert (copy / "tokenizer.json").is_file() and told
    before = len(told)
    assert dequantised_copy(folder, tmp_path / "cache", told.append) == copy
    assert len(told) == before, "made twice"


def test_another_checkpoint_gets_another_copy(tmp_path):
    one = write_checkpoint(tmp_path / "one" / "m", **SMALL)
    two = write_checkpoint(tmp_path / "two" / "m", seed=1, **SMALL)
    cache = tmp_path / "cache"
    assert dequantised_copy(one, cache) != dequantised_copy(two, cache)


def test_clear_refusals(tmp_path, monkeypatch):
    empty = write_checkpoint(tmp_path / "empty", weights="none", **SMALL)
    with pytest.raises(ModelError, match="needs real weights"):
        TensorStore(empty)
    folder = write_checkpoint(tmp_path / "m", **SMALL)
    with pytest.raises(ModelError, match="no tensor like"):
        load_experts(TensorStore(folder), 0)  # the dense layer
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelError, match="MOE_BACKEND_CACHE_DIR"):
        dequantised_copy(folder, tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="not readable"):
        TensorStore(folder)
