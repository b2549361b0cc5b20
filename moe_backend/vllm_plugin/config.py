# SPDX-License-Identifier: Apache-2.0
"""TmaFp8Config: which layer of a block-FP8 checkpoint gets which method.

Workers unpickle the configuration before any plugin is registered, hence the module-level class
and plain attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from moe_backend import envs, support
from moe_backend.vllm_plugin import METHOD, checks, compat, status

logger = compat.logger()


class TmaFp8Config(Fp8Config):
    """vLLM's FP8 configuration with our method on the MoE layers.

    Dense layers and attention keep vLLM's FP8 methods; without CUDA, where vLLM has no kernel for
    block-scaled FP8, dense layers get ours.
    """

    def __init__(self, *args: Any, refused: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refused = refused  # why the whole checkpoint goes to the engine (fallback allowed)

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # maybe_update_config checks it and says what to do

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TmaFp8Config:
        """Reads ``quantization_config``; raises Refused when we cannot serve it."""
        answer = support.supports_checkpoint(config)
        is_fp8 = config.get("quant_method") == "fp8"
        if not answer.ok and not (is_fp8 and _may_fall_back()):
            checks.refuse([answer.reason])
        arguments = {
            "is_checkpoint_fp8_serialized": True,
            "activation_scheme": config.get("activation_scheme", "dynamic"),
            "ignored_layers": config.get("ignored_layers") or config.get("modules_to_not_convert"),
            "weight_block_size": config.get("weight_block_size"),
            "store_dtype": config.get("store_dtype"),
        }
        return cls(
            **compat.fp8_config_arguments(Fp8Config, arguments),
            refused="" if answer.ok else answer.reason,
        )

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """The front end's early check: every reason not to start, before a worker exists."""
        if hf_config is None:
            return
        model = checks.ModelFacts.of(hf_config)
        engine = checks.EngineFacts.of(compat.engine_config())
        reasons = checks.model_refusals(model, engine, compat.platform())
        if reasons and _may_fall_back():
            logger.warning_once("%s: MoE layers go to the engine: %s", METHOD, " | ".join(reasons))
            return
        checks.refuse(reasons)
        if not model.num_experts or model.num_experts < 2:
            logger.warning("%s: %s has no expert layers, nothing changes", METHOD, model_name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return self._moe_method(layer, prefix)
        if isinstance(layer, LinearBase) and compat.platform()[0] == "cpu" and not self.refused:
            from moe_backend.vllm_plugin.linear import TmaFp8CpuLinearMethod

            skipped = compat.is_skipped(prefix, self)
            return UnquantizedLinearMethod() if skipped else TmaFp8CpuLinearMethod(self)
        return super().get_quant_method(layer, prefix)

    def _moe_method(self, layer: RoutedExperts, prefix: str) -> Any:
        from moe_backend.vllm_plugin.layers import layer_refusals, shape_of
        from moe_backend.vllm_plugin.method import TmaFp8MoEMethod

        if compat.is_skipped(prefix, self):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        reasons = [self.refused] if self.refused else layer_refusals(layer)
        if not reasons:
            return TmaFp8MoEMethod(layer)
        if not _may_fall_back():
            checks.refuse(reasons, f", layer {prefix}")
        reason = " | ".join(reasons)
        logger.warning_once("%s: MoE layers go to the engine: %s", METHOD, reason)
        status.record(layer, status.LayerStatus(prefix, "engine", reason, shape_of(layer)))
        try:
            method = super().get_quant_method(layer, prefix)
            compat.require_usable(method)
        except Exception as error:
            raise checks.Refused(
                f"--quantization {METHOD}, layer {prefix}: {reason}. MOE_BACKEND_FALLBACK=allow "
                f"handed it to the engine, which cannot serve it either: {error}"
            ) from error
        return method


def _may_fall_back() -> bool:
    return envs.load().fallback == "allow"
