# SPDX-License-Identifier: Apache-2.0
"""From the engine's router to ours: what is expressed, and what is left to the engine."""

from types import SimpleNamespace

import pytest
import torch

from moe_backend import RouterSpec
from moe_backend.vllm_plugin import routing


def layer(**changes):
    fields = {
        "global_num_experts": 64,
        "top_k": 6,
        "renormalize": True,
        "use_grouped_topk": False,
        "num_expert_group": None,
        "topk_group": None,
        "custom_routing_function": None,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "e_score_correction_bias": None,
        "moe_config": SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=False)),
    }
    return SimpleNamespace(**{**fields, **changes})


def router(kind="FusedTopKRouter", **attributes):
    return type(kind, (), attributes)()


BIAS = torch.zeros(64)
GROUPS = {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
ONE_GROUP = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    "changes, spec",
    [
        ({}, RouterSpec(6, renormalize=True, group_candidates=1)),  # Qwen3, Mixtral
        (
            {**GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS},
            RouterSpec(6, "sigmoid", 8, 4, 2, True),  # DeepSeek-V3
        ),
        (
            {**GROUPS, "renormalize": False, "routed_scaling_factor": 16.0},
            RouterSpec(6, "softmax", 8, 4, 1, False, 16.0),  # DeepSeek-V2
        ),
        (
            {**ONE_GROUP, "renormalize": False, "routed_scaling_factor": 16.0},
            RouterSpec(6, group_candidates=1, scale=16.0),  # DeepSeek-V2-Lite
        ),
        (
            {
                **ONE_GROUP,
                "scoring_func": "sigmoid",
                "e_score_correction_bias": BIAS,
                "routed_scaling_factor": 2.5,
            },
            RouterSpec(6, "sigmoid", group_candidates=2, renormalize=True, scale=2.5),  # Kimi, GLM
        ),
        (
            {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": BIAS},
            RouterSpec(6, "sqrtsoftplus", group_candidates=2, renormalize=True),
        ),
    ],
)
def test_known_models_route_in_our_kernel(changes, spec):
    assert routing.plan(layer(**changes), router()).spec == spec


@pytest.mark.parametrize(
    "changes, engine_router, reason",
    [
        ({"custom_routing_function": print}, router(), "function of its own"),
        ({}, None, "could not be inspected"),
        ({}, router("ZeroExpertRouter"), "the engine's ZeroExpertRouter"),
        ({}, router("FusedTopKBiasRouter", _hash_indices_table=BIAS), "hash routing"),
        ({}, router("FusedTopKBiasRouter", bias_vl=BIAS), "token's kind"),
        ({}, router("FusedTopKBiasRouter", num_fused_shared_experts=1), "fused into"),
        ({"routed_scaling_factor": 2.5}, router(), "scaling factor on ungrouped"),
        ({**GROUPS, "num_expert_group": 7, "scoring_func": "sigmoid"}, router(), "not divide"),
        ({"scoring_func": "tanh"}, router(), "score: expected one of"),
        ({"top_k": 65}, router(), "top_k: expected at most 64"),
    ],
)
def test_the_rest_stays_the_engines(changes, engine_router, reason):
    found = routing.plan(layer(**changes), engine_router)
    assert found.spec is None and reason in found.reason


def test_wishes_of_the_engine_come_first():
    assert "=uniform" in routing.plan(layer(), router(), simulated="uniform").reason
    assert "records them" in routing.plan(layer(), router(), captured=True).reason
    parallel = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=True))
    assert "EPLB" in routing.plan(layer(moe_config=parallel), router()).reason
