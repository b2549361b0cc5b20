# SPDX-License-Identifier: Apache-2.0
"""The dense router, its scores for the balance loss, and the balance loss."""

from __future__ import annotations

from enum import IntEnum

import torch

from moe_backend import ops_training
from moe_backend.functional.checks import (
    INTEGERS,
    expect,
    expect_device,
    expect_float,
    expect_shape,
)
from moe_backend.types import SCORES


def _operators():
    return ops_training if ops_training.eager() else torch.ops.moe_backend


class RoutingMapFormat(IntEnum):
    """How a routing map is returned."""

    BYTEMAP = 0  # bool [..., num_experts]
    BITMAP_U8 = 1  # uint8 [..., ceil(num_experts / 8)], the lowest expert in the lowest bit


def _format(value: RoutingMapFormat | int | str) -> RoutingMapFormat:
    names = {"bytemap": RoutingMapFormat.BYTEMAP, "bitmap_u8": RoutingMapFormat.BITMAP_U8}
    if isinstance(value, str) and value in names:
        return names[value]
    ok = isinstance(value, int) and value in (0, 1)
    expect("routing_map_format", ok, "'bytemap' (0) or 'bitmap_u8' (1)", repr(value))
    return RoutingMapFormat(int(value))


def _check_logits(logits: torch.Tensor, topk: int, score_function: str) -> None:
    ok = logits.dim() >= 1 and logits.shape[-1] >= 1
    expect("logits", ok, "[..., num_experts]", f"shape {tuple(logits.shape)}")
    expect_float("logits", logits)
    expect("score_function", score_function in SCORES, f"one of {SCORES}", repr(score_function))
    experts = logits.shape[-1]
    expect("topk", 1 <= topk <= experts, f"1 to the {experts} experts", topk)


def _check_groups(experts: int, topk: int, num_groups, group_topk) -> tuple[int, int]:
    if num_groups is None and group_topk is None:
        return 1, 1
    both = num_groups is not None and group_topk is not None
    expect("group_topk", both, "num_groups and group_topk together", (num_groups, group_topk))
    ok = num_groups >= 1 and experts % num_groups == 0
    expect("num_groups", ok, f"a divisor of the {experts} experts", num_groups)
    expect("group_topk", 1 <= group_topk <= num_groups, f"1 to {num_groups}", group_topk)
    reach = experts // num_groups * group_topk
    expect("topk", topk <= reach, f"at most the {reach} experts of {group_topk} groups", topk)
    return num_groups, group_topk


