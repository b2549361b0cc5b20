# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group agree on before the first token travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from moe_backend.types import BLOCK, cdiv

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class EPConfig:
    """Sizes of an exchange; every rank gives the same.

    Attributes:
        num_experts: experts of the whole group (physical ones, where the engine replicates some).
        hidden, top_k: of the layer.
        max_tokens: most tokens that one rank dispatches at a time.
        dtype: of the tokens and of the result.
        align: rows of a tile of the grouped GEMM; each local expert's rows are padded to it. The
            hand-scheduled Hopper kernels take 128.
        wire: "fp8" sends e4m3 rows with 1x128 scales; "native" sends rows as they are and carries
            gradients.
        capacity_rows: rows, padding included, that a rank can receive. 0 is the worst case: every
            token of every rank on one rank, which can never overflow.
        slots: dispatches that may be in flight before their combine (1 or 2).
    """

    num_experts: int
    hidden: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    align: int = 128
    wire: Literal["fp8", "native"] = "fp8"
    capacity_rows: int = 0
    slots: int = 2

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden", "top_k", "max_tokens", "align"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {DTYPES}, found {self.dtype}")
        if self.wire not in ("fp8", "native"):
            raise ValueError(f"wire: expected 'fp8' or 'native', found {self.wire!r}")
        if self.slots not in (1, 2):
            raise ValueError(f"slots: expected 1 or 2, found {self.slots}")
        if self.capacity_rows < 0 or self.capacity_rows % self.align:
            raise ValueError(
                f"capacity_rows: expected a multiple of align ({self.align}), or 0 for the worst "
                f"case, found {self.capacity_rows}"
            )

    @property
    def groups(self) -> int:
        """Activation scales of a row."""
        return cdiv(self.hidden, BLOCK)

    def worst_rows(self, world_size: int) -> int:
        """Rows of a rank on which every token of the group wants as many experts as it may."""
        local = self.num_experts // world_size
        routes = world_size * self.max_tokens * min(self.top_k, local)
        live = min(routes, local)
        return min(routes, (routes + live * (self.align - 1)) // self.align) * self.align

    def rows(self, world_size: int) -> int:
        """The stated capacity in rows."""
        return self.capacity_rows or self.worst_rows(world_size)

    def agreed(self) -> dict[str, int]:
        """What the ranks compare, as integers."""
        return {
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "dtype": DTYPES.index(self.dtype),
            "align": self.align,
            "wire": int(self.wire == "fp8"),
            "capacity_rows": self.capacity_rows,
            "slots": self.slots,
        }
