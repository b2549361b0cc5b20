# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over a host transport (gloo, nccl), with gradients.

Out: one message of bytes per payload: the row (e4m3 with its scales, or as it is), the slots' rows
in the destination's weights and the slots' routing weights. Back: one row per payload, the weighted
sum over the payload's routes in slot order in fp32, rounded to the rows' dtype; the source adds the
ranks' parts in rank order in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_backend import reference
from moe_backend.distributed.agreement import agree
from moe_backend.distributed.backend import Backend
from moe_backend.distributed.config import EPConfig
from moe_backend.distributed.errors import EPOverflow
from moe_backend.distributed.handle import ExpertRows
from moe_backend.distributed.plan import (
    ReceivePlan,
    SendPlan,
    padded_rows,
    plan_receive,
    plan_send,
)
from moe_backend.types import FP8, Routing


@dataclass
class Journey:
    """One dispatch as its combine and both backward passes need it."""

    backend: Backend
    config: EPConfig
    num_tokens: int
    topk_weights: torch.Tensor  # the source's own, with its gradient
    sent: SendPlan
    received: ReceivePlan
    weights: torch.Tensor  # [payloads, top_k] fp32 of the received routes, 0 where absent

    def out(self, payloads: torch.Tensor, phase: str) -> torch.Tensor:
        """Rows ``[sent payloads, ...]`` to the ranks of their experts."""
        return self._move(payloads, self.sent.per_rank, self.received.per_rank, phase)

    def back(self, payloads: torch.Tensor, phase: str) -> torch.Tensor:
        """Rows ``[received payloads, ...]`` to the ranks of their tokens."""
        return self._move(payloads, self.received.per_rank, self.sent.per_rank, phase)

    def _move(self, rows, out_counts, in_counts, phase) -> torch.Tensor:
        landed = rows.new_empty((sum(in_counts), rows.shape[1]))
        self.backend.exchange(_bytes(rows), out_counts, _bytes(landed), in_counts, phase)
        return landed

    def spread(self, payloads: torch.Tensor) -> torch.Tensor:
        """Copies each received payload to the rows of its routes; padding rows are zero."""
        plan = self.received
        rows = payloads.new_zeros((plan.num_rows, payloads.shape[1]))
        payload, slot = (plan.route_row >= 0).nonzero(as_tuple=True)
        rows[plan.route_row[payload, slot]] = payloads[payload]
        return rows

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """``[payloads, top_k, hidden]`` fp32: the rows of each payload's routes, 0 where absent."""
        at = self.received.route_row
        found = (
            rows[at.clamp_min(0)] if rows.shape[0] else rows.new_zeros((*at.shape, *rows.shape[1:]))
        )
        return found.float().masked_fill((at < 0)[..., None], 0.0)

    def summed(self, parts: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden]`` fp32: the parts of each token, added in rank order."""
        total = torch.zeros(self.num_tokens, parts.shape[1], device=parts.device)
        for tokens, part in zip(
            self.sent.token.split(self.sent.per_rank), parts.split(self.sent.per_rank), strict=True
        ):
            total[tokens] += part.float()  # a token has one part per rank: no index repeats
        return total


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    if rows.numel():
        return rows.view(torch.uint8)
    width = rows.shape[1] * rows.element_size()
    return torch.empty((rows.shape[0], width), dtype=torch.uint8, device=rows.device)


def start(
    backend: Backend,
    config: EPConfig,
    place: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    problem: str,
) -> tuple[SendPlan, list[int]]:
    """Agrees on what is coming; raises on every rank before a token has moved."""
    world, local = backend.world_size, place.numel() // backend.world_size
    if problem:
        sent = SendPlan(torch.empty(0), torch.empty(0), [0] * world, [0] * place.numel())
    else:
        sent = plan_send(routing, place, world)
    every = agree(backend, "dispatch", {}, problem=problem, extra=[*sent.per_rank, *sent.per_place])
    capacity = config.rows(world)
    for rank in range(world):
        first = world + rank * local
        totals = [
            sum(column) for column in zip(*(e[first : first + local] for e in every), strict=True)
        ]
        rows = padded_rows(totals, config.align)
        if rows > capacity:
            raise EPOverflow(
                f"dispatch: rank {rank} would receive {rows} rows (padding included) and its "
                f"stated capacity is {capacity}. No token was sent; raise capacity_rows or "
                "lower max_tokens"
            )
    return sent, [theirs[backend.rank] for theirs in every]


class _Dispatch(torch.autograd.Function):
    """Rows of tokens to rows of experts on the native wire; backward adds the routes' gradients."""

    @staticmethod
    def forward(ctx, x, landed, journey):
        ctx.journey = journey
        return journey.spread(landed)

    @staticmethod
    def backward(ctx, grad_rows):
        journey = ctx.journey
        parts = journey.gathered(grad_rows).sum(1).to(grad_rows.dtype)
        grad_x = journey.summed(journey.back(parts, "dispatch backward"))
        return grad_x.to(grad_rows.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, topk_weights, journey):
        ctx.journey = journey
        ctx.save_for_backward(rows)
        routes = journey.gathered(rows)
        parts = reference.unpermute_reduce(routes, journey.weights).to(rows.dtype)
        return journey.summed(journey.back(parts, "combine rows")).to(journey.config.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        journey, (rows,) = ctx.journey, ctx.saved_tensors
        grads = journey.out(grad_out[journey.sent.token], "combine backward")
        weighted = journey.weights[..., None] * grads.float()[:, None, :]
        at = journey.received.route_row
        grad_rows = rows.new_zeros(rows.shape)
        grad_rows[at[at >= 0]] = weighted[at >= 0].to(rows.dtype)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            dots = (journey.gathered(rows) * grads.float()[:, None, :]).sum(-1)
            found = journey.back(dots, "combine backward weights")
            grad_weights = torch.zeros_like(journey.topk_weights)
            mine = journey.sent.rows >= 0
            payload, slot = mine.nonzero(as_tuple=True)
            grad_weights[journey.sent.token[payload], slot] = found[payload, slot]
        return grad_rows, grad_weights, None


def dispatch(
    backend: Backend,
    config: EPConfig,
    place: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    problem: str,
) -> tuple[ExpertRows, Journey]:
    sent, from_each = start(backend, config, place, x, routing, problem)
    row = x.detach()[sent.token]
    data, scale = (
        reference.quant_fp8(row) if config.wire == "fp8" else (row, row.new_empty(len(row), 0))
    )
    parts = (data, scale, sent.rows, routing.topk_weights.detach()[sent.token])
    wire = torch.cat([_bytes(p) for p in parts], 1)
    landed = wire.new_empty((sum(from_each), wire.shape[1]))
    backend.exchange(wire, sent.per_rank, landed, from_each, "dispatch rows")
    data, scale, rows, weights = _unpack(landed, parts)
    received = plan_receive(rows, place.numel() // backend.world_size, config.align, from_each)
    weights = weights.masked_fill(received.route_row < 0, 0.0)
    journey = Journey(backend, config, x.shape[0], routing.topk_weights, sent, received, weights)
    if config.wire == "fp8":
        spread = journey.spread(data.view(torch.uint8)).view(FP8)
        scales = journey.spread(scale).T.contiguous()
    else:
        spread, scales = _Dispatch.apply(x, data, journey), None
    number = received.tile_expert.new_full((1,), received.tile_expert.numel())
    tiles = received.tile_expert, received.tile_rows, number
    return ExpertRows(spread, scales, *tiles, config.align), journey


def _unpack(landed: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    widths = [t.shape[1] * t.element_size() for t in like]
    parts = landed.split(widths, 1)
    return [
        part.contiguous().view(t.dtype) if part.numel() else t.new_empty((len(landed), t.shape[1]))
        for part, t in zip(parts, like, strict=True)
    ]


def combine(journey: Journey, rows: torch.Tensor, problem: str) -> torch.Tensor:
    agree(journey.backend, "combine", {}, problem=problem)
    return _Combine.apply(rows, journey.topk_weights, journey)
