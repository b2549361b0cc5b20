# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which expert, and where in that rank's weights.

An expert's place is ``rank * num_local_experts + row in the rank's weights``; −1 is nowhere.
"""

from __future__ import annotations

import torch

from moe_backend.distributed.agreement import agree
from moe_backend.distributed.backend import Backend


def divide(num_experts: int, world_size: int) -> str:
    """Why ``num_experts`` cannot be spread over the ranks, or nothing."""
    if num_experts % world_size == 0:
        return ""
    legal = [n for n in range(1, world_size) if num_experts % n == 0]
    return (
        f"{num_experts} experts cannot be shared equally by {world_size} ranks. "
        f"Use {legal[-1]} ranks, or a number of redundant experts that makes the total divisible"
    )


def place_experts(
    backend: Backend, num_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """The place of every expert, int32 ``[num_experts]`` on the CPU. Collective.

    Args:
        expert_map: this rank's ``[num_experts]`` local row of each expert, −1 where it lives
            elsewhere; None where rank r holds experts r·n … (r+1)·n − 1 in order.

    Raises:
        EPMismatch: on every rank, when an expert lives nowhere or on two ranks, or the maps do not
            fit together.
    """
    local = num_experts // backend.world_size
    mine = _own_map(num_experts, local, backend.rank, expert_map)
    problem = mine if isinstance(mine, str) else ""
    rows = [0] * num_experts if isinstance(mine, str) else mine
    every = agree(backend, "expert placement", {}, problem=problem, extra=rows)
    place = [-1] * num_experts
    trouble = ""
    for rank, theirs in enumerate(every):
        for expert, row in enumerate(theirs):
            if row >= 0 and place[expert] >= 0:
                other = place[expert] // local
                trouble = trouble or (
                    f"expert {expert} lives on ranks {other} and {rank}; give replicas numbers of "
                    "their own (physical experts)"
                )
            elif row >= 0:
                place[expert] = rank * local + row
    if not trouble and -1 in place:
        trouble = f"expert {place.index(-1)} lives on no rank"
    agree(backend, "expert placement verdict", {}, problem=trouble)
    return torch.tensor(place, dtype=torch.int32)


def _own_map(
    num_experts: int, local: int, rank: int, expert_map: torch.Tensor | None
) -> list[int] | str:
    if expert_map is None:
        first = rank * local
        return [e - first if first <= e < first + local else -1 for e in range(num_experts)]
    if expert_map.shape != (num_experts,):
        return f"expert_map: expected shape ({num_experts},), found {tuple(expert_map.shape)}"
    rows = expert_map.tolist()
    used = [r for r in rows if r >= 0]
    if len(set(used)) < len(used) or any(r >= local for r in used):
        return (
            f"expert_map: expected rows 0 to {local - 1}, each at most once, found {sorted(used)}"
        )
    return [max(r, -1) for r in rows]