def _check_indices(indices: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    expect_shape("topk_indices", indices, shape)
    expect("topk_indices", indices.dtype in INTEGERS, "int16, int32 or int64", indices.dtype)
    expect("topk_indices", indices.is_contiguous(), "a contiguous tensor", indices.stride())
    expect_device("topk_indices", indices, device)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, indices, want_map, want_bits, *spec):
        probs, byte_map, bits = _operators().router_dense(
            logits, bias, indices, want_map, want_bits, *spec
        )
        routing_map = bits if want_bits else byte_map
        ctx.mark_non_differentiable(routing_map)
        ctx.save_for_backward(logits, routing_map)
        ctx.set_materialize_grads(False)  # no zeros for the map's gradient
        ctx.spec = spec
        return probs, routing_map

    @staticmethod
    def backward(ctx, grad, _):
        none = [None] * (4 + len(ctx.spec))
        if grad is None:
            return None, *none
        logits, routing_map = ctx.saved_tensors
        grad = _operators().router_dense_backward(grad, logits, routing_map, *ctx.spec)
        return grad, *none


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | int | str = "bytemap",
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts a token and weighs them, densely.

    Args:
        logits: ``[..., num_experts]`` fp32, bf16 or fp16.
        use_pre_softmax: softmax over all experts before the choice, else over the chosen logits.
        num_groups, group_topk: only experts of the best ``group_topk`` groups can be chosen; a
            group's score is the sum of its best ``topk // group_topk`` scores.
        scaling_factor: factor on the probabilities, None for 1.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two renormalise over the
            chosen if ``topk > 1``.
        expert_bias: ``[num_experts]``, steers the choice and never enters a probability.
        routing_map_format: bool map or bits.
        topk_indices: ``[num_tokens, topk]`` int16, int32 or int64, filled with the chosen ids in
            rising order and returned in place of the map.

    Returns:
        probs of the logits' shape and dtype, zero where not chosen and differentiable, and the
        map. Ties go to the lowest id; a NaN score counts as −inf.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    form = _format(routing_map_format)
    _check_logits(logits, topk, score_function)
    experts = logits.shape[-1]
    groups = _check_groups(experts, topk, num_groups, group_topk)
    flat = logits.reshape(-1, experts)
    if expert_bias is not None:
        expect_shape("expert_bias", expert_bias, (experts,))
        expect_device("expert_bias", expert_bias, logits.device)
    if topk_indices is not None:
        _check_indices(topk_indices, (flat.shape[0], topk), logits.device)
    bits = form is RoutingMapFormat.BITMAP_U8 and topk_indices is None
    scale = 1.0 if scaling_factor is None else float(scaling_factor)
    probs, routing_map = _Dense.apply(
        flat, expert_bias, topk_indices, not bits, bits,
        topk, score_function, bool(use_pre_softmax), *groups, scale,
    )  # fmt: skip
    if topk_indices is not None:
        return probs.view(logits.shape), topk_indices
    return probs.view(logits.shape), routing_map.view(*logits.shape[:-1], routing_map.shape[1])


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, topk, score_function, bits):
        scores, routing_map = _operators().router_scores(logits, topk, score_function, bits)
        ctx.mark_non_differentiable(routing_map)
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)
        ctx.spec = topk, score_function
        return routing_map, scores

    @staticmethod
    def backward(ctx, _, grad):
        if grad is None:
            return None, None, None, None
        (logits,) = ctx.saved_tensors
        return _operators().router_scores_backward(grad, logits, *ctx.spec), None, None, None


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | int | str = "bytemap",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of the ``topk`` best experts, without bias or groups, and the scores of all.

    Scores are fp32 and differentiable: softmax, or sigmoid and sqrt-softplus divided by their sum
    over all experts if ``topk > 1``. Arguments as in :func:`fused_topk_with_score_function`.
    """
    form = _format(routing_map_format)
    _check_logits(logits, topk, score_function)
    flat = logits.reshape(-1, logits.shape[-1])
    bits = form is RoutingMapFormat.BITMAP_U8
    routing_map, scores = _Scores.apply(flat, topk, score_function, bits)
    return (
        routing_map.view(*logits.shape[:-1], routing_map.shape[1]),
        scores.view(logits.shape),
    )


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, probs, tokens_per_expert, total, tokens, factor):
        state = _operators().aux_loss(probs, tokens_per_expert, total, tokens, factor)
        ctx.save_for_backward(state, tokens_per_expert, probs)
        return state[0]

    @staticmethod
    def backward(ctx, grad):
        state, tokens_per_expert, probs = ctx.saved_tensors
        grad = _operators().aux_loss_backward(grad, state, tokens_per_expert, probs)
        return grad, None, None, None, None


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Balance loss: coeff · E / (topk · T²) · Σ_c (Σ_t probs[t, c]) · tokens_per_expert[c].

    Args:
        probs: ``[num_tokens, columns]`` fp32, bf16 or fp16; ``columns`` a multiple of
            ``num_experts`` (a sequence-wise loss lays its sequences side by side).
        tokens_per_expert: ``[columns]`` of any integer or float dtype.
        total_num_tokens: T. A scalar on probs' device is read when the kernel runs, so that a
            captured graph follows it, forward and backward.

    Returns:
        The loss, an fp32 scalar whatever probs' dtype, equal in every repetition.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    expect("probs", probs.dim() == 2, "[num_tokens, columns]", f"shape {tuple(probs.shape)}")
    expect_float("probs", probs)
    columns = probs.shape[1]
    ok = num_experts >= 1 and columns % num_experts == 0
    expect("num_experts", ok, f"a divisor of probs' {columns} columns", num_experts)
    expect("topk", 1 <= topk <= num_experts, f"1 to {num_experts}", topk)
    expect_shape("tokens_per_expert", tokens_per_expert, (columns,))
    expect_device("tokens_per_expert", tokens_per_expert, probs.device)
    total, tokens = None, 1.0
    if isinstance(total_num_tokens, torch.Tensor):
        one = total_num_tokens.numel() == 1
        expect("total_num_tokens", one, "one value", f"shape {tuple(total_num_tokens.shape)}")
        expect_device("total_num_tokens", total_num_tokens, probs.device)
        total = total_num_tokens.reshape(())
    else:
        expect("total_num_tokens", total_num_tokens > 0, "a positive number", total_num_tokens)
        tokens = float(total_num_tokens)
    factor = coeff * num_experts / topk
    return _AuxLoss.apply(probs, tokens_per_expert, total, tokens, factor)
