# SPDX-License-Identifier: Apache-2.0
"""What an operator does on the device of its tensors.

Two executions of one contract: the torch reference where there is no CUDA, our kernels on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_backend import reference
from moe_backend.types import Activation, ExpertWeights, GemmConfig, KernelConfig, RouterSpec


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, *, want_counts: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids, weights and, if wanted, tokens per expert; see reference.router_topk."""
    if not logits.is_cuda:
        return reference.router_topk(logits, spec, bias)
    from moe_backend.kernels.router_topk import router_topk

    return router_topk(logits, spec, bias, want_counts=want_counts)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    expert_map: torch.Tensor | None,
    shared_output: torch.Tensor | None,
) -> torch.Tensor:
    """The routed experts of a layer; see reference.fused_experts."""
    if not x.is_cuda:
        return reference.fused_experts(
            x, topk_ids, topk_weights, weights, activation, expert_map, shared_output
        )
    from moe_backend.tuning import selection

    num_experts = weights.num_local_experts if expert_map is None else expert_map.numel()
    shape = selection.shape_of(weights, topk_ids.shape[1], num_experts)
    config = selection.serving_config(shape, x.shape[0], x.device)
    return run_experts(
        x, topk_ids, topk_weights, weights, activation, expert_map, shared_output, config
    )


@dataclass(frozen=True)
class _Layer:
    """One call of a layer's experts: contiguous inputs, output, configuration."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    weights: ExpertWeights
    activation: Activation
    expert_map: torch.Tensor | None
    shared: torch.Tensor | None
    config: KernelConfig
    out: torch.Tensor
    pdl: bool

    @property
    def clamp(self) -> dict:
        return {"alpha": self.activation.alpha, "limit": self.activation.limit}

    @property
    def single(self) -> bool:
        """A token's only row needs no reduction: the down projection writes it where it belongs."""
        return self.topk_ids.shape[1] == 1 and self.shared is None and not self.config.gather


def run_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    expert_map: torch.Tensor | None,
    shared_output: torch.Tensor | None,
    config: KernelConfig,
) -> torch.Tensor:
    """The layer on our kernels with a given configuration (also in Triton's interpreter)."""
    from triton import knobs

    x = x.contiguous()
    shared = None if shared_output is None else shared_output.contiguous()
    out = torch.empty_like(x)
    if not topk_ids.numel():  # an idle rank's batch
        return out if shared is None else out.copy_(shared)
    layer = _Layer(
        x, topk_ids.contiguous(), topk_weights.contiguous(), weights, activation,
        None if expert_map is None else expert_map.to(torch.int32), shared, config, out,
        config.pdl and not knobs.runtime.interpret,
    )  # fmt: skip
    if config.direct:
        return _direct(layer)
    plan, up, ahead = _order(layer)
    _down(layer, plan, _up(layer, plan, up, ahead))
    return out


def _direct(layer: _Layer) -> torch.Tensor:
    """A handful of tokens: nothing is ordered."""
    from moe_backend.kernels import decode

    weights, ids, pdl = layer.weights, layer.topk_ids, layer.pdl
    w13 = decode.Experts(weights.w13, weights.w13_scale, ids, layer.expert_map)
    w2 = decode.Experts(weights.w2, weights.w2_scale, ids, layer.expert_map)
    rows = decode.decode_up(layer.x, w13, pdl=pdl, **layer.clamp)
    return decode.decode_down(rows, w2, layer.topk_weights, layer.out, shared=layer.shared, pdl=pdl)


def _order(layer: _Layer):
    """Where rows go, and the quantised activations in that order (or by token, to be gathered)."""
    from moe_backend.kernels.grouped_gemm import Ahead, Operands
    from moe_backend.kernels.quant_fp8 import quant_fp8, quant_permute
    from moe_backend.kernels.schedule import schedule
    from moe_backend.kernels.schedule_quant import MAX_ROUTES, schedule_quant

    x, ids, gather = layer.x, layer.topk_ids, layer.config.gather
    experts, align = layer.weights.num_local_experts, layer.config.align
    ordered = {"expert_map": layer.expert_map, "pdl": layer.pdl}
    absent = {"zero_absent": layer.out if layer.single else None}
    ahead = None
    if not gather and ids.numel() <= MAX_ROUTES:
        plan, a, a_scale = schedule_quant(x, ids, experts, align, **ordered, **absent)
        ahead = Ahead(ids, layer.expert_map)
    else:
        plan = schedule(ids, experts, align, **ordered)
        if gather:
            a, a_scale = quant_fp8(x, pdl=layer.pdl, overlap=True)
        else:
            a, a_scale = quant_permute(x, plan.route_row, plan.num_rows, pdl=layer.pdl, **absent)
    return plan, Operands(a, a_scale, layer.weights.w13, layer.weights.w13_scale, gather), ahead


def _up(layer: _Layer, plan, a, ahead):
    """The up projection, SwiGLU and quantisation: the down projection's operands."""
    from moe_backend.kernels import grouped_gemm as gg

    config, options = layer.config.up, {"pdl": layer.pdl, **layer.clamp}
    if config.kernel == "gluon":
        from moe_backend.kernels import grouped_gemm_sm90 as gg_sm90

        h = gg_sm90.grouped_gemm_swiglu(a, plan, turns=config.turns, **options)
    else:
        h = gg.grouped_gemm_swiglu(a, plan, _tiles(config), ahead=ahead, **options)
    return gg.Operands(*h, layer.weights.w2, layer.weights.w2_scale)


def _down(layer: _Layer, plan, h) -> None:
    """The down projection and the weighted sum of every token's rows, into ``layer.out``."""
    from moe_backend.kernels.unpermute_reduce import unpermute_reduce

    if layer.single:
        _project(layer, plan, h, out=layer.out, weights=layer.topk_weights)
        return
    hidden = layer.weights.hidden
    step = _slab(layer.config, plan.num_rows, hidden)
    buffer = layer.x.new_empty((plan.num_rows, step), dtype=torch.bfloat16)
    for first in range(0, hidden, step):
        rows = buffer if first + step <= hidden else buffer.new_empty(plan.num_rows, hidden - first)
        _project(layer, plan, h, out=rows, first_column=first)
        unpermute_reduce(
            rows, plan.route_row, layer.topk_weights, layer.out,
            first_column=first, shared=layer.shared, pdl=layer.pdl,
        )  # fmt: skip


def _project(layer: _Layer, plan, h, **where) -> None:
    config = layer.config.down
    if config.kernel == "gluon":
        from moe_backend.kernels import grouped_gemm_sm90 as gg_sm90

        gg_sm90.grouped_gemm(h, plan, turns=config.turns, pdl=layer.pdl, **where)
    else:
        from moe_backend.kernels import grouped_gemm as gg

        gg.grouped_gemm(h, plan, _tiles(config), pdl=layer.pdl, **where)


_ROWS_BYTES = 4 << 30  # bound of the partial rows' buffer


def _slab(config: KernelConfig, num_rows: int, hidden: int) -> int:
    """Columns of the down projection computed at a time: as configured, within the bound."""
    fits = max(256, _ROWS_BYTES // (2 * max(num_rows, 1)) // 256 * 256)
    return min(config.slab or hidden, fits, hidden)


def _tiles(gemm: GemmConfig):
    from moe_backend.kernels.grouped_gemm import Tiles

    return Tiles(gemm.block_n, gemm.num_warps, gemm.num_stages, gemm.swap, gemm.unroll, gemm.span)
