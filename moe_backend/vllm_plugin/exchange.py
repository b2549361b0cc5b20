# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts' ranks and back, when the experts of a vLLM layer are spread.

Which transport is decided once, at load, the same on every rank. Buffers and rendezvous wait for
the first forward, the engine's profile run: there all ranks are in step, memory is being counted
and no graph is being captured. Layers of equal sizes share one exchange.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import lru_cache

import torch

from moe_backend.distributed import EPConfig, ExpertParallel, ep_experts
from moe_backend.distributed.symm_memory import supports_symmetric_memory
from moe_backend.support import Support
from moe_backend.types import Activation, ExpertWeights, Routing
from moe_backend.vllm_plugin import METHOD, compat

ENGINE = "engine"


@dataclass(frozen=True)
class Plan:
    """What an exchange needs to be opened; equal plans share one."""

    config: EPConfig
    transport: str
    place: tuple[int, ...]  # local row of each expert on this rank, −1 elsewhere


_plans: list[Plan] = []
_open: dict[Plan, ExpertParallel] = {}
_library = torch.library.Library("moe_backend", "FRAGMENT")
_library.define(
    "exchanged_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, "
    "Tensor w13_scale, Tensor w2, Tensor w2_scale, int plan, float alpha, float? limit) -> Tensor"
)


def _exchanged_experts(x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, plan, alpha, limit):
    weights, activation = ExpertWeights(w13, w13_scale, w2, w2_scale), Activation(alpha, limit)
    exchange = _open.get(_plans[plan]) or _opened(_plans[plan], weights, activation)
    routing = Routing(topk_ids, topk_weights, exchange.config.num_experts)
    return ep_experts(x, routing, weights, exchange, activation)


_library.impl("exchanged_experts", _exchanged_experts, "CompositeExplicitAutograd")


@torch.library.register_fake("moe_backend::exchanged_experts")
def _(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _opened(plan: Plan, weights: ExpertWeights, activation: Activation) -> ExpertParallel:
    # Ranks get here minutes apart when one of them compiles the model and others load it from the
    # cache: meet under the engine's patience before ours begins to count.
    compat.gather_from_experts("open")
    place = torch.tensor(plan.place, dtype=torch.int32)
    group = compat.expert_group(on_cpu=plan.transport == "gloo")
    exchange = ExpertParallel(plan.config, group, backend=plan.transport, expert_map=place)
    if weights.w13.is_cuda:
        warm(exchange, weights, activation, (1, 7, 16, plan.config.max_tokens))
    if plan.transport == "symm":  # replayed graphs raise nothing, yet health must go bad
        exchange.watch(_stop_serving)
    _open[plan] = exchange
    return exchange


def _stop_serving(error: Exception) -> None:
    compat.logger().error("%s: %s", METHOD, error)
    os.kill(os.getpid(), signal.SIGTERM)


def warm(
    exchange: ExpertParallel,
    weights: ExpertWeights,
    activation: Activation,
    sizes: tuple[int, ...],
) -> None:
    """Compiles what any batch will launch: sizes that differ by what they divide by. Collective."""
    config, device = exchange.config, weights.w13.device
    for tokens in sizes:
        x = torch.zeros(tokens, config.hidden, dtype=config.dtype, device=device)
        slots = torch.arange(tokens * config.top_k, device=device) % config.num_experts
        ids = slots.int().view(tokens, config.top_k)
        routed = torch.full(ids.shape, 1.0 / config.top_k, device=device)
        routing = Routing(ids, routed, config.num_experts)
        ep_experts(x, routing, weights, exchange, activation)


def register(config: EPConfig, transport: str, expert_map: torch.Tensor) -> int:
    """The number by which the operator finds this plan. Opens nothing."""
    plan = Plan(config, transport, tuple(expert_map.tolist()))
    if plan not in _plans:
        _plans.append(plan)
    return _plans.index(plan)


def run(
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    weights: ExpertWeights,
    plan: int,
    activation: Activation,
) -> torch.Tensor:
    """The layer's output for this rank's own tokens. Collective; idle ranks bring a dummy batch."""
    return torch.ops.moe_backend.exchanged_experts(
        x,
        *routing,
        weights.w13,
        weights.w13_scale,
        weights.w2,
        weights.w2_scale,
        plan,
        activation.alpha,
        activation.limit,
    )


@lru_cache(maxsize=1)
def transport(setting: str, platform: str, replicated: bool) -> str:
    """The transport of this process group: "gloo", "nccl", "symm" or "engine". Collective once.

    Args:
        setting: MOE_BACKEND_EP.
        platform: "cuda" or "cpu".
        replicated: the ranks of a tensor-parallel group hold the same tokens, which only the
            engine's own exchange and reduction handle.
    """
    if platform == "cpu":
        return "gloo"
    if setting != "auto":
        return setting
    if replicated:
        return _engine("ranks of a tensor-parallel group hold the same tokens")
    answer = symm_everywhere()  # a choice for the user until it has been measured on GPUs
    return _engine("MOE_BACKEND_EP=symm is there on request" if answer.ok else answer.reason)


def _engine(reason: str) -> str:
    compat.logger().info_once(
        "%s: tokens travel by the engine's own all-to-all: %s", METHOD, reason
    )
    return ENGINE


def symm_everywhere() -> Support:
    """Whether every rank of the expert group can write into every other's memory. Collective."""
    mine = torch.cuda.current_device()
    every = compat.gather_from_experts((_host(), mine))
    unreachable = [
        rank
        for rank, (host, device) in enumerate(every)
        if host == _host()
        and device != mine
        and device < torch.cuda.device_count()
        and not torch.cuda.can_device_access_peer(mine, device)
    ]
    capability = torch.cuda.get_device_capability(mine)
    verdict = supports_symmetric_memory(capability, len({h for h, _ in every}), unreachable)
    reasons = [reason for reason in compat.gather_from_experts(verdict.reason) if reason]
    return Support(not reasons, "; ".join(sorted(set(reasons))))


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def close() -> None:
    """Gives every exchange's buffers back; on all ranks, when their work is done."""
    while _open:
        _open.popitem()[1].destroy()


def describe(plan: int | None, travels: bool) -> str:
    """For status: how tokens of a layer reach their experts."""
    if plan is not None:
        return _plans[plan].transport
    return ENGINE if travels else "none"
