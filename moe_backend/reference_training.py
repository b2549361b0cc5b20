# SPDX-License-Identifier: Apache-2.0
"""The training family in plain torch: what runs without a GPU, and the oracle of its kernels.

Everything computes in fp32, or in fp64 for fp64 inputs (the oracle of gradient tests), and torch
differentiates it. Row maps follow the kernels' layout, so that either execution reads the other's.
"""

from __future__ import annotations

import torch

from moe_backend.reference import SUM_FLOOR, top_ids
from moe_backend.types import RouterSpec


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def all_scores(x: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return x.softmax(-1)
    if score == "sigmoid":
        return x.sigmoid()
    return torch.logaddexp(x, x.new_zeros(())).sqrt()  # softplus, also differentiable at zero


def _map(key: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    chosen = torch.zeros_like(key, dtype=torch.bool)
    return chosen.scatter_(1, top_ids(key.detach(), spec), True)


def router_dense(
    logits: torch.Tensor,
    spec: RouterSpec,
    pre_softmax: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in the logits' layout and dtype, zero where not chosen, and the bool map."""
    x = _wide(logits)
    key = x if spec.score == "softmax" and not pre_softmax else all_scores(x, spec.score)
    key = key if bias is None else key + bias.to(key.dtype)
    chosen = _map(key, spec)
    return dense_probs(logits, chosen, spec, pre_softmax), chosen


def dense_probs(
    logits: torch.Tensor, chosen: torch.Tensor, spec: RouterSpec, pre_softmax: bool
) -> torch.Tensor:
    """What router_dense makes of a selection that is already made."""
    x = _wide(logits)
    if spec.score == "softmax" and not pre_softmax:
        probs = torch.where(chosen, x.masked_fill(~chosen, -torch.inf).softmax(-1), 0.0)
    else:
        probs = torch.where(chosen, all_scores(x, spec.score), 0.0)
        if spec.score != "softmax" and spec.top_k > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + SUM_FLOOR)
    return (probs * spec.scale).to(logits.dtype)


def _slope(x: torch.Tensor, s: torch.Tensor, score: str) -> torch.Tensor:
    """d score / d logit of a score that depends on its own logit alone."""
    if score == "sigmoid":
        return s * (1 - s)
    return torch.where(s > 0, x.sigmoid() / (2 * s), 0.0)


def _normalised_backward(grad: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Gradient of s from that of s / (sum of s + 1e-20)."""
    total = s.sum(-1, keepdim=True) + SUM_FLOOR
    return (grad - (grad * s).sum(-1, keepdim=True) / total) / total


def router_dense_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    spec: RouterSpec,
    pre_softmax: bool,
) -> torch.Tensor:
    """Gradient of the logits by hand: an operator's body cannot ask autograd."""
    x, g = _wide(logits), torch.where(chosen, _wide(grad) * spec.scale, 0.0)
    if spec.score == "softmax":
        p = x.softmax(-1) if pre_softmax else x.masked_fill(~chosen, -torch.inf).softmax(-1)
        return (p * (g - (g * p).sum(-1, keepdim=True))).to(logits.dtype)
    s = torch.where(chosen, all_scores(x, spec.score), 0.0)
    g = _normalised_backward(g, s) if spec.top_k > 1 else g
    return torch.where(chosen, g * _slope(x, s, spec.score), 0.0).to(logits.dtype)


def router_scores_backward(
    grad: torch.Tensor, logits: torch.Tensor, top_k: int, score: str
) -> torch.Tensor:
    """Gradient of the logits from that of router_scores."""
    x, g = _wide(logits), _wide(grad)
    s = all_scores(x, score)
    if score == "softmax":
        return (s * (g - (g * s).sum(-1, keepdim=True))).to(logits.dtype)
    g = _normalised_backward(g, s) if top_k > 1 else g
    return (g * _slope(x, s, score)).to(logits.dtype)


def router_scores(
    logits: torch.Tensor, top_k: int, score: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every expert, normalised over all of them, and the bool map of the top-k."""
    s = all_scores(_wide(logits), score)
    chosen = _map(s, RouterSpec(top_k))
    if score != "softmax" and top_k > 1:
        s = s / (s.sum(-1, keepdim=True) + SUM_FLOOR)
    return s, chosen


def pack_bits(routing_map: torch.Tensor) -> torch.Tensor:
    """bool ``[..., E]`` to uint8 ``[..., ceil(E / 8)]``, the lowest expert in the lowest bit."""
    padded = torch.nn.functional.pad(routing_map, (0, -routing_map.shape[-1] % 8))
    bits = padded.unflatten(-1, (-1, 8)).int() << torch.arange(8, device=routing_map.device)
    return bits.sum(-1).to(torch.uint8)


def unpack_bits(bits: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Inverse of pack_bits."""
    spread = (bits[..., None].int() >> torch.arange(8, device=bits.device)) & 1
    return spread.flatten(-2)[..., :num_experts].bool()


def aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    factor: float,
) -> torch.Tensor:
    """factor / T² · Σ probs[t, c] · tokens_per_expert[c]; factor is coeff · E / top_k."""
    wide = _wide(probs)
    total = total_num_tokens
    if isinstance(total, torch.Tensor):
        total = total.to(wide.dtype)
    return (wide.sum(0) * tokens_per_expert.to(wide.dtype)).sum() * (factor / total / total)


def row_map_of_mask(mask: torch.Tensor, align: int = 1) -> tuple[torch.Tensor, ...]:
    """Row map [T, 2 E + 1], offsets and pad offsets [E + 1], targets [E]; see kernels/row_map.py.

    Entries beyond a token's routes, which the kernels leave unwritten, are -1 here.
    """
    num_tokens, num_experts = mask.shape
    routed = mask != 0
    totals = routed.sum(0)
    offsets, pad_offsets, targets = _starts(totals, align)
    row = offsets[:-1].long() + routed.cumsum(0) - 1
    row_map = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    row_map = row_map.to(mask.device)
    token, expert = routed.nonzero(as_tuple=True)
    slot = routed.cumsum(1)[token, expert] - 1
    row_map[token, slot] = row[token, expert].int()
    row_map[token, num_experts + slot] = expert.int()
    row_map[:, -1] = routed.sum(1)
    return row_map, offsets, pad_offsets, targets


def row_map_of_ids(ids: torch.Tensor, num_experts: int, align: int = 1) -> tuple[torch.Tensor, ...]:
    """Row map [T, k], offsets, pad offsets, targets; an id out of range, like -1, has no row."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < num_experts)
    totals = torch.bincount(flat[valid], minlength=num_experts)
    offsets, pad_offsets, targets = _starts(totals, align)
    order = torch.where(valid, flat, num_experts).sort(stable=True).indices
    row = torch.empty_like(flat).scatter_(0, order, torch.arange(flat.numel(), device=ids.device))
    row = row + pad_offsets[flat.clamp(0, num_experts - 1)]
    return torch.where(valid, row, -1).int().view_as(ids), offsets, pad_offsets, targets


def _starts(totals: torch.Tensor, align: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = (totals + align - 1) // align * align
    offsets, pads = (
        torch.nn.functional.pad(t.cumsum(0), (1, 0)) for t in (totals, targets - totals)
    )
    return offsets.int(), pads.int(), targets


def routes(
    row_map: torch.Tensor, num_experts: int, pad_offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, expert or slot, row) of every route, in the order of the tokens."""
    if row_map.shape[1] == 2 * num_experts + 1:
        slot = torch.arange(num_experts, device=row_map.device)
        token, slot = (slot < row_map[:, -1:]).nonzero(as_tuple=True)
        expert, row = row_map[token, num_experts + slot].long(), row_map[token, slot].long()
        return token, expert, row if pad_offsets is None else row + pad_offsets[expert]
    token, slot = (row_map >= 0).nonzero(as_tuple=True)
    return token, slot, row_map[token, slot].long()


def permute(x: torch.Tensor, where: tuple[torch.Tensor, ...], capacity: int) -> torch.Tensor:
    """Rows of x [T, ...] at ``where`` (see routes); rows without a route are zero."""
    token, _, row = where
    out = torch.zeros((capacity, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if x.dtype.itemsize == 1:  # no index operations on FP8
        return out.view(torch.uint8).index_copy(0, row, x.view(torch.uint8)[token]).view(x.dtype)
    return out.index_copy(0, row, x[token])


def permute_probs(
    probs: torch.Tensor, where: tuple[torch.Tensor, ...], capacity: int
) -> torch.Tensor:
    """probs [T, E] or [T, k] at the rows of their routes, zero elsewhere."""
    token, expert, row = where
    return probs.new_zeros(capacity).index_copy(0, row, probs[token, expert])


def unpermute(
    rows: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    num_tokens: int,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens as weighted sums of their rows, in the rows' dtype."""
    token, expert, row = where
    values = _wide(rows)[row]
    if weight is not None:
        values = values * _wide(weight)[token, expert][:, None]
    total = values.new_zeros(num_tokens, rows.shape[1]).index_add(0, token, values)
    return total.to(rows.dtype)


def unpermute_backward(
    grad: torch.Tensor,
    rows: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows, zero where no route leads, and of weight."""
    token, expert, row = where
    grads = _wide(grad)[token]
    grad_rows = torch.zeros_like(rows)
    grad_rows[row] = (grads * _wide(weight)[token, expert][:, None]).to(rows.dtype)
    grad_weight = torch.zeros_like(weight)
    grad_weight[token, expert] = (grads * _wide(rows)[row]).sum(1).to(weight.dtype)
    return grad_rows, grad_weight


def chunk_sources(split_sizes: torch.Tensor, order: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row of the input for each row of the output; -1 beyond the last chunk."""
    sizes, order = split_sizes.long(), order.long()
    starts = sizes.cumsum(0) - sizes
    moved = sizes[order]
    chunk = torch.repeat_interleave(torch.arange(order.numel(), device=order.device), moved)
    inside = torch.arange(chunk.numel(), device=order.device) - (moved.cumsum(0) - moved)[chunk]
    source = torch.full((num_rows,), -1, device=order.device)
    source[: chunk.numel()] = starts[order][chunk] + inside
    return source.int()
