# SPDX-License-Identifier: Apache-2.0
"""Every serving operation in plain torch: what runs without a GPU, and the oracle of all kernels.

Rounding happens exactly where the kernels round: activations to e4m3 in groups of 128 with fp32
scales, the SwiGLU result again, the down-projection's rows to bf16, their weighted sum (fp32,
slot order) to the output's dtype. Nothing else is rounded below fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_backend.types import BLOCK, FP8, Activation, ExpertWeights, RouterSpec

FP8_MAX = 448.0
AMAX_FLOOR = 1e-10  # a group of zeros must not divide by zero
SUM_FLOOR = 1e-20  # sigmoid scores may underflow to a sum of zero


def quant_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[..., columns]`` to e4m3 and fp32 scales ``[..., cdiv(columns, 128)]``."""
    columns = x.shape[-1]
    padded = F.pad(x.float(), (0, -columns % BLOCK))
    groups = padded.unflatten(-1, (-1, BLOCK)) if columns else padded.reshape(*x.shape[:-1], 0, 1)
    scale = groups.abs().amax(-1).clamp_min(AMAX_FLOOR) * (1.0 / FP8_MAX)
    q = (groups * scale.reciprocal()[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.flatten(-2)[..., :columns].contiguous(), scale


def dequant_fp8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of quant_fp8, in fp32."""
    return q.float() * scale.repeat_interleave(BLOCK, -1)[..., : q.shape[-1]]


def dequant_blocks(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights ``[..., n, k]`` with one scale per 128×128 block, in fp32."""
    rows = scale.repeat_interleave(BLOCK, -2)[..., : w.shape[-2], :]
    return w.float() * rows.repeat_interleave(BLOCK, -1)[..., : w.shape[-1]]


def scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """fp32 scores of all experts."""
    logits = logits.float()
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    return (logits.clamp_min(0) + torch.log1p((-logits.abs()).exp())).sqrt()


def _best_groups(key: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Which experts stand in a chosen group, as bool ``[num_tokens, num_experts]``."""
    grouped = key.unflatten(-1, (spec.num_groups, -1))
    group_score = grouped.sort(-1, descending=True).values[..., : spec.group_candidates].sum(-1)
    group_score = group_score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = group_score.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    chosen = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, order, True)
    return chosen.repeat_interleave(grouped.shape[-1], -1)


def top_ids(key: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """``[num_tokens, top_k]`` ids by falling key. Ties go to the lowest id; NaN counts as −inf."""
    key = key.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = key.sort(dim=-1, descending=True, stable=True).indices
    if spec.num_groups > 1:  # members of chosen groups first, each part still in order
        member = _best_groups(key, spec).gather(1, order)
        order = order.gather(1, member.byte().sort(dim=-1, descending=True, stable=True).indices)
    return order[:, : spec.top_k]


def router_topk(
    logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts of every token.

    Args:
        logits: ``[num_tokens, num_experts]``, any floating dtype.
        spec: how to score, group, renormalise and scale.
        bias: ``[num_experts]``, steers the selection and never enters a weight.

    Returns:
        ids int32 and weights fp32 ``[num_tokens, top_k]`` by falling key, and the number of
        tokens of each expert, int32. Ties go to the lowest id; a NaN key counts as −inf.
    """
    spec.check(logits.shape[-1])
    score = scores(logits, spec.score)
    key = score if bias is None else score + bias.float()
    ids = top_ids(key, spec)
    weights = score.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SUM_FLOOR)
    counts = torch.bincount(ids.flatten(), minlength=logits.shape[-1]).int()
    return ids.int(), weights * spec.scale, counts


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate·sigmoid(alpha·gate)·up in fp32, clamped first where the model asks for it."""
    if activation.limit is not None:
        gate = gate.clamp_max(activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * up


def local_ids(
    topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Row of each route in this rank's weights; −1 where it is absent or lives elsewhere."""
    ids = topk_ids.long()
    if expert_map is not None:
        inside = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(inside, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    return torch.where((ids >= 0) & (ids < num_local_experts), ids, -1)


def expert_rows(
    x: torch.Tensor, expert: int, weights: ExpertWeights, activation: Activation
) -> torch.Tensor:
    """One expert applied to dequantised fp32 rows ``x``; rows as bf16."""
    scale = weights.w13_scale[expert].chunk(2)  # gate and up have their own blocks
    gate_w, up_w = (
        dequant_blocks(w, s) for w, s in zip(weights.w13[expert].chunk(2), scale, strict=True)
    )
    hidden = dequant_fp8(*quant_fp8(swiglu(x @ gate_w.T, x @ up_w.T, activation)))
    return (hidden @ dequant_blocks(weights.w2[expert], weights.w2_scale[expert]).T).bfloat16()


def fused_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation | None = None,
    expert_map: torch.Tensor | None = None,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts of a layer, ``[num_tokens, hidden]`` in x's dtype.

    Absent routes (−1, or mapped to −1) contribute nothing, whatever their weight.
    """
    activation = activation or Activation()
    num_tokens, top_k = topk_ids.shape
    routes = local_ids(topk_ids, weights.num_local_experts, expert_map).flatten()
    dequantised = dequant_fp8(*quant_fp8(x))
    rows = torch.zeros(num_tokens * top_k, x.shape[1], dtype=torch.bfloat16, device=x.device)
    for expert in routes.unique().tolist():
        if expert >= 0:
            mine = (routes == expert).nonzero().squeeze(1)
            rows[mine] = expert_rows(dequantised[mine // top_k], expert, weights, activation)
    return unpermute_reduce(
        rows.view(num_tokens, top_k, x.shape[1]),
        topk_weights.masked_fill(routes.view_as(topk_ids) < 0, 0.0),
        shared_output,
    ).to(x.dtype)


def unpermute_reduce(
    rows: torch.Tensor, weights: torch.Tensor, shared_output: torch.Tensor | None = None
) -> torch.Tensor:
    """Weighted sum of ``rows [num_tokens, top_k, hidden]`` in slot order, fp32."""
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
    for slot in range(rows.shape[1]):
        total += weights[:, slot, None] * rows[:, slot].float()
    return total if shared_output is None else total + shared_output.float()


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    row_expert: torch.Tensor,
) -> torch.Tensor:
    """``out[r] = a[r] @ b[row_expert[r]].T`` in fp32; rows of expert −1 are zero.

    Args:
        a: ``[rows, k]`` e4m3 with ``a_scale [rows, cdiv(k, 128)]``.
        b: ``[experts, n, k]`` e4m3 with ``b_scale [experts, cdiv(n, 128), cdiv(k, 128)]``.
        row_expert: ``[rows]`` integer.
    """
    rows = dequant_fp8(a, a_scale)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for expert in row_expert.unique().tolist():
        if expert >= 0:
            mine = row_expert == expert
            out[mine] = rows[mine] @ dequant_blocks(b[expert], b_scale[expert]).T
    return out


def expert_offsets(counts: torch.Tensor, align: int) -> torch.Tensor:
    """First row of each expert when every expert's rows are padded to ``align``; one more entry
    holds the total. int32 ``[num_experts + 1]``."""
    padded = (counts.long() + align - 1) // align * align
    return F.pad(padded.cumsum(0), (1, 0)).int()
