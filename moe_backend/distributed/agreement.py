# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to do, so that an error of one is raised on all."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from moe_backend.distributed.backend import HEADER, Backend
from moe_backend.distributed.errors import EPMismatch

_FIXED = 3  # operation, step, has a problem


def agree(
    backend: Backend,
    operation: str,
    fields: Mapping[str, int],
    *,
    problem: str = "",
    extra: Sequence[int] = (),
    labels: Mapping[str, Sequence[object]] | None = None,
) -> list[list[int]]:
    """Compares ``fields`` between ranks and hands round ``extra``.

    Args:
        operation: what every rank should be doing now.
        fields: integers that must be equal on all ranks.
        problem: why this rank cannot go on; raised on every rank with this rank's number.
        extra: integers of this rank; the same number on every rank.
        labels: for a field that is an index, what it stands for.

    Returns:
        ``extra`` of every rank, by rank.

    Raises:
        EPMismatch: on every rank, naming ranks and values. The transport stays usable.
        EPTimeout: a rank did not take part.
    """
    backend.step += 1
    head = [zlib.crc32(operation.encode()), backend.step, int(bool(problem)), *fields.values()]
    assert len(head) <= HEADER
    head += [0] * (HEADER - len(head))
    every = backend.gather([*head, *extra], operation)
    _same_place(backend, operation, every)
    if any(words[2] for words in every):
        raise EPMismatch(f"{operation}: {_problems(backend, operation, problem)}")
    _same_fields(operation, fields, every, labels or {})
    return [words[HEADER:] for words in every]


def _same_place(backend: Backend, operation: str, every: list[list[int]]) -> None:
    mine = every[backend.rank]
    for rank, words in enumerate(every):
        if words[:2] != mine[:2]:
            where = "another operation" if words[0] != mine[0] else "another call"
            raise backend.fail(
                EPMismatch(
                    f"rank {backend.rank} is in {operation}, its call {mine[1]}; rank {rank} is in "
                    f"{where}, its call {words[1]}. All ranks must make the same calls in the same "
                    "order"
                )
            )


def _problems(backend: Backend, operation: str, problem: str) -> str:
    room = backend.words * 7  # seven bytes a word keep it positive
    text = problem.encode()[:room].ljust(room, b"\0")
    words = [int.from_bytes(text[i : i + 7], "big") for i in range(0, room, 7)]
    parts = []
    for rank, theirs in enumerate(backend.gather(words, f"{operation} (reasons)")):
        said = b"".join(w.to_bytes(7, "big") for w in theirs).rstrip(b"\0")
        if said:
            parts.append(f"rank {rank}: {said.decode(errors='replace')}")
    return "; ".join(parts)


def _same_fields(
    operation: str,
    fields: Mapping[str, int],
    every: list[list[int]],
    labels: Mapping[str, Sequence[object]],
) -> None:
    differ = []
    for at, name in enumerate(fields, _FIXED):
        values = [words[at] for words in every]
        if len(set(values)) > 1:
            shown = [labels[name][v] if name in labels else v for v in values]
            other = next(i for i, v in enumerate(values) if v != values[0])
            differ.append(f"{name} is {shown[0]} on rank 0 and {shown[other]} on rank {other}")
    if differ:
        raise EPMismatch(f"{operation}: {'; '.join(differ)}")
