# SPDX-License-Identifier: Apache-2.0
"""From the engine's description of a router to ours, or the reason to leave routing to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_backend import support
from moe_backend.types import RouterSpec

# The engine's routers whose selection RouterSpec expresses; its CPU router is all of them.
KNOWN_ROUTERS = ("GroupedTopKRouter", "FusedTopKRouter", "FusedTopKBiasRouter", "CPURouter")


class RoutingPlan(NamedTuple):
    """``spec`` when the layer routes by itself, else None and why the engine routes."""

    spec: RouterSpec | None
    reason: str


def engine_routes(reason: str) -> RoutingPlan:
    return RoutingPlan(None, reason)


def plan(layer: Any, router: Any | None, *, simulated: str = "", captured: bool = False):
    """Decides who selects the experts of ``layer``.

    Args:
        layer: the engine's RoutedExperts.
        router: the engine's router object of that layer, None when it could not be found.
        simulated: the engine's routing simulation strategy, "" when routing is real.
        captured: the engine was asked to return the experts of every token.
    """
    if simulated:
        return engine_routes(f"VLLM_MOE_ROUTING_SIMULATION_STRATEGY={simulated}")
    if captured:
        return engine_routes("routed experts are returned to the client, the engine records them")
    if layer.moe_config.moe_parallel_config.enable_eplb:
        return engine_routes("EPLB maps experts to their copies and counts the load")
    special = _special(layer, router)
    return engine_routes(special) if special else _own(layer)


def _special(layer: Any, router: Any | None) -> str:
    """What about this router our specification does not say; empty when nothing."""
    if layer.custom_routing_function is not None:
        return "the model has a routing function of its own"
    if router is None:
        return "the engine's router could not be inspected"
    kind = type(router).__name__
    if kind not in KNOWN_ROUTERS:
        return f"the model uses the engine's {kind}"
    if getattr(router, "_hash_indices_table", None) is not None:
        return "experts are selected by token id (hash routing)"
    if getattr(router, "bias_vl", None) is not None:
        return "the selection bias depends on the token's kind"
    if getattr(router, "num_fused_shared_experts", 0):
        return "shared experts are fused into the routed ones"
    return ""


def _own(layer: Any) -> RoutingPlan:
    bias = layer.e_score_correction_bias is not None
    experts, groups = layer.global_num_experts, layer.num_expert_group or 1
    # The engine's grouped router steps aside where groups do not divide the experts properly.
    grouping = bool(layer.use_grouped_topk) and groups < experts and experts % groups == 0
    grouped = grouping and groups > 1
    if not grouping and not bias and float(layer.routed_scaling_factor) != 1.0:
        return engine_routes("a scaling factor on ungrouped routing without bias")
    if not grouping and not bias and layer.use_grouped_topk and layer.scoring_func != "softmax":
        return engine_routes("grouping that does not divide the experts")
    try:
        spec = RouterSpec(
            top_k=layer.top_k,
            score=layer.scoring_func,
            num_groups=groups if grouped else 1,
            top_groups=layer.topk_group if grouped else 1,
            group_candidates=2 if bias else 1,
            renormalize=bool(layer.renormalize),
            scale=float(layer.routed_scaling_factor),
        )
    except ValueError as error:
        return engine_routes(str(error))
    answer = support.supports_routing(spec, experts)
    return RoutingPlan(spec, _words(spec, bias)) if answer.ok else engine_routes(answer.reason)


def _words(spec: RouterSpec, bias: bool) -> str:
    groups = f", {spec.top_groups} of {spec.num_groups} groups" if spec.num_groups > 1 else ""
    extras = f"{' + bias' if bias else ''}{groups}{', renormalised' if spec.renormalize else ''}"
    return f"{spec.score}{extras}, top {spec.top_k}"
