# SPDX-License-Identifier: Apache-2.0
"""A configuration without a file, from arithmetic on the shape.

What decides is how many rows an expert gets. A handful of routes: stream weight rows, order
nothing. Few rows: the weights' bytes are the time, tokens go on the narrow side of the MMA.
Many rows: the hand-scheduled kernel, rows gathered through the routing index.
"""

from __future__ import annotations

from moe_backend.support import supports_config
from moe_backend.types import GemmConfig, KernelConfig, MoEShape

DIRECT_ROUTES = 32  # beyond this, experts begin to repeat and weights would be read again
GLUON_ROWS = 40  # rows per expert from which tensor cores, not bytes, set the pace


def expected_rows(shape: MoEShape, num_tokens: int) -> tuple[float, float]:
    """Routes that stay on this rank and live experts, for uniform routing."""
    local = shape.num_local_experts
    routes = num_tokens * shape.top_k * local / shape.num_experts
    live = local * (1.0 - (1.0 - 1.0 / local) ** routes) if local > 1 else 1.0
    return routes, max(live, 1.0)


def heuristic(shape: MoEShape, num_tokens: int) -> KernelConfig:
    """A configuration that runs for any supported shape."""
    routes, live = expected_rows(shape, num_tokens)
    rows = routes / live
    if num_tokens * shape.top_k <= DIRECT_ROUTES:
        return KernelConfig(16, direct=True)
    if rows >= GLUON_ROWS:
        gluon = GemmConfig(kernel="gluon")
        config = KernelConfig(128, up=gluon, down=gluon, gather=True)
        if supports_config(config, shape).ok:
            return config
    return _streaming(shape, rows)


def _streaming(shape: MoEShape, rows: float) -> KernelConfig:
    """Triton tiles: about one row tile per expert."""
    align = 16 if rows <= 12 else 32 if rows <= 24 else 64
    if align == 64:
        up = GemmConfig(num_warps=8, num_stages=4, swap=False)
        down = GemmConfig(num_warps=8, num_stages=4, swap=False, span=_span(shape))
    else:
        up = GemmConfig(num_stages=4)
        down = GemmConfig(num_stages=4, span=_span(shape))
    return KernelConfig(align, up=up, down=down)


def _span(shape: MoEShape) -> int:
    """Column blocks a program of the down projection streams: at least 16 loads in a row."""
    groups = -(-shape.intermediate // 128)
    return max(1, min(8, 16 // groups))
