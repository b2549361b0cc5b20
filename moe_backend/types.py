# SPDX-License-Identifier: Apache-2.0
"""The frozen dataclasses that replace long argument lists.

Everything here describes; nothing here decides what a device can run (that is support.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

BLOCK = 128  # edge of a weight-scale block and length of an activation-scale group
FP8 = torch.float8_e4m3fn
Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES: tuple[str, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _expect(name: str, ok: bool, expected: str, found: object, *values: object) -> None:
    """``values`` fill ``expected`` on failure only: a dynamic size in a string would specialise a
    graph that torch.compile is tracing."""
    if not ok:
        raise ValueError(f"{name}: expected {expected.format(*values)}, found {found}")


@dataclass(frozen=True)
class MoEShape:
    """What identifies a layer for support checks and tuned configurations.

    ``intermediate`` is the size on this rank, after tensor parallelism has cut it.
    """

    num_experts: int
    num_local_experts: int
    hidden: int
    intermediate: int
    top_k: int
    ep_size: int = 1


@dataclass(frozen=True)
class RouterSpec:
    """How logits become experts and weights.

    With groups, a group's score is the sum of its best ``group_candidates`` biased scores
    (0: ``top_k // top_groups``, as DeepSeek-V3 does) and only experts of the best
    ``top_groups`` groups can be chosen. ``scale`` multiplies the weights once, last.
    """

    top_k: int
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_candidates: int = 0
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        _expect("top_k", self.top_k >= 1, "at least 1", self.top_k)
        _expect("score", self.score in SCORES, f"one of {', '.join(SCORES)}", repr(self.score))
        _expect("num_groups", self.num_groups >= 1, "at least 1", self.num_groups)
        _expect(
            "top_groups",
            1 <= self.top_groups <= self.num_groups,
            f"1 to num_groups ({self.num_groups})",
            self.top_groups,
        )
        if not self.group_candidates:
            object.__setattr__(self, "group_candidates", max(1, self.top_k // self.top_groups))
        _expect("group_candidates", self.group_candidates >= 1, "at least 1", self.group_candidates)

    def check(self, num_experts: int) -> None:
        """Raises ValueError when ``num_experts`` cannot be routed this way."""
        groups = self.num_groups
        _expect(
            "num_groups", num_experts % groups == 0, f"a divisor of {num_experts} experts", groups
        )
        reachable = num_experts // groups * self.top_groups
        _expect("top_k", self.top_k <= reachable, f"at most {reachable} experts", self.top_k)
        per_group = num_experts // groups
        _expect(
            "group_candidates",
            groups == 1 or self.group_candidates <= per_group,
            f"at most {per_group} experts of a group",
            self.group_candidates,
        )


@dataclass(frozen=True)
class Activation:
    """The gated activation between the two GEMMs: g·sigmoid(alpha·g)·u.

    With ``limit``, g is clamped from above and u on both sides first.
    """

    alpha: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        ok = self.limit is None or self.limit > 0
        _expect("limit", ok, "a positive number or None", self.limit)


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to. An id of −1 is absent and contributes nothing."""

    topk_ids: torch.Tensor  # [num_tokens, top_k] int32
    topk_weights: torch.Tensor  # [num_tokens, top_k] fp32
    num_experts: int

    def __post_init__(self) -> None:
        ids, weights = self.topk_ids, self.topk_weights
        _expect("topk_ids", ids.dim() == 2, "shape [num_tokens, top_k]", tuple(ids.shape))
        if ids.dtype is not torch.int32:
            object.__setattr__(self, "topk_ids", ids.to(torch.int32))
        if weights.dtype is not torch.float32:
            object.__setattr__(self, "topk_weights", weights.to(torch.float32))
        _expect(
            "topk_weights",
            weights.shape == ids.shape,
            "the shape of topk_ids, {}",
            tuple(weights.shape),
            tuple(ids.shape),
        )
        _expect("num_experts", self.num_experts >= 1, "at least 1", self.num_experts)

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]


@dataclass(frozen=True)
class ExpertWeights:
    """FP8 weights of the local experts as the checkpoint has them, checked once, here.

    ``w13`` holds the gate rows first, then the up rows. Scales are fp32, one per 128×128 block;
    the last block of an axis may be partial. Gate and up are separate matrices in a checkpoint, so
    each has its own ``cdiv(intermediate, 128)`` rows of blocks.
    """

    w13: torch.Tensor  # [num_local_experts, 2 * intermediate, hidden] e4m3
    w13_scale: torch.Tensor  # [num_local_experts, 2 * cdiv(intermediate, 128), cdiv(hidden, 128)]
    w2: torch.Tensor  # [num_local_experts, hidden, intermediate] e4m3
    w2_scale: torch.Tensor  # [num_local_experts, cdiv(hidden, 128), cdiv(intermediate, 128)]

    def __post_init__(self) -> None:
        w13, w2 = self.w13, self.w2
        for name, w in (("w13", w13), ("w2", w2)):
            _expect(name, w.dtype is FP8, "dtype float8_e4m3fn", w.dtype)
            _expect(name, w.dim() == 3, "three axes [experts, rows, columns]", tuple(w.shape))
            _expect(name, w.is_contiguous(), "a contiguous tensor", f"strides {w.stride()}")
        experts, two_i, hidden = w13.shape
        _expect("w13", two_i % 2 == 0, "an even number of gate and up rows", two_i)
        want = (experts, hidden, two_i // 2)
        _expect("w2", tuple(w2.shape) == want, f"shape {want} to match w13", tuple(w2.shape))
        blocks = cdiv(hidden, BLOCK), cdiv(two_i // 2, BLOCK)
        shapes = {
            "w13_scale": (self.w13_scale, (experts, 2 * blocks[1], blocks[0])),
            "w2_scale": (self.w2_scale, (experts, *blocks)),
        }
        for name, (scale, shape) in shapes.items():
            _expect(name, scale.dtype is torch.float32, "dtype float32", scale.dtype)
            _expect(name, tuple(scale.shape) == shape, f"shape {shape}", tuple(scale.shape))
            _expect(name, scale.is_contiguous(), "a contiguous tensor", f"strides {scale.stride()}")
        devices = {t.device for t in (w13, w2, self.w13_scale, self.w2_scale)}
        found = sorted(map(str, devices))
        _expect("weights", len(devices) == 1, "one device for all four tensors", found)

    @property
    def num_local_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate(self) -> int:
        return self.w2.shape[2]


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped GEMM. ``kernel`` names the implementation that the tiles are for.

    ``swap`` puts weight rows on the MMA's M, for experts with few rows; ``unroll`` is how many
    steps of 128 of K an iteration of the up projection takes, ``span`` how many column blocks a
    program of the down projection streams (all three Triton only). ``turns`` makes the Gluon
    kernel's two consumers issue their MMAs in turns.
    """

    kernel: Literal["triton", "gluon"] = "triton"
    block_n: int = BLOCK
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = True
    unroll: int = 1
    span: int = 1
    turns: bool = True


@dataclass(frozen=True)
class KernelConfig:
    """How the experts of one layer run at one number of tokens.

    ``align`` rows make a tile of both GEMMs. ``slab`` columns of the down projection are computed
    and reduced at a time (0: all at once). ``direct`` skips the ordering by expert altogether.
    """

    align: int
    up: GemmConfig = GemmConfig()
    down: GemmConfig = GemmConfig()
    slab: int = 0
    gather: bool = False
    direct: bool = False
    pdl: bool = True
