# SPDX-License-Identifier: Apache-2.0
"""Gradients of permutations: the inverse permutation, by the same operators."""

from __future__ import annotations

import torch

from moe_backend import ops_permute, ops_training
from moe_backend.types import FP8


def operators():
    """The operators, or their bodies where nothing has to see the operators."""
    return ops_permute if ops_training.eager() else torch.ops.moe_backend


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, scale, routing_map, num_experts, align, capacity):
        """``num_experts`` is 0 for a mask, whose columns say it."""
        if num_experts:
            row_map, offsets, pads, targets = operators().row_map(routing_map, num_experts, align)
            out = operators().permute_rows(
                x, row_map, num_experts, capacity, offsets, None, scale, probs
            )
        else:
            *out, row_map, pads, targets = operators().permute_mask(
                x, routing_map, align, capacity, scale, probs
            )
        ctx.save_for_backward(row_map, pads)
        ctx.num_experts, ctx.probs = num_experts or routing_map.shape[1], probs is not None
        fixed = (out[1], row_map, pads, targets)
        ctx.mark_non_differentiable(*fixed, *([out[0]] if x.dtype is FP8 else []))
        ctx.set_materialize_grads(False)
        return *out, row_map, pads, targets

    @staticmethod
    def backward(ctx, grad, _, grad_probs, *fixed):
        row_map, pad_offsets = ctx.saved_tensors
        moved = grad_probs if ctx.probs else None
        if grad is not None:
            rows = grad
        elif moved is not None:
            rows = moved.new_empty(moved.shape[0], 0)  # FP8 rows have no gradient
        else:
            return (None,) * 7
        grad_x, grad_probs = operators().unpermute_rows(
            rows, row_map, ctx.num_experts, None, pad_offsets, moved
        )
        grad_x = None if grad is None else grad_x
        return grad_x, None if moved is None else grad_probs, *([None] * 5)


class Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, row_map, pad_offsets, num_experts):
        out, _ = operators().unpermute_rows(rows, row_map, num_experts, weight, pad_offsets, None)
        ctx.save_for_backward(None if weight is None else rows, weight, row_map, pad_offsets)
        ctx.num_experts, ctx.capacity = num_experts, rows.shape[0]
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weight, row_map, pads = ctx.saved_tensors
        if weight is None:
            grad_rows, _, _ = operators().permute_rows(
                grad, row_map, ctx.num_experts, ctx.capacity, None, pads, None, None
            )
            return grad_rows, None, None, None, None
        grads = operators().unpermute_rows_backward(
            grad, rows, row_map, ctx.num_experts, weight, pads
        )
        return (*grads, None, None, None)


class SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, probs, source):
        out, out_probs = operators().sort_chunks(inp, source, probs, False)
        ctx.save_for_backward(source)
        ctx.probs = probs is not None
        if inp.dtype is FP8:
            ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)
        return out, out_probs

    @staticmethod
    def backward(ctx, grad, grad_probs):
        (source,) = ctx.saved_tensors
        moved = grad_probs if ctx.probs else None
        if grad is not None:
            rows = grad
        elif moved is not None:
            rows = moved.unsqueeze(1)  # FP8 rows have no gradient
        else:
            return None, None, None
        grad_inp, grad_probs = operators().sort_chunks(
            rows, source, None if grad is None else moved, True
        )
        if grad is None:
            return None, grad_inp.squeeze(1), None
        return grad_inp, None if moved is None else grad_probs, None
