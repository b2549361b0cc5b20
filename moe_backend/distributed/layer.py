# SPDX-License-Identifier: Apache-2.0
"""The routed experts of a layer whose experts are spread over ranks."""

from __future__ import annotations

import torch

from moe_backend import reference
from moe_backend.distributed.api import ExpertParallel
from moe_backend.distributed.handle import ExpertRows
from moe_backend.types import BLOCK, Activation, ExpertWeights, Routing


def ep_experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    ep: ExpertParallel,
    activation: Activation | None = None,
) -> torch.Tensor:
    """dispatch → this rank's experts → combine. Collective; same result as the layer on one rank
    but for one more rounding to bf16 per (token, rank)."""
    rows, handle = ep.dispatch(x, routing)
    return ep.combine(run_local_experts(rows, weights, activation or Activation()), handle)


def run_local_experts(
    rows: ExpertRows, weights: ExpertWeights, activation: Activation
) -> torch.Tensor:
    """bf16 ``[num_rows, hidden]``: both projections of each row's expert; padding rows hold
    anything."""
    if rows.data.is_cuda:
        return run_kernels(rows, weights, activation)
    assert rows.scale is not None
    x = reference.dequant_fp8(rows.data, rows.scale.T)
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    valid = torch.arange(rows.align) < rows.tile_rows[:, None]  # padding is not worth computing
    row_expert = torch.where(valid, rows.tile_expert[:, None], -1).flatten()
    for expert in row_expert.unique().tolist():
        if expert >= 0:
            mine = row_expert == expert
            out[mine] = reference.expert_rows(x[mine], expert, weights, activation)
    return out


def run_kernels(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> torch.Tensor:
    """The same by the grouped GEMMs (also in Triton's interpreter)."""
    from moe_backend.kernels import grouped_gemm as gg
    from moe_backend.kernels.schedule import Schedule

    nowhere = rows.tile_expert.new_empty((1, 1))  # rows are in place: no route is looked up
    plan = Schedule(
        nowhere, rows.tile_expert.new_empty(rows.num_rows), rows.tile_expert, rows.tile_rows,
        rows.num_tiles, rows.align,
    )  # fmt: skip
    up = gg.Operands(rows.data, rows.scale, weights.w13, weights.w13_scale)
    clamp = {"alpha": activation.alpha, "limit": activation.limit}
    if _fits_gluon(rows, weights):
        from moe_backend.kernels import grouped_gemm_sm90 as gg_sm90

        h = gg_sm90.grouped_gemm_swiglu(up, plan, **clamp)
        return gg_sm90.grouped_gemm(gg.Operands(*h, weights.w2, weights.w2_scale), plan)
    tiles = gg.Tiles(swap=rows.align < 64)
    h = gg.grouped_gemm_swiglu(up, plan, tiles, **clamp)
    return gg.grouped_gemm(gg.Operands(*h, weights.w2, weights.w2_scale), plan, tiles)


def _fits_gluon(rows: ExpertRows, weights: ExpertWeights) -> bool:
    whole = weights.hidden % BLOCK == 0 and weights.intermediate % BLOCK == 0
    return rows.data.is_cuda and rows.align == BLOCK and whole
