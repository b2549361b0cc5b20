# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens travel to their experts' ranks and back.

>>> from moe_backend.distributed import EPConfig, ExpertParallel, combine, dispatch
>>> ep = ExpertParallel(EPConfig(num_experts=256, hidden=7168, top_k=8, max_tokens=4096), group)
>>> rows, handle = dispatch(x, routing, ep)        # FP8 rows by local expert, padded for the GEMM
>>> y = combine(experts(rows), handle)             # [num_tokens, hidden], weighted and summed

Every call is collective over the group. Errors that one rank finds are raised on all of them, and
no wait for another rank lasts longer than MOE_BACKEND_EP_TIMEOUT_S.
"""

from importlib import import_module

_HOMES = {
    "Backend": "backend",
    "EPConfig": "config",
    "EPError": "errors",
    "EPHandle": "handle",
    "EPMismatch": "errors",
    "EPOverflow": "errors",
    "EPTimeout": "errors",
    "ExpertParallel": "api",
    "ExpertRows": "handle",
    "alltoallv": "alltoall",
    "combine": "api",
    "dispatch": "api",
    "ep_experts": "layer",
    "open_backend": "backend",
}
__all__ = list(_HOMES)  # noqa: PLE0605  (the names are strings)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return sorted(__all__)
