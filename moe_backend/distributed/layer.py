# SPDX-License-Identifier: Apache-2.0
"""The routed experts of a layer whose experts are spread over ranks."""

from __future__ import annotations

import torch

from moe_backend import reference
from moe_backend.distributed.api import ExpertParallel
from moe_backend.distributed.handle import ExpertRows
from moe_backend.types import Activation, ExpertWeights, Routing


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
        return _on_gpu(rows, weights, activation)
    assert rows.scale is not None
    x = reference.dequant_fp8(rows.data, rows.scale.T)
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    row_expert = rows.tile_expert.repeat_interleave(rows.align)
    for expert in row_expert.unique().tolist():
        if expert >= 0:
            mine = row_expert == expert
            out[mine] = reference.expert_rows(x[mine], expert, weights, activation)
    return out


def _on_gpu(rows: ExpertRows, weights: ExpertWeights, activation: Activation) -> torch.Tensor:
    from moe_backend.kernels import grouped_gemm as gg
    from moe_backend.kernels.schedule import Schedule

    plan = Schedule(
        rows.tile_expert, rows.tile_expert.new_empty(rows.num_rows), rows.tile_expert,
        rows.tile_rows, rows.align,
    )  # fmt: skip
    up = gg.Operands(rows.data, rows.scale, weights.w13, weights.w13_scale)
    h, h_scale = gg.grouped_gemm_swiglu(
        up, plan, gg.Tiles(), alpha=activation.alpha, limit=activation.limit
    )
    return gg.grouped_gemm(gg.Operands(h, h_scale, weights.w2, weights.w2_scale), plan, gg.Tiles())
