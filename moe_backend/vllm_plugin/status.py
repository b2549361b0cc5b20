# SPDX-License-Identifier: Apache-2.0
"""Which layer runs where, and why: filled at load, read by anybody who asks.

``--worker-extension-cls moe_backend.vllm_plugin.status.StatusExtension`` gives every worker
``moe_status()``, so ``LLM.collective_rpc("moe_status")`` and the gateway can show it, and
``moe_balance()``, empty unless MOE_BACKEND_BALANCE=1 (see live_balance.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from moe_backend.types import MoEShape


@dataclass
class LayerStatus:
    """One MoE layer of this process."""

    layer: str
    backend: str  # "moe_backend" or "engine"
    reason: str  # why this backend
    shape: MoEShape
    routing: str = ""  # who selects the experts, and why when it is not us
    config: dict[str, Any] = field(default_factory=dict)  # tiles taken, empty without a GPU
    ep: dict[str, Any] = field(default_factory=dict)  # size, rank, local experts, transport


# Keyed by the layer, so that a model that is gone is no longer reported.
_layers: WeakKeyDictionary[Any, LayerStatus] = WeakKeyDictionary()


def record(layer: Any, entry: LayerStatus) -> LayerStatus:
    _layers[layer] = entry
    return entry


def of(layer: Any) -> LayerStatus | None:
    return _layers.get(layer)


def moe_status() -> list[dict[str, Any]]:
    """One plain dict per MoE layer of this process, in the model's order."""
    return [asdict(entry) for entry in _layers.values()]


class StatusExtension:
    """Mixed into vLLM's worker; each worker answers for its own layers."""

    def moe_status(self) -> list[dict[str, Any]]:
        return moe_status()

    def moe_balance(self) -> list[dict[str, Any]]:
        from moe_backend.vllm_plugin import live_balance

        return live_balance.moe_balance()
