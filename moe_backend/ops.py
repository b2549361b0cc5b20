# SPDX-License-Identifier: Apache-2.0
"""The layer as torch operators, opaque to torch.compile and capturable by CUDA graphs.

Defined through torch.library.Library rather than custom_op: a decode step calls one per layer, and
custom_op's Python wrapper alone costs more than routing a token.
"""

from __future__ import annotations

import torch

from moe_backend import execution
from moe_backend.types import Activation, ExpertWeights, RouterSpec

_WEIGHTS = "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale"
_SPEC = (
    "int top_k, str score, int num_groups, int top_groups, int group_candidates, "
    "bool renormalize, float scale"
)
_library = torch.library.Library("moe_backend", "FRAGMENT")


def operator(schema: str):
    """Defines ``moe_backend::<schema>`` with the decorated function as body on every device."""

    def register(body):
        _library.define(schema)
        _library.impl(body.__name__, body, "CompositeExplicitAutograd")
        return body

    return register


@operator(
    f"router_topk(Tensor logits, Tensor? bias, {_SPEC}) "
    "-> (Tensor ids, Tensor weights, Tensor counts)"
)
def router_topk(logits, bias, *spec):
    return execution.route(logits, bias, RouterSpec(*spec))


@torch.library.register_fake("moe_backend::router_topk")
def _(logits, bias, top_k, *spec):
    shape = (logits.shape[0], top_k)
    return (
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(logits.shape[1], dtype=torch.int32),
    )


@operator(
    f"fused_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, {_WEIGHTS}, "
    "Tensor? expert_map, Tensor? shared_output, float alpha, float? limit) -> Tensor"
)
def fused_experts(
    x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, expert_map, shared_output, alpha, limit
):
    weights = ExpertWeights(w13, w13_scale, w2, w2_scale)
    activation = Activation(alpha, limit)
    return execution.experts(
        x, topk_ids, topk_weights, weights, activation, expert_map, shared_output
    )


@operator(
    f"moe_layer(Tensor x, Tensor logits, Tensor? bias, {_WEIGHTS}, Tensor? expert_map, "
    f"{_SPEC}, float alpha, float? limit) -> Tensor"
)
def moe_layer(x, logits, bias, w13, w13_scale, w2, w2_scale, expert_map, *rest):
    *spec, alpha, limit = rest
    ids, topk_weights, _ = execution.route(logits, bias, RouterSpec(*spec), want_counts=False)
    weights = ExpertWeights(w13, w13_scale, w2, w2_scale)
    activation = Activation(alpha, limit)
    return execution.experts(x, ids, topk_weights, weights, activation, expert_map, None)


@torch.library.register_fake("moe_backend::fused_experts")
def _(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("moe_backend::moe_layer")
def _(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def flat(spec: RouterSpec) -> tuple:
    """A RouterSpec as the scalars of _SPEC, which stand in the dataclass's order."""
    return (
        spec.top_k,
        spec.score,
        spec.num_groups,
        spec.top_groups,
        spec.group_candidates,
        spec.renormalize,
        spec.scale,
    )
