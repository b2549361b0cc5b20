# SPDX-License-Identifier: Apache-2.0
"""The least time a layer's experts can take: weights once from memory, every operation once."""

from __future__ import annotations

from dataclasses import dataclass

from moe_backend.types import BLOCK, MoEShape

READ_BYTES_PER_S = 4.39e12  # measured on an H200: device read
FP8_FLOPS = 1.55e15  # measured on an H200: FP8 8192³ through cuBLAS


@dataclass(frozen=True)
class Roofline:
    weight_bytes: int
    flops: int

    @property
    def us(self) -> float:
        return 1e6 * max(self.weight_bytes / READ_BYTES_PER_S, self.flops / FP8_FLOPS)

    @property
    def bound(self) -> str:
        memory = self.weight_bytes / READ_BYTES_PER_S
        return "memory" if memory > self.flops / FP8_FLOPS else "tensor cores"


def experts_roofline(shape: MoEShape, num_routes: int, num_live: int) -> Roofline:
    """``num_live`` experts hold ``num_routes`` routed rows between them."""
    weights = 3 * shape.intermediate * shape.hidden
    return Roofline(
        weight_bytes=num_live * (weights + 4 * weights // BLOCK**2), flops=2 * num_routes * weights
    )
