# SPDX-License-Identifier: Apache-2.0
"""The engine's own FP8 experts, called as the engine calls them: the peers of every benchmark."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_backend.types import BLOCK, ExpertWeights, Routing

PEERS = {"triton": "vLLM default (Triton)", "deepgemm": "vLLM DeepGEMM"}


def available() -> str | None:
    """Why the peers cannot run here, or None."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        return f"vLLM is not installed ({error})"
    return None


@contextlib.contextmanager
def engine_context() -> Iterator[None]:
    """What the engine sets up before a layer runs: its configuration and workspaces."""
    # Hopper needs no power-of-two scales; with them the peers quantise coarser than the oracle.
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker import workspace

    with set_current_vllm_config(VllmConfig()):
        if workspace._manager is None:
            workspace.init_workspace_manager(torch.device("cuda"))
        yield


def drop_workspace() -> None:
    """Forget the workspace that the engine keeps, so that the next call takes one of its size."""
    from vllm.v1.worker import workspace

    manager = workspace.current_workspace_manager()
    manager._current_workspaces = [None] * len(manager._current_workspaces)


def workspace_bytes() -> int:
    """What the engine keeps between calls for its experts."""
    from vllm.v1.worker import workspace

    kept = workspace.current_workspace_manager()._current_workspaces
    return sum(t.numel() * t.element_size() for t in kept if t is not None)


def make(name: str, weights: ExpertWeights, routing: Routing, max_tokens: int) -> Callable:
    """A function of (x, routing) for the peer ``name``; inside engine_context()."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        make_moe_prepare_and_finalize_no_dp_ep,
    )

    experts: Any
    if name == "triton":
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

        experts = TritonExperts
    elif name == "deepgemm":
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts

        experts = DeepGemmExperts
    else:
        raise ValueError(f"peer: expected one of {', '.join(PEERS)}, found {name!r}")

    local = weights.num_local_experts
    config = FusedMoEConfig(
        num_experts=routing.num_experts,
        experts_per_token=routing.top_k,
        hidden_dim=weights.hidden,
        intermediate_size=weights.intermediate,
        num_local_experts=local,
        num_logical_experts=routing.num_experts,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        max_num_tokens=max_tokens,
    )
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=[BLOCK, BLOCK]
    )
    kernel = mk.FusedMoEKernel(
        make_moe_prepare_and_finalize_no_dp_ep(False), experts(config, quant)
    )

    def call(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return kernel.apply(
            hidden_states=x,
            w1=weights.w13,
            w2=weights.w2,
            topk_weights=routing.topk_weights,
            topk_ids=routing.topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=routing.num_experts,
            expert_map=None,
            apply_router_weight_on_input=False,
        )

    return call
