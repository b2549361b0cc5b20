# SPDX-License-Identifier: Apache-2.0
"""How evenly a layer's tokens spread over its experts, counted while it serves.

A layer that is watched holds :class:`Counters`: two lines of sums on its device, the tokens of
each expert and the router's scores of each expert. :func:`observe` adds a batch to them inside an
operator that a CUDA graph captures; the host reads nothing. The sums only grow, so a window is the
difference of two readings, and readings of ranks that counted different tokens add up.

    imbalance = tokens of the fullest expert / mean                      1 is even, E the worst
    aux loss  = E / (top_k * T^2) * sum over e of P[e] * tokens[e]       1 is even

with T tokens and P[e] the sum over tokens of the normalised score of expert e.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch

from moe_backend import (
    ops_training,  # noqa: F401  (defines aux_loss)
    reference_training,
)
from moe_backend.ops import operator
from moe_backend.types import RouterSpec


class Counters(torch.nn.Module):
    """Sums of one layer, as a submodule of it.

    Named buffers, so that they survive what frees or moves weights; not persistent, so that no
    checkpoint is expected to hold them; in a module of their own, so that whoever counts the
    elements a checkpoint must fill does not wait for these.
    """

    tokens: torch.Tensor  # [num_experts] int64
    scores: torch.Tensor  # [num_experts] float64: batches of 1e-3 are still seen beside 1e12

    def __init__(self, num_experts: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        for name, dtype in (("tokens", torch.int64), ("scores", torch.float64)):
            zeros = torch.zeros(num_experts, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def clear(self) -> None:
        self.tokens.zero_()
        self.scores.zero_()


@operator(
    "observe_balance(Tensor(a!) tokens, Tensor(b!) scores, Tensor ids, Tensor? logits, "
    "Tensor? padding, str score) -> ()"
)
def observe_balance(tokens, scores, ids, logits, padding, score):
    if tokens.is_cuda:
        from moe_backend.kernels.balance_sums import balance_sums

        balance_sums(tokens, scores, ids, logits, padding, score)
    else:
        add_in_torch(tokens, scores, ids, logits, padding, score)


@torch.library.register_fake("moe_backend::observe_balance")
def _(tokens, scores, ids, logits, padding, score):
    return None


def add_in_torch(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor | None,
    padding: torch.Tensor | None,
    score: str,
) -> None:
    """What kernels/balance_sums.py does."""
    real = (ids >= 0) & (ids < tokens.numel())
    if padding is not None:
        real &= ~padding[:, None]
    tokens.scatter_add_(0, torch.where(real, ids, 0).flatten().long(), real.flatten().long())
    if logits is not None:
        found, _ = reference_training.router_scores(logits, ids.shape[1], score)
        if padding is not None:
            found = found.masked_fill(padding[:, None], 0.0)
        # A token with NaN logits adds nothing here, or no sum would ever be a number again.
        scores.add_(found.nansum(0, dtype=torch.float64))


def observe(
    counters: Counters,
    ids: torch.Tensor,
    *,
    logits: torch.Tensor | None = None,
    spec: RouterSpec | None = None,
    padding: torch.Tensor | None = None,
) -> None:
    """Adds one batch: one launch, no host sync, capturable.

    Args:
        counters: of the layer.
        ids: ``[num_tokens, top_k]`` chosen experts; ids out of range, like −1, do not count.
        logits: ``[num_tokens, num_experts]``, with ``spec``; without them there is no aux loss.
        spec: how the scores are made of the logits.
        padding: ``[num_tokens]`` bool, true for rows that are no token.
    """
    if logits is not None and spec is None:
        raise ValueError("spec: expected a RouterSpec beside logits, found None")
    torch.ops.moe_backend.observe_balance(
        counters.tokens, counters.scores, ids, logits, padding, score_of(spec)
    )


def score_of(spec: RouterSpec | None) -> str:
    return spec.score if spec else "softmax"


@dataclass(frozen=True)
class Load:
    """A reading of a layer's counters, or the difference or sum of such; on the host."""

    top_k: int
    tokens: torch.Tensor  # [num_experts] int64
    scores: torch.Tensor | None  # [num_experts] float64; None where the layer sees no logits

    def __add__(self, other: Load) -> Load:
        return self._with(other, 1)

    def __sub__(self, other: Load) -> Load:
        return self._with(other, -1)

    def _with(self, other: Load, sign: int) -> Load:
        scores = None
        if self.scores is not None and other.scores is not None:
            scores = self.scores + sign * other.scores
        return replace(self, tokens=self.tokens + sign * other.tokens, scores=scores)

    def follows(self, other: Load) -> bool:
        """Whether this can be a later reading of the same counters."""
        same = self.top_k == other.top_k and self.tokens.shape == other.tokens.shape
        return same and bool((self.tokens >= other.tokens).all())

    @property
    def num_tokens(self) -> int:
        return round(int(self.tokens.sum()) / self.top_k)

    @property
    def imbalance(self) -> float | None:
        """Fullest expert against the mean; None without tokens."""
        total = int(self.tokens.sum())
        return int(self.tokens.max()) * self.tokens.numel() / total if total else None

    @property
    def aux_loss(self) -> float | None:
        """The load-balance loss with coefficient 1; None without tokens or logits."""
        total = int(self.tokens.sum()) / self.top_k
        if self.scores is None or not total:
            return None
        factor = self.tokens.numel() / self.top_k
        found = torch.ops.moe_backend.aux_loss(self.scores[None], self.tokens, None, total, factor)
        return float(found[0])


class LayerReading(NamedTuple):
    load: Load
    complete: bool  # every rank that counts its own tokens has been heard
    physical: bool  # ids are those of copies of experts


Reading: TypeAlias = dict[str, LayerReading]  # by layer, in the model's order


def merge(rows: Iterable[dict[str, Any]]) -> Reading:
    """One reading per layer from the rows of all ranks (see vllm_plugin/live_balance.py).

    Rows of one source counted the same tokens: one of them is taken. Sources add up.
    """
    by_layer: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_layer.setdefault(row["layer"], {}).setdefault(row["source"], row)
    return {name: _sum(list(found.values())) for name, found in by_layer.items()}


def _sum(rows: list[dict[str, Any]]) -> LayerReading:
    loads = [
        Load(
            row["top_k"],
            torch.tensor(row["tokens"], dtype=torch.int64),
            None if row["scores"] is None else torch.tensor(row["scores"], dtype=torch.float64),
        )
        for row in rows
    ]
    complete = len(rows) == rows[0]["num_sources"]
    return LayerReading(reduce(add, loads), complete, rows[0]["physical"])


class Window:
    """The readings of the last seconds; what was counted within is newest minus oldest."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, Reading]] = deque()

    @property
    def newest(self) -> Reading:
        return self._readings[-1][1] if self._readings else {}

    @property
    def length(self) -> float:
        """Seconds between the readings compared: longer than asked for when nobody asked."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def add(self, now: float, reading: Reading) -> None:
        """Begins anew when the counters did: a rank was restarted, another model was loaded."""
        newest = self.newest
        same = newest.keys() == reading.keys()
        if not same or any(not reading[n].load.follows(newest[n].load) for n in reading):
            self._readings.clear()
        self._readings.append((now, reading))
        while len(self._readings) > 2 and now - self._readings[1][0] >= self._seconds:
            self._readings.popleft()

    def loads(self) -> dict[str, Load]:
        oldest = self._readings[0][1] if self._readings else {}
        return {name: found.load - oldest[name].load for name, found in self.newest.items()}
