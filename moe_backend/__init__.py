# SPDX-License-Identifier: Apache-2.0
"""FP8 Mixture-of-Experts layers for Hopper: a vLLM plugin and the kernels under it.

>>> from moe_backend import ExpertWeights, fused_experts, route
>>> routing = route(logits, top_k=8, score="sigmoid", bias=bias, num_groups=8, top_groups=4,
...                 renormalize=True)
>>> y = fused_experts(x, routing, ExpertWeights(w13, w13_scale, w2, w2_scale))

Names load on first use, so ``import moe_backend`` needs neither torch's CUDA nor triton nor vllm.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Activation": "types",
    "ExpertWeights": "types",
    "KernelConfig": "types",
    "MoEShape": "types",
    "RouterSpec": "types",
    "Routing": "types",
    "Support": "support",
    "fused_experts": "pipeline",
    "moe_layer": "pipeline",
    "route": "pipeline",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the names are strings)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return sorted(__all__)
