# SPDX-License-Identifier: Apache-2.0
"""What an operator does on the device of its tensors.

Two executions of one contract: the torch reference where there is no CUDA, our kernels on Hopper.
"""

from __future__ import annotations

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

    from moe_backend.kernels import decode, schedule_quant
    from moe_backend.kernels import grouped_gemm as gg
    from moe_backend.kernels.quant_fp8 import quant_fp8, quant_permute
    from moe_backend.kernels.schedule import schedule
    from moe_backend.kernels.unpermute_reduce import unpermute_reduce

    if "gluon" in (config.up.kernel, config.down.kernel):
        from moe_backend.kernels import grouped_gemm_sm90 as gg_sm90

    pdl = config.pdl and not knobs.runtime.interpret
    x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    if shared_output is not None:
        shared_output = shared_output.contiguous()
    if expert_map is not None:
        expert_map = expert_map.to(torch.int32)
    out = torch.empty_like(x)
    if not topk_ids.numel():  # an idle rank's batch
        return out if shared_output is None else out.copy_(shared_output)
    clamp = {"alpha": activation.alpha, "limit": activation.limit}
    if config.direct:
        w13 = decode.Experts(weights.w13, weights.w13_scale, topk_ids, expert_map)
        w2 = decode.Experts(weights.w2, weights.w2_scale, topk_ids, expert_map)
        rows = decode.decode_up(x, w13, pdl=pdl, **clamp)
        return decode.decode_down(rows, w2, topk_weights, out, shared=shared_output, pdl=pdl)
    # A token's only row needs no reduction: the down projection writes it where it belongs.
    single = topk_ids.shape[1] == 1 and shared_output is None and not config.gather
    ordered = {"expert_map": expert_map, "pdl": pdl}
    absent = {"zero_absent": out if single else None, "pdl": pdl}
    ahead = None
    if not config.gather and topk_ids.numel() <= schedule_quant.MAX_ROUTES:
        plan, a, a_scale = schedule_quant.schedule_quant(
            x, topk_ids, weights.num_local_experts, config.align, expert_map=expert_map, **absent
        )
        ahead = gg.Ahead(topk_ids, expert_map)
    else:
        plan = schedule(topk_ids, weights.num_local_experts, config.align, **ordered)
        if config.gather:
            a, a_scale = quant_fp8(x, pdl=pdl, overlap=True)
        else:
            a, a_scale = quant_permute(x, plan.route_row, plan.num_rows, **absent)
    up = gg.Operands(a, a_scale, weights.w13, weights.w13_scale, config.gather)
    if config.up.kernel == "gluon":
        h, h_scale = gg_sm90.grouped_gemm_swiglu(up, plan, turns=config.up.turns, pdl=pdl, **clamp)
    else:
        h, h_scale = gg.grouped_gemm_swiglu(
            up, plan, _tiles(config.up), pdl=pdl, ahead=ahead, **clamp
        )
    down = gg.Operands(h, h_scale, weights.w2, weights.w2_scale)

    def project(first: int, rows: torch.Tensor, route_weights: torch.Tensor | None = None) -> None:
        where = {"first_column": first, "out": rows, "weights": route_weights, "pdl": pdl}
        if config.down.kernel == "gluon":
            gg_sm90.grouped_gemm(down, plan, turns=config.down.turns, **where)
        else:
            gg.grouped_gemm(down, plan, _tiles(config.down), **where)

    if single:
        project(0, out, topk_weights)
        return out
    hidden = weights.hidden
    step = _slab(config, plan.num_rows, hidden)
    buffer = torch.empty((plan.num_rows, step), dtype=torch.bfloat16, device=x.device)
    for first in range(0, hidden, step):
        rows = buffer if first + step <= hidden else buffer.new_empty(plan.num_rows, hidden - first)
        project(first, rows)
        unpermute_reduce(
            rows, plan.route_row, topk_weights, out,
            first_column=first, shared=shared_output, pdl=pdl,
        )  # fmt: skip
    return out


_ROWS_BYTES = 4 << 30  # bound of the partial rows' buffer


def _slab(config: KernelConfig, num_rows: int, hidden: int) -> int:
    """Columns of the down projection computed at a time: as configured, within the bound."""
    fits = max(256, _ROWS_BYTES // (2 * max(num_rows, 1)) // 256 * 256)
    return min(config.slab or hidden, fits, hidden)


def _tiles(gemm: GemmConfig):
    from moe_backend.kernels.grouped_gemm import Tiles

    return Tiles(gemm.block_n, gemm.num_warps, gemm.num_stages, gemm.swap, gemm.unroll, gemm.span)
