# SPDX-License-Identifier: Apache-2.0
"""What dispatch returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class ExpertRows(NamedTuple):
    """Received rows in the order of the grouped GEMM: by local expert, each padded to ``align``.

    Rows of one expert stand in the order (source rank, token, slot). Padding rows hold anything.
    """

    data: torch.Tensor  # [num_rows, hidden] e4m3, or the tokens' dtype on the native wire
    scale: torch.Tensor | None  # [groups, num_rows] fp32, with e4m3 rows
    tile_expert: torch.Tensor  # [num_tiles] int32 local expert of the tile, −1 beyond the last one
    tile_rows: torch.Tensor  # [num_tiles] int32 valid rows of the tile
    num_tiles: torch.Tensor  # [1] int32 tiles before the first −1
    align: int

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]


class EPHandle:
    """The way back of one dispatch. Opaque; good for one combine."""

    __slots__ = ("_owner", "_state", "_used", "num_tokens")

    def __init__(self, owner: Any, state: Any, num_tokens: int) -> None:
        self._owner, self._state, self._used = owner, state, False
        self.num_tokens = num_tokens

    def _take(self, owner: Any) -> Any:
        """The state behind the handle, once."""
        if self._owner is not owner:
            raise ValueError("handle: comes from another ExpertParallel object")
        if self._used:
            raise ValueError("handle: was combined already; every dispatch has one combine")
        self._used = True
        return self._state

    def __repr__(self) -> str:
        return f"EPHandle({self.num_tokens} tokens, {'used' if self._used else 'open'})"
