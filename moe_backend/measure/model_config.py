# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says about its expert layers; no weights, no engine, no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_backend.types import Activation, MoEShape, RouterSpec

# How models score experts that do not say so in their configuration: (score, bias).
ROUTERS: dict[str, tuple[str, bool]] = {
    "deepseek_v2": ("softmax", False),
    "deepseek_v3": ("sigmoid", True),
    "deepseek_v32": ("sigmoid", True),
    "kimi_k2": ("sigmoid", True),
    "glm4_moe": ("sigmoid", True),
    "qwen2_moe": ("softmax", False),
    "qwen3_moe": ("softmax", False),
    "mixtral": ("softmax", False),
}


class ModelError(ValueError):
    """The model cannot be found or its configuration cannot be read."""


@dataclass(frozen=True)
class MoEModel:
    """The expert layers of a model, as its configuration describes them."""

    name: str
    config: dict[str, Any]  # of the language model
    quantization: dict[str, Any] | None
    moe_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    next_token_layers: tuple[int, ...]  # multi-token prediction, expert layers too

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def num_experts(self) -> int:
        return _number(self.config, "n_routed_experts", "num_experts", "num_local_experts") or 0

    @property
    def hidden(self) -> int:
        return _number(self.config, "hidden_size") or 0

    @property
    def intermediate(self) -> int:
        return _number(self.config, "moe_intermediate_size", "intermediate_size") or 0

    @property
    def top_k(self) -> int:
        return _number(self.config, "num_experts_per_tok", "moe_topk") or 1

    @property
    def activation(self) -> Activation:
        limit = self.config.get("swiglu_limit")
        return Activation(limit=float(limit) if limit else None)

    @property
    def num_shared_experts(self) -> int:
        shared = _number(self.config, "n_shared_experts")
        return shared or int(bool(_number(self.config, "shared_expert_intermediate_size")))

    def shape(self, tp: int = 1, ep: bool = False) -> MoEShape:
        """The layer on one of ``tp`` ranks; with ``ep`` whole experts are dealt to the ranks."""
        if ep and tp > 1:
            local = -(-self.num_experts // tp)
            return MoEShape(self.num_experts, local, self.hidden, self.intermediate, self.top_k, tp)
        cut = self.intermediate // tp
        return MoEShape(self.num_experts, self.num_experts, self.hidden, cut, self.top_k)

    def routing(self) -> tuple[RouterSpec, bool]:
        """How the model routes and whether a selection bias takes part.

        Raises:
            ModelError: the model's kind of routing is not known here.
        """
        config = self.config
        known = ROUTERS.get(self.model_type)
        score = config.get("scoring_func") or (known and known[0])
        if not known or not score:
            raise ModelError(
                f"{self.name}: how {self.model_type!r} models route is not known; "
                f"known: {', '.join(ROUTERS)}"
            )
        bias = known[1] and config.get("topk_method", "noaux_tc") == "noaux_tc"
        grouped = bias or config.get("topk_method") == "group_limited_greedy"
        renormalize = self.model_type == "mixtral" or bool(config.get("norm_topk_prob"))
        spec = RouterSpec(
            self.top_k,
            score,  # type: ignore[arg-type]  # checked by RouterSpec
            num_groups=(config.get("n_group") or 1) if grouped else 1,
            top_groups=(config.get("topk_group") or 1) if grouped else 1,
            group_candidates=2 if bias else 1,
            renormalize=renormalize,
            scale=float(config.get("routed_scaling_factor") or 1.0),
        )
        return spec, bias


def find_folder(model: str, *, weights: bool = False) -> Path:
    """The local folder of ``model``: itself, or the hub's copy (downloaded when it must be).

    Raises:
        ModelError: neither a folder with a config.json nor a model the hub can give.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise ModelError(f"{model}: no config.json in this folder; is it a model?")
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ModelError(f"{model}: no such folder (and not a hub name like owner/model)")
    try:
        from huggingface_hub import snapshot_download

        whole = ["*.json", "*.jinja", "tokenizer*", "*.safetensors"]
        return Path(snapshot_download(model, allow_patterns=whole if weights else "config.json"))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model}: no such folder, and the hub did not give it: {first}"
        ) from error


def read_model(model: str) -> MoEModel:
    """Reads the configuration of a local folder or a hub model; raises ModelError."""
    file = find_folder(model) / "config.json"
    try:
        whole = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ModelError(f"{file}: expected an object, found {type(whole).__name__}")
    text = whole.get("text_config")
    config = text if isinstance(text, dict) else whole
    quantization = whole.get("quantization_config") or config.get("quantization_config")
    layers = _number(config, "num_hidden_layers", "n_layers")
    if layers is None:
        raise ModelError(f"{file}: no num_hidden_layers; is this a language model?")
    moe = tuple(i for i in range(layers) if _is_moe(config, i))
    return MoEModel(
        name=model,
        config=config,
        quantization=quantization,
        moe_layers=moe,
        dense_layers=tuple(i for i in range(layers) if i not in moe),
        next_token_layers=tuple(
            range(layers, layers + (_number(config, "num_nextn_predict_layers") or 0))
        ),
    )


def _number(config: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _is_moe(config: dict[str, Any], layer: int) -> bool:
    if (_number(config, "n_routed_experts", "num_experts", "num_local_experts") or 0) < 2:
        return False
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return kinds[layer] == "sparse"
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return bool(frequency[layer])
    if layer < (config.get("first_k_dense_replace") or 0) or layer % (frequency or 1):
        return False
    step = config.get("decoder_sparse_step") or 1
    return (layer + 1) % step == 0 and layer not in (config.get("mlp_only_layers") or [])
