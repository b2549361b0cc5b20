# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between ranks."""

from __future__ import annotations

from collections.abc import Sequence


class EPError(RuntimeError):
    """An exchange between ranks failed; the exchange object cannot be used any more."""


class EPMismatch(EPError, ValueError):
    """The ranks disagree, or one of them refused its input. Raised on every rank."""


class EPOverflow(EPError):
    """A rank would receive more rows than its stated capacity. Raised on every rank, before any
    token has moved."""


class EPTimeout(EPError):
    """Another rank did not answer in time.

    Attributes:
        ranks: those of the group that did not answer.
        phase: what this rank was doing.
    """

    def __init__(self, ranks: Sequence[int], phase: str, waited_s: float, detail: str = "") -> None:
        self.ranks, self.phase = tuple(ranks), phase
        names = ", ".join(map(str, self.ranks)) or "unknown"
        noun = "ranks" if len(self.ranks) > 1 else "rank"
        text = f"no answer from {noun} {names} during {phase} (waited {waited_s:.1f} s)"
        remedy = "That process is dead or stuck: restart all ranks"
        super().__init__(f"{text}{': ' + detail if detail else ''}. {remedy}.")
