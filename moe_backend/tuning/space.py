# SPDX-License-Identifier: Apache-2.0
"""What is worth trying for a layer at one number of tokens, pruned by what is legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_backend.support import supports_config
from moe_backend.tuning.heuristics import expected_rows
from moe_backend.types import GemmConfig, KernelConfig, MoEShape

DIRECT_ROUTES = 64  # more than this repeat experts, and their weights would be read again


@dataclass(frozen=True)
class Group:
    """Candidates for both GEMMs that share the rows of a tile (and whether A is gathered)."""

    align: int
    gather: bool
    ups: tuple[GemmConfig, ...]
    downs: tuple[GemmConfig, ...]

    def config(self, up: GemmConfig, down: GemmConfig) -> KernelConfig:
        return KernelConfig(self.align, up=up, down=down, gather=self.gather)


def direct(shape: MoEShape, num_tokens: int) -> Iterator[KernelConfig]:
    """The two-launch path, while experts hardly repeat."""
    if num_tokens * shape.top_k <= DIRECT_ROUTES:
        yield KernelConfig(16, direct=True)


def _triton(align: int) -> tuple[tuple[GemmConfig, ...], tuple[GemmConfig, ...]]:
    swap = align < 64
    stages = ((4, 3, 1), (4, 6, 1), (4, 3, 2), (8, 3, 2)) if swap else ((8, 3, 1), (8, 4, 1))
    ups = tuple(GemmConfig(num_warps=w, num_stages=n, unroll=u, swap=swap) for w, n, u in stages)
    warps = 4 if swap else 8
    downs = tuple(
        GemmConfig(num_warps=warps, num_stages=n, span=span, swap=swap)
        for n, span in ((2, 1), (3, 1), (3, 2), (4, 4))
    )
    return ups, downs


def groups(shape: MoEShape, num_tokens: int) -> Iterator[Group]:
    """Legal candidates, by alignment."""
    routes, live = expected_rows(shape, num_tokens)
    rows = routes / live
    gluon = tuple(GemmConfig(kernel="gluon", turns=turns) for turns in (False, True))
    found = [_legal(shape, Group(128, gather, gluon, gluon)) for gather in (True, False)]
    found = [g for g in found if g.ups and g.downs and rows >= 16]
    for align in (16, 32, 64):
        # a tile of half an expert's rows reads its weights twice, one of four times its rows
        # computes mostly padding
        if (align == 16 or align <= 4 * rows) and (
            rows / 2 <= align or (align == 64 and not found)
        ):
            found.append(_legal(shape, Group(align, False, *_triton(align))))
    yield from found


def _legal(shape: MoEShape, group: Group) -> Group:
    other = group.ups[0] if group.align == 128 else GemmConfig(num_stages=1)
    ups = tuple(u for u in group.ups if supports_config(group.config(u, other), shape).ok)
    first = ups[0] if ups else other
    downs = tuple(d for d in group.downs if supports_config(group.config(first, d), shape).ok)
    return Group(group.align, group.gather, ups, downs)
