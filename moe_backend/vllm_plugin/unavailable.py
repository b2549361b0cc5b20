# SPDX-License-Identifier: Apache-2.0
"""What ``tma_fp8`` means when registration failed: an explanation.

Imports nothing of ours, so that it survives whatever broke the real configuration.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moe_backend.vllm_plugin import METHOD

_reason = "registration failed"


class TmaFp8Unavailable(QuantizationConfig):
    """Raises the reason as soon as somebody chooses the method."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(_reason)

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list:  # type: ignore[override]
        return []

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TmaFp8Unavailable:
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):  # type: ignore[override]
        return METHOD if user_quant == METHOD else None

    def get_quant_method(self, layer, prefix):  # type: ignore[override]
        return None


def register_unavailable(error: Exception) -> None:
    """Registers the name with ``error`` as its explanation."""
    global _reason
    _reason = (
        f"--quantization {METHOD} is unavailable because the plugin could not be registered: "
        f"{type(error).__name__}: {error}. Run `moe-backend doctor` for versions, install a "
        f"supported vLLM, or start without --quantization {METHOD}."
    )
    register_quantization_config(METHOD)(TmaFp8Unavailable)
