# SPDX-License-Identifier: Apache-2.0
"""Random layers for tests, with magnitudes like a trained model's."""

import torch

from moe_backend import ExpertWeights, Routing
from moe_backend.types import FP8, cdiv


def expert_weights(experts=4, hidden=256, intermediate=128, device="cpu", seed=0) -> ExpertWeights:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def scale(*shape):
        return torch.rand(*shape, generator=generator, device=device) * 0.02 + 0.01

    i_blocks, h_blocks = cdiv(intermediate, 128), cdiv(hidden, 128)
    return ExpertWeights(
        random(experts, 2 * intermediate, hidden).to(FP8),
        scale(experts, 2 * i_blocks, h_blocks),
        random(experts, hidden, intermediate).to(FP8),
        scale(experts, h_blocks, i_blocks),
    )


def routing(num_tokens, num_experts, top_k, device="cpu", seed=0) -> Routing:
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    weights = torch.rand(num_tokens, top_k, generator=generator, device=device)
    return Routing(noise.topk(top_k).indices.int(), weights / weights.sum(-1, True), num_experts)


def relative_error(out: torch.Tensor, oracle: torch.Tensor) -> float:
    """‖out − oracle‖ / ‖oracle‖; NaN and infinity never pass a bound."""
    difference = (out.double() - oracle.double()).norm()
    return float(difference / oracle.double().norm().clamp_min(1e-30))
