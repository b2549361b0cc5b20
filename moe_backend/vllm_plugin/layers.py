# SPDX-License-Identifier: Apache-2.0
"""What the plugin reads off one of the engine's MoE layers, as it was built on this rank.

`layer` is the engine's RoutedExperts throughout. It is typed Any: its attributes are set by the
engine and by register_parameter, which a type checker sees as Tensor | Module.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none

from moe_backend import envs, support
from moe_backend.types import MoEShape
from moe_backend.vllm_plugin import checks, compat


def shape_of(layer: Any) -> MoEShape:
    moe = layer.moe_config
    return MoEShape(
        num_experts=moe.num_experts,
        num_local_experts=moe.num_local_experts,
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        top_k=moe.experts_per_token,
        ep_size=moe.moe_parallel_config.ep_size,
    )


def layer_refusals(layer: Any) -> list[str]:
    """Every reason why this layer cannot run on our kernels, as it was built on this rank."""
    moe, shape = layer.moe_config, shape_of(layer)
    parallel = moe.moe_parallel_config
    engine = checks.EngineFacts.of(get_current_vllm_config_or_none())
    whole = support.supports_expert_layout(moe.intermediate_size)
    cut = support.supports_tensor_parallel(shape.hidden, moe.intermediate_size, parallel.tp_size)
    name, capability = compat.platform()
    answers = [
        support.supports_platform(name),
        support.supports_device(capability),
        support.supports_activation(moe.activation.value),
        support.supports_experts(
            has_bias=moe.has_bias,
            lora=moe.is_lora_enabled,
            weight_on_input=layer.apply_router_weight_on_input,
        ),
        support.supports_engine_backend(str(moe.moe_backend)),
        support.supports_parallelism(
            all2all=parallel.all2all_backend if parallel.use_all2all_kernels else None,
            dbo=engine.dbo,
            elastic=engine.elastic,
        ),
        support.supports_shape(shape),
        cut if whole.ok else whole,
        *_travel_answers(layer, engine, name),
    ]
    return [answer.reason for answer in answers if not answer.ok]


def travels(moe: Any) -> bool:
    """Whether tokens of this rank need experts of other ranks."""
    return moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel


def replicated(moe: Any) -> bool:
    """Whether a tensor-parallel group's ranks bring the same tokens to the layer."""
    config = get_current_vllm_config_or_none()
    tensor_parallel = config.parallel_config.tensor_parallel_size if config else 1
    return tensor_parallel > 1 and not moe.is_sequence_parallel


def _travel_answers(layer: Any, engine: checks.EngineFacts, platform: str) -> list[support.Support]:
    moe, setting = layer.moe_config, envs.load().ep
    if not travels(moe):
        return []
    use_ep = moe.moe_parallel_config.use_ep
    answer = support.supports_transport(
        setting,
        platform=platform,
        expert_parallel=use_ep,
        graphs=engine.graphs,
        replicated=replicated(moe),
    )
    if not use_ep or (platform == "cuda" and setting in ("auto", "engine")):
        return [answer]
    return [answer, support.supports_expert_division(moe.num_experts, moe.ep_size)]
