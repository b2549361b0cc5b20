# SPDX-License-Identifier: Apache-2.0
"""The layer: route, then experts. Framework-free; engine, benchmarks and tests call it."""

from __future__ import annotations

import torch

from moe_backend import ops
from moe_backend.types import Activation, ExpertWeights, RouterSpec, Routing, Score

__all__ = ["fused_experts", "moe_layer", "route"]
_SILU = Activation()


def _check(name: str, ok: bool, expected: str, found: object, *values: object) -> None:
    """``values`` fill ``expected`` on failure only: under torch.compile, putting a dynamic size
    into a string would fix that size in the graph."""
    if not ok:
        raise ValueError(f"{name}: expected {expected.format(*values)}, found {found}")


def _check_logits(logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec) -> None:
    shape = tuple(logits.shape)
    _check("logits", logits.dim() == 2, "[num_tokens, num_experts]", shape)
    _check("logits", logits.is_floating_point(), "a floating dtype", logits.dtype)
    spec.check(shape[1])
    if bias is not None:
        _check("bias", bias.shape == shape[1:], "shape {}", tuple(bias.shape), shape[1:])
        same = bias.device == logits.device
        _check("bias", same, "device {}", bias.device, logits.device)


def _check_input(x: torch.Tensor, weights: ExpertWeights) -> None:
    shape, hidden = tuple(x.shape), weights.hidden
    _check(
        "x",
        x.dim() == 2 and shape[1] == hidden,
        "[num_tokens, {}] to match w13",
        shape,
        hidden,
    )
    _check("x", x.dtype in (torch.bfloat16, torch.float16), "dtype bfloat16 or float16", x.dtype)
    _check("x", x.is_contiguous(), "contiguous rows", "a view with gaps")
    device = weights.w13.device
    _check("x", x.device == device, "device {}", x.device, device)
    graph = torch.is_grad_enabled() and x.requires_grad
    _check("x", not graph, "no gradient (the experts serve inference)", "requires_grad=True")


def _check_map(expert_map: torch.Tensor | None, num_experts: int) -> None:
    if expert_map is not None:
        _check(
            "expert_map",
            expert_map.dim() == 1 and expert_map.numel() == num_experts,
            "one local id per expert, shape ({},)",
            tuple(expert_map.shape),
            num_experts,
        )
        integer = expert_map.dtype in (torch.int32, torch.int64)
        _check("expert_map", integer, "dtype int32 or int64", expert_map.dtype)


def route(
    logits: torch.Tensor,
    top_k: int,
    score: Score = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> Routing:
    """Chooses ``top_k`` experts per token.

    Args:
        logits: ``[num_tokens, num_experts]``, any floating dtype; all arithmetic is fp32.
        score: "softmax", "sigmoid" or "sqrtsoftplus".
        bias: ``[num_experts]``; steers the selection and never enters a weight.
        num_groups, top_groups: only experts of the best ``top_groups`` groups can be chosen.
        renormalize: make the weights of a token sum to one.
        scale: factor on the weights, applied once, last.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    spec = RouterSpec(top_k, score, num_groups, top_groups, 0, renormalize, scale)
    _check_logits(logits, bias, spec)
    ids, weights, _ = torch.ops.moe_backend.router_topk(logits, bias, *ops.flat(spec))
    return Routing(ids, weights, logits.shape[1])


def fused_experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    activation: Activation = _SILU,
    expert_map: torch.Tensor | None = None,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts of a layer: ``[num_tokens, hidden]`` in x's dtype, no host sync.

    Args:
        x: ``[num_tokens, hidden]`` bf16 or fp16; not changed.
        routing: from :func:`route`, or built from ids and weights made elsewhere.
        weights: the local experts.
        activation: the gate's shape and clamp.
        expert_map: ``[routing.num_experts]`` local id of each expert, −1 where it lives elsewhere.
        shared_output: ``[num_tokens, hidden]``, added before the result is rounded.

    Raises:
        ValueError: naming the tensor, what was expected and what came.
    """
    _check_input(x, weights)
    rows = routing.topk_ids.shape[0]
    _check("routing", rows == x.shape[0], "{} tokens as in x", rows, x.shape[0])
    if expert_map is None:
        local = weights.num_local_experts
        found = routing.num_experts
        _check("routing", found == local, "{} experts", found, local)
    _check_map(expert_map, routing.num_experts)
    if shared_output is not None:
        same = shared_output.shape == x.shape
        _check("shared_output", same, "shape {}", tuple(shared_output.shape), tuple(x.shape))
    return torch.ops.moe_backend.fused_experts(
        x,
        routing.topk_ids,
        routing.topk_weights,
        *_tensors(weights),
        expert_map,
        shared_output,
        activation.alpha,
        activation.limit,
    )


def moe_layer(
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: ExpertWeights,
    spec: RouterSpec,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = _SILU,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Routing and experts as one operator; what the engine's layer calls with raw logits."""
    _check_logits(logits, bias, spec)
    _check_input(x, weights)
    rows = logits.shape[0]
    _check("logits", rows == x.shape[0], "{} rows as in x", rows, x.shape[0])
    if expert_map is None:
        local = weights.num_local_experts
        _check("logits", logits.shape[1] == local, "{} experts", logits.shape[1], local)
    _check_map(expert_map, logits.shape[1])
    return torch.ops.moe_backend.moe_layer(
        x,
        logits,
        bias,
        *_tensors(weights),
        expert_map,
        *ops.flat(spec),
        activation.alpha,
        activation.limit,
    )


def _tensors(weights: ExpertWeights) -> tuple[torch.Tensor, ...]:
    return weights.w13, weights.w13_scale, weights.w2, weights.w2_scale
