# SPDX-License-Identifier: Apache-2.0
"""What an operator does on the device of its tensors.

Two executions of one contract: the torch reference where there is no CUDA, our kernels on Hopper.
"""

from __future__ import annotations

import torch

from moe_backend import reference
from moe_backend.types import Activation, ExpertWeights, RouterSpec


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, weights and tokens per expert; see reference.router_topk."""
    return reference.router_topk(logits, spec, bias)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    expert_map: torch.Tensor | None,
    shared_output: torch.Tensor | None,
) -> torch.Tensor:
    """The routed experts of a layer; see reference.fused_experts."""
    return reference.fused_experts(
        x, topk_ids, topk_weights, weights, activation, expert_map, shared_output
    )
