# SPDX-License-Identifier: Apache-2.0
"""The registered face of ``tma_fp8``: decides whether it was asked for, then builds the config.

vLLM probes this class for every quantized model it loads, so it stays light: the real
configuration, which pulls in vLLM's FP8 and MoE modules, is imported once somebody chose it.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moe_backend.vllm_plugin import METHOD


class TmaFp8Entry(QuantizationConfig):
    """Claims a checkpoint when the user asked for ``tma_fp8``, whatever the checkpoint is.

    Claiming also what cannot be served lets our own check say why, instead of vLLM's message
    about two method names that differ.
    """

    def __init__(self) -> None:
        """vLLM builds the class without arguments when a checkpoint is not quantized."""
        super().__init__()
        type(self).from_config({})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:  # type: ignore[override]
        from moe_backend.vllm_plugin import compat

        compat.check()
        from moe_backend.vllm_plugin.config import TmaFp8Config

        return TmaFp8Config.from_config(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):  # type: ignore[override]
        return METHOD if user_quant == METHOD else None

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list:  # type: ignore[override]
        import torch

        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # checked with a reason in TmaFp8Config

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer, prefix):  # type: ignore[override]
        raise NotImplementedError("TmaFp8Config decides; from_config builds it")


def register_entry() -> None:
    register_quantization_config(METHOD)(TmaFp8Entry)
