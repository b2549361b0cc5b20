# SPDX-License-Identifier: Apache-2.0
"""Where everything of an exchange between ranks lies in memory. No kernels here.

Every rank holds one symmetric buffer with the same layout; peers write into it. Per slot (a
dispatch in flight):

    counts   [W, E + W + 1] int32   from each source: routes to each expert's place, payloads for
                                    each rank, and whether it refuses its input
    flags    [3, W] int32           epoch at which each rank's counts, rows, results were complete
    row      [W, max_tokens, k] i32 from each source: rows of a payload's routes, -1 elsewhere
    weight   [W, max_tokens, k] f32 the same routes' weights
    scale    [rows, groups] fp32    scales as they arrive
    data     [rows, hidden]         rows in the padded expert-contiguous order of the grouped GEMM
    parts    [W, max_tokens, hidden] results, from each expert's rank

Epochs make resets needless. A slot's memory is written again only in the slot's next dispatch,
which this rank starts after its combine has waited for every rank: by then all of them have read
what this rank sent, and this rank has read what they sent.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

COUNTS, ROWS, RESULTS = 0, 1, 2  # flags and phases
PHASES = ("dispatch counts", "dispatch rows", "combine results")
TIMEOUT, REFUSED, OVERFLOW = 1, 2, 3  # what the status word reports
_ROUTES_PER_BLOCK = 256


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Layout:
    """Sizes of an exchange and the byte offsets that follow from them."""

    world: int
    num_experts: int
    hidden: int
    top_k: int
    max_tokens: int
    rows: int  # capacity of a rank, a multiple of align
    align: int
    slots: int
    quantised: bool  # e4m3 rows with scales; otherwise bf16

    @property
    def local(self) -> int:
        return self.num_experts // self.world

    @property
    def groups(self) -> int:
        return -(-self.hidden // 128)

    @property
    def words(self) -> int:
        """Integers that a rank publishes with its counts."""
        return self.num_experts + self.world + 1

    @property
    def block_tokens(self) -> int:
        """Tokens whose routes one program ranks."""
        return max(1, _ROUTES_PER_BLOCK // power_of_2(self.top_k))

    @property
    def block_width(self) -> int:
        """Counters of a block of tokens: per place, then per rank."""
        return power_of_2(self.num_experts + 1) + power_of_2(self.world)

    def _sizes(self) -> dict[str, int]:
        payloads = self.world * self.max_tokens
        return {
            "counts": 4 * self.world * self.words,
            "flags": 4 * 3 * self.world,
            "row": 4 * payloads * self.top_k,
            "weight": 4 * payloads * self.top_k,
            "scale": 4 * self.rows * self.groups if self.quantised else 0,
            "data": self.rows * self.hidden * (1 if self.quantised else 2),
            "parts": 2 * payloads * self.hidden,
        }

    @property
    def slot_bytes(self) -> int:
        return sum(_up(size, 256) for size in self._sizes().values())

    @property
    def local_bytes(self) -> int:
        """Bytes of a slot's memory that peers never touch (class Slot)."""
        scale = self.groups * self.rows if self.quantised else 0
        tokens = self.max_tokens * (self.top_k + 2 * self.world)
        blocks = -(-self.max_tokens // self.block_tokens) * self.block_width
        return 4 * (scale + tokens + blocks + self.num_experts + 2 * (self.rows // self.align) + 8)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def at(self, name: str, slot: int) -> int:
        """Byte offset of a part of a slot."""
        offset = slot * self.slot_bytes
        for part, size in self._sizes().items():
            if part == name:
                return offset
            offset += _up(size, 256)
        raise KeyError(name)


class Slot(NamedTuple):
    """Memory of a slot that peers never touch."""

    control: torch.Tensor  # [8] int32: epoch, then a ticket per kernel that counts its programs
    rank: torch.Tensor  # [max_tokens, k] int32 earlier routes of the block to the same place
    nth: torch.Tensor  # [max_tokens, W] int32 earlier payloads of the block to the same rank
    block: torch.Tensor  # [blocks, block_width] int32 counts of earlier blocks
    first_row: torch.Tensor  # [E] int32 row, on its rank, of this source's first route to a place
    payload: torch.Tensor  # [max_tokens, W] int32 number of the payload at that rank, -1 for none
    scale: torch.Tensor  # [groups, rows] fp32 as the GEMM reads them
    tile_expert: torch.Tensor  # [rows / align] int32
    tile_rows: torch.Tensor  # [rows / align] int32
    num_tiles: torch.Tensor  # [1] int32 live tiles


@dataclass(frozen=True)
class Endpoint:
    """One rank's end of an exchange.

    ``status`` holds 0 or what went wrong, packed as code | phase << 8 | rank << 16; ``alarm`` is
    its copy in pinned host memory. ``patience`` bounds a wait: nanoseconds of the GPU's ``clock``,
    else (in the interpreter) looks at the flag.
    """

    layout: Layout
    me: int
    buffer: torch.Tensor  # [nbytes] uint8, symmetric
    peers: torch.Tensor  # [W] int64 addresses of every rank's buffer
    place: torch.Tensor  # [num_experts] int32 rank * local + row of the rank's weights, -1 nowhere
    status: torch.Tensor  # [1] int32
    alarm: torch.Tensor  # [1] int32
    patience: int
    programs: int  # most programs of the kernels that move rows, and so most SMs
    clock: bool
    slots: tuple[Slot, ...]

    def view(self, name: str, slot: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A part of this rank's own buffer."""
        count = 1
        for size in shape:
            count *= size
        first = self.layout.at(name, slot)
        return self.buffer[first : first + count * dtype.itemsize].view(dtype).view(shape)


def make_slot(layout: Layout, device: torch.device | str) -> Slot:
    """Zeroed counters; everything else is written before it is read."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tokens, tiles = layout.max_tokens, layout.rows // layout.align
    scales = (layout.groups, layout.rows) if layout.quantised else (0, 0)
    return Slot(
        torch.zeros(8, dtype=torch.int32, device=device),
        ints(tokens, layout.top_k),
        ints(tokens, layout.world),
        ints(-(-tokens // layout.block_tokens), layout.block_width),
        ints(layout.num_experts),
        ints(tokens, layout.world),
        torch.empty(scales, dtype=torch.float32, device=device),
        ints(tiles),
        ints(tiles),
        ints(1),
    )
