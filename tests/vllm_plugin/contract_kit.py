# SPDX-License-Identifier: Apache-2.0
"""What the checks share: their register, inputs and the oracle."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
from contract_engine import Case, checkpoint

from moe_backend import Activation, RouterSpec, reference

CHECKS = {}
TOLERANCE = 8e-3  # two roundings to bf16 (the engine scales in place), 2 ** -8 each


def check(function):
    CHECKS[function.__name__] = function
    return function


def refusal(build, *args, **kwargs) -> str:
    try:
        build(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@contextmanager
def environment(**values: str):
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def inputs(case: Case, tokens: int = 9, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, case.hidden_size, generator=generator).bfloat16()
    logits = torch.randn(tokens, case.num_experts, generator=generator)
    return x, logits


def oracle(case: Case, x, logits, bias=None, candidates=None, scale=None):
    spec = RouterSpec(
        case.top_k,
        case.scoring_func,
        case.num_expert_group or 1,
        case.topk_group or 1,
        candidates,
        case.renormalize,
        case.routed_scaling_factor if scale is None else scale,
    )
    ids, weights, _ = reference.router_topk(logits, spec, bias)
    return reference.fused_experts(x, ids, weights, checkpoint(case), Activation())


def assert_close(out, wanted) -> None:
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    assert error <= TOLERANCE, f"relative error {error:.2e} > {TOLERANCE}"
