# SPDX-License-Identifier: Apache-2.0
"""A configuration without a file, from arithmetic on the shape.

What decides is how many rows an expert gets. A few megabytes of weights: every route by itself,
nothing is ordered. Few rows: the weights' bytes are the time, tokens go on the narrow side of the
MMA. Many rows: the hand-scheduled kernel, rows gathered through the routing index where a token
has several experts here.
"""

from __future__ import annotations

from moe_backend.support import supports_config
from moe_backend.types import GemmConfig, KernelConfig, MoEShape, cdiv

DIRECT_BYTES = 200e6  # beyond this, experts repeat and the ordered path streams better
GLUON_ROWS = 24  # rows per expert from which tensor cores, not bytes, set the pace
GATHER_COPIES = 1.5  # experts of a token on this rank from which a permuted copy costs more


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
    if max(routes, 1.0) * 3 * shape.hidden * shape.intermediate <= DIRECT_BYTES and rows < 2:
        return KernelConfig(16, direct=True)
    if rows >= GLUON_ROWS:
        gluon = GemmConfig(kernel="gluon", turns=False)
        copies = shape.top_k * shape.num_local_experts / shape.num_experts
        config = KernelConfig(128, up=gluon, down=gluon, gather=copies >= GATHER_COPIES)
        if supports_config(config, shape).ok:
            return config
    return _streaming(shape, rows)


def _streaming(shape: MoEShape, rows: float) -> KernelConfig:
    """Triton tiles: about one row tile per expert, weights streamed."""
    stages = 2 if cdiv(shape.intermediate, 128) <= 8 else 3
    if rows > GLUON_ROWS:
        plain = GemmConfig(num_warps=8, num_stages=4, swap=False)
        return KernelConfig(64, up=plain, down=GemmConfig(num_warps=8, num_stages=3, swap=False))
    if rows > 12:
        return KernelConfig(32, up=GemmConfig(num_stages=3), down=GemmConfig(num_stages=stages))
    up = GemmConfig(num_stages=3)
    if shape.hidden >= 4096:
        up = GemmConfig(num_stages=3, unroll=2, num_warps=8)
    return KernelConfig(16, up=up, down=GemmConfig(num_stages=stages))
