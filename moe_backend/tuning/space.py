# SPDX-License-Identifier: Apache-2.0
"""What is worth trying for a layer at one number of tokens, pruned by what is legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_backend.support import supports_config
from moe_backend.tuning.heuristics import DIRECT_ROUTES, expected_rows
from moe_backend.types import GemmConfig, KernelConfig, MoEShape


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
    if num_tokens * shape.top_k <= 2 * DIRECT_ROUTES:
        yield KernelConfig(16, direct=True)


def _triton(align: int) -> tuple[tuple[GemmConfig, ...], tuple[GemmConfig, ...]]:
    swap = align < 64
    warps = 4 if swap else 8
    ups = tuple(
        GemmConfig(num_warps=warps, num_stages=stages, unroll=unroll, swap=swap)
        for stages, unroll in ((3, 1), (4, 1), (6, 1), (2, 2), (3, 2))
    )
    downs = tuple(
        GemmConfig(num_warps=warps, num_stages=stages, span=span, swap=swap)
        for stages, span in ((2, 1), (3, 1), (4, 4), (4, 8), (6, 14), (6, 28))
    )
    return ups, downs


def groups(shape: MoEShape, num_tokens: int) -> Iterator[Group]:
    """Legal candidates, by alignment."""
    routes, live = expected_rows(shape, num_tokens)
    rows = routes / live
    for align in (16, 32, 64):
        # a tile of a quarter of an expert's rows reads its weights too often, one of ten times
        # its rows only computes padding
        if rows / 4 <= align and (align == 16 or align <= 10 * rows):
            yield _legal(shape, Group(align, False, *_triton(align)))
    if rows >= 8:
        gluon = tuple(GemmConfig(kernel="gluon", turns=turns) for turns in (True, False))
        for gather in (True, False):
            group = _legal(shape, Group(128, gather, gluon, gluon))
            if group.ups and group.downs:
                yield group


def _legal(shape: MoEShape, group: Group) -> Group:
    other = group.ups[0] if group.align == 128 else GemmConfig(num_stages=1)
    ups = tuple(u for u in group.ups if supports_config(group.config(u, other), shape).ok)
    first = ups[0] if ups else other
    downs = tuple(d for d in group.downs if supports_config(group.config(first, d), shape).ok)
    return Group(group.align, group.gather, ups, downs)
