# SPDX-License-Identifier: Apache-2.0
"""The training family as torch operators: our kernels on CUDA, the torch reference elsewhere.

Opaque to torch.compile and capturable by CUDA graphs; gradients are functional's business. An
output that was not asked for is a tensor of no elements. Sizes are checked in functional.
"""

from __future__ import annotations

import torch

from moe_backend import reference_training as reference
from moe_backend.ops import operator
from moe_backend.types import RouterSpec

_SPEC = "int top_k, str score, bool pre_softmax, int num_groups, int top_groups, float scale"


def on_kernels(tensor: torch.Tensor) -> bool:
    """Whether a tensor's device runs our kernels."""
    return tensor.is_cuda


def eager() -> bool:
    """Whether an operator's body may be called in its place, half of whose cost is dispatch.

    Not while torch.compile traces or a mode (fake tensors, functionalisation) wants to see it.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def _none(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0)


def present(*tensors: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_none(like) if t is None else t for t in tensors)


def _spec(top_k, score, pre_softmax, num_groups, top_groups, scale) -> RouterSpec:
    return RouterSpec(top_k, score, num_groups, top_groups, 0, False, scale)


def _dense_spec(top_k, score, pre_softmax, num_groups, top_groups, scale):
    from moe_backend.kernels.router_dense import DenseSpec

    candidates = max(1, top_k // top_groups)
    return DenseSpec(top_k, score, pre_softmax, num_groups, top_groups, candidates, scale)


@operator(
    "router_dense(Tensor logits, Tensor? bias, Tensor(a!)? indices, bool want_map, bool want_bits, "
    f"{_SPEC}) -> (Tensor probs, Tensor map, Tensor bits)"
)
def router_dense(logits, bias, indices, want_map, want_bits, *spec):
    if on_kernels(logits):
        from moe_backend.kernels import router_dense as kernels

        out = kernels.router_dense(
            logits, _dense_spec(*spec), bias, want_map=want_map, want_bits=want_bits,
            indices=indices,
        )  # fmt: skip
        return present(*out, like=logits)
    probs, chosen = reference.router_dense(logits, _spec(*spec), spec[2], bias)
    if indices is not None and indices.numel():
        indices.copy_(chosen.nonzero()[:, 1].view_as(indices))
    bits = reference.pack_bits(chosen) if want_bits else None
    return present(probs, chosen if want_map else None, bits, like=logits)


@torch.library.register_fake("moe_backend::router_dense")
def _(logits, bias, indices, want_map, want_bits, *spec):
    rows, experts = logits.shape
    routing_map = logits.new_empty((rows, experts), dtype=torch.bool) if want_map else None
    bits = logits.new_empty((rows, (experts + 7) // 8), dtype=torch.uint8) if want_bits else None
    probs = logits.new_empty((rows, experts))
    return present(probs, routing_map, bits, like=logits)


@operator(f"router_dense_backward(Tensor grad, Tensor logits, Tensor map, {_SPEC}) -> Tensor")
def router_dense_backward(grad, logits, routing_map, *spec):
    if on_kernels(logits):
        from moe_backend.kernels import router_dense as kernels

        return kernels.router_dense_backward(grad, logits, routing_map, _dense_spec(*spec))
    if routing_map.dtype is torch.uint8:
        routing_map = reference.unpack_bits(routing_map, logits.shape[1])
    spec_ = _spec(*spec)
    return reference.router_dense_backward(grad, logits, routing_map, spec_, spec[2]).contiguous()


@torch.library.register_fake("moe_backend::router_dense_backward")
def _(grad, logits, routing_map, *spec):
    return logits.new_empty(logits.shape)


@operator(
    "router_scores(Tensor logits, int top_k, str score, bool bits) -> (Tensor scores, Tensor map)"
)
def router_scores(logits, top_k, score, bits):
    if on_kernels(logits):
        from moe_backend.kernels import router_scores as kernels

        return kernels.router_scores(logits, top_k, score, bits=bits)
    scores, chosen = reference.router_scores(logits, top_k, score)
    return scores, reference.pack_bits(chosen) if bits else chosen


@torch.library.register_fake("moe_backend::router_scores")
def _(logits, top_k, score, bits):
    rows, experts = logits.shape
    columns, dtype = ((experts + 7) // 8, torch.uint8) if bits else (experts, torch.bool)
    scores = logits.new_empty((rows, experts), dtype=torch.float32)
    return scores, logits.new_empty((rows, columns), dtype=dtype)


@operator("router_scores_backward(Tensor grad, Tensor logits, int top_k, str score) -> Tensor")
def router_scores_backward(grad, logits, top_k, score):
    if on_kernels(logits):
        from moe_backend.kernels import router_scores as kernels

        return kernels.router_scores_backward(grad, logits, top_k, score)
    return reference.router_scores_backward(grad, logits, top_k, score).contiguous()


@torch.library.register_fake("moe_backend::router_scores_backward")
def _(grad, logits, top_k, score):
    return logits.new_empty(logits.shape)


@operator(
    "aux_loss(Tensor probs, Tensor tokens_per_expert, Tensor? total, float tokens, float factor) "
    "-> Tensor"
)
def aux_loss(probs, tokens_per_expert, total, tokens, factor):
    """[loss, coefficient] in fp32; ``total`` on the device stands in for ``tokens``."""
    count = tokens if total is None else total
    if on_kernels(probs):
        from moe_backend.kernels import aux_loss as kernels

        return kernels.aux_loss(probs, tokens_per_expert, count, factor)
    loss = reference.aux_loss(probs, tokens_per_expert, count, factor)
    coefficient = torch.as_tensor(factor / count / count, dtype=torch.float32)
    return torch.stack([loss.float(), coefficient.to(loss.device)])


@torch.library.register_fake("moe_backend::aux_loss")
def _(probs, tokens_per_expert, total, tokens, factor):
    return probs.new_empty(2, dtype=torch.float32)


@operator(
    "aux_loss_backward(Tensor grad, Tensor state, Tensor tokens_per_expert, Tensor like) -> Tensor"
)
def aux_loss_backward(grad, state, tokens_per_expert, like):
    if on_kernels(like):
        from moe_backend.kernels import aux_loss as kernels

        return kernels.aux_loss_backward(grad, state, tokens_per_expert, like)
    row = tokens_per_expert.float() * (grad * state[1])
    return row.to(like.dtype).expand(like.shape).contiguous()


@torch.library.register_fake("moe_backend::aux_loss_backward")
def _(grad, state, tokens_per_expert, like):
    return like.new_empty(like.shape)
