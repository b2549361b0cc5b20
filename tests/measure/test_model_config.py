# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: which layers hold experts, how they route, and clear refusals."""

from __future__ import annotations

import json

import pytest

from moe_backend.measure.checkpoint import write_checkpoint
from moe_backend.measure.model_config import ModelError, find_folder, read_model
from moe_backend.types import MoEShape, RouterSpec


@pytest.fixture
def write(tmp_path):
    def _write(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return _write


def test_deepseek_r1_as_published(tmp_path):
    model = read_model(str(write_checkpoint(tmp_path / "m", "deepseek-r1")))
    assert model.dense_layers == (0, 1, 2) and model.moe_layers == tuple(range(3, 61))
    assert model.next_token_layers == (61,)
    assert model.num_shared_experts == 1
    assert model.shape(8) == MoEShape(256, 256, 7168, 256, 8)
    assert model.shape(8, ep=True) == MoEShape(256, 32, 7168, 2048, 8, 8)
    spec, bias = model.routing()
    assert bias and spec == RouterSpec(8, "sigmoid", 8, 4, 2, True, 2.5)


def test_qwen3_routes_by_softmax_without_groups(tmp_path):
    model = read_model(str(write_checkpoint(tmp_path / "m", "qwen3-30b-a3b")))
    spec, bias = model.routing()
    assert not bias and spec == RouterSpec(8, "softmax", 1, 1, 1, True, 1.0)
    assert model.moe_layers == tuple(range(48)) and not model.next_token_layers


def test_which_layers_hold_experts(write):
    base = {"num_hidden_layers": 6, "num_experts": 8}
    assert read_model(write(**base)).moe_layers == (0, 1, 2, 3, 4, 5)
    sparse = base | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_model(write(**sparse)).moe_layers == (1, 5)
    assert read_model(write(**base, moe_layer_freq=[0, 0, 1, 1, 1, 0])).moe_layers == (2, 3, 4)
    kinds = ["dense", "sparse", "dense", "sparse", "dense", "dense"]
    assert read_model(write(**base, mlp_layer_types=kinds)).moe_layers == (1, 3)
    assert read_model(write(num_hidden_layers=2, hidden_size=8)).moe_layers == ()


def test_text_config_of_a_multimodal_model_is_found(write):
    text = {"num_hidden_layers": 2, "num_experts": 4, "hidden_size": 256, "model_type": "mixtral"}
    model = read_model(write(text_config=text, quantization_config={"quant_method": "fp8"}))
    assert model.hidden == 256 and model.quantization == {"quant_method": "fp8"}
    assert model.routing()[0].renormalize


def test_unknown_routing_is_said_not_guessed(write):
    model = read_model(write(num_hidden_layers=2, num_experts=4, model_type="new_moe"))
    with pytest.raises(ModelError, match="'new_moe' models route is not known"):
        model.routing()


def test_clear_refusals(tmp_path, write):
    with pytest.raises(ModelError, match="no such folder"):
        read_model(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="no such folder"):
        find_folder("./absent/model")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable as JSON"):
        read_model(str(tmp_path))
    with pytest.raises(ModelError, match="expected an object"):
        (tmp_path / "config.json").write_text("[]")
        read_model(str(tmp_path))
    with pytest.raises(ModelError, match="no num_hidden_layers"):
        read_model(write(hidden_size=8))
