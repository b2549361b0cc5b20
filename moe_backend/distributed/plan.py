# SPDX-License-Identifier: Apache-2.0
"""Who sends what where, in plain torch: the plan of the host transports.

A payload is one token on its way to one rank, however many experts it wants there. Payloads are
ordered by (destination, token); routes within a payload keep their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_backend import reference
from moe_backend.types import Routing


@dataclass(frozen=True)
class SendPlan:
    """The source's side."""

    token: torch.Tensor  # [payloads] source token
    rows: torch.Tensor  # [payloads, top_k] int32 row in the destination's weights, −1 elsewhere
    per_rank: list[int]  # payloads for each rank
    per_place: list[int]  # routes to each place of the group


def plan_send(routing: Routing, place: torch.Tensor, world_size: int) -> SendPlan:
    """Ids outside ``place`` are absent, like −1."""
    ids = routing.topk_ids.long()
    valid = (ids >= 0) & (ids < place.numel())
    at = torch.where(valid, place.long()[ids.clamp(0, place.numel() - 1)], -1)
    local = place.numel() // world_size
    rank = torch.where(at >= 0, at // local, -1)
    wanted = rank[:, None, :] == torch.arange(world_size, device=at.device)[:, None]
    destination, token = wanted.any(-1).T.nonzero(as_tuple=True)
    rows = torch.where(wanted[token, destination], at[token] % local, -1)
    return SendPlan(
        token,
        rows.int(),
        torch.bincount(destination, minlength=world_size).tolist(),
        torch.bincount(at[at >= 0], minlength=place.numel()).tolist(),
    )


@dataclass(frozen=True)
class ReceivePlan:
    """The expert's side."""

    route_row: torch.Tensor  # [payloads, top_k] row in the padded layout, −1 where absent
    tile_expert: torch.Tensor  # [tiles] int32
    tile_rows: torch.Tensor  # [tiles] int32
    num_rows: int
    per_rank: list[int]  # payloads from each rank


def plan_receive(
    rows: torch.Tensor, num_local: int, align: int, per_rank: list[int]
) -> ReceivePlan:
    """The padded expert-contiguous layout of the received routes, in their order."""
    flat = rows.flatten().long()
    valid = flat >= 0
    counts = torch.bincount(flat[valid], minlength=num_local)
    first = reference.expert_offsets(counts, align).long()
    key = torch.where(valid, flat, num_local)
    order = key.sort(stable=True).indices[: int(valid.sum())]
    expert = flat[order]
    rank_in_expert = torch.arange(order.numel(), device=rows.device)
    rank_in_expert -= (counts.cumsum(0) - counts)[expert]
    route_row = torch.full_like(flat, -1)
    route_row[order] = first[expert] + rank_in_expert
    tiles = (first[1:] - first[:-1]) // align
    tile_expert = torch.arange(num_local, device=rows.device).repeat_interleave(tiles)
    tile_in_expert = torch.arange(tile_expert.numel(), device=rows.device)
    tile_in_expert -= (tiles.cumsum(0) - tiles)[tile_expert]
    tile_rows = (counts[tile_expert] - tile_in_expert * align).clamp_max(align)
    return ReceivePlan(
        route_row.view_as(rows), tile_expert.int(), tile_rows.int(), int(first[-1]), per_rank
    )


def padded_rows(counts: list[int], align: int) -> int:
    """Rows of a rank whose experts receive ``counts`` routes."""
    return sum(-(-c // align) * align for c in counts)
