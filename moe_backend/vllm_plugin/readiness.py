# SPDX-License-Identifier: Apache-2.0
"""Before the server is ready: compile what any batch can select, and prove the layer with it.

CUDA only; on a CPU the reference runs, which has nothing to compile and nothing to be proved
against. Done for the first layer of each size; a reload does not repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_backend import pipeline, reference
from moe_backend.types import Activation, ExpertWeights, KernelConfig, MoEShape, RouterSpec
from moe_backend.vllm_plugin.checks import Refused

SAMPLED_ROWS = 4  # of each batch; the oracle dequantises every expert that they meet
# An oracle that rounds where the kernels round differs by the bf16 output (1.7e-3) and by FP8
# codes that flip where sums are ordered differently; a wrong scale or a lost block is above 1e-1.
TOLERANCE = 2e-2

_ready: set[tuple[MoEShape, RouterSpec, Activation]] = set()


@dataclass(frozen=True)
class Subject:
    """A layer with everything that its output depends on."""

    name: str
    weights: ExpertWeights
    shape: MoEShape
    spec: RouterSpec
    activation: Activation
    bias: torch.Tensor | None
    expert_map: torch.Tensor | None
    max_tokens: int

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return pipeline.moe_layer(
            x,
            logits,
            self.weights,
            self.spec,
            bias=self.bias,
            activation=self.activation,
            expert_map=self.expert_map,
        )

    def oracle(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids, weights, _ = reference.router_topk(logits, self.spec, self.bias)
        return reference.fused_experts(
            x, ids, weights, self.weights, self.activation, self.expert_map
        )

    def batch(self, tokens: int, draw: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.weights.w13.device
        generator = torch.Generator(device).manual_seed(2 * tokens + draw)
        x = torch.randn(tokens, self.shape.hidden, generator=generator, device=device)
        logits = torch.randn(tokens, self.shape.num_experts, generator=generator, device=device)
        return x.bfloat16(), logits


def token_counts(choose: Callable[[int], Any], most: int) -> list[int]:
    """Batch sizes that between them reach every configuration ``choose`` gives up to ``most``.

    Compiled code also differs by what an integer argument divides by, so each configuration is
    met at its smallest and largest size, at an odd one and at a multiple of 16.
    """
    sizes = [*range(1, min(most, 512) + 1), *range(528, most + 1, 16), most]
    by_config: dict[Any, list[int]] = {}
    for size in sizes:
        by_config.setdefault(choose(size), []).append(size)
    wanted = {1, most}
    for found in by_config.values():
        wanted |= {found[0], found[-1]}
        wanted |= set([n for n in found if n % 2][-1:]) | set(
            [n for n in found if n % 16 == 0][-1:]
        )
    return sorted(wanted)


def make_ready(subject: Subject) -> None:
    """Compiles and checks a layer at every size; raises Refused when its output is wrong."""
    key = (subject.shape, subject.spec, subject.activation)
    if key in _ready:
        return
    from moe_backend.tuning import selection

    device = subject.weights.w13.device

    def choose(tokens: int) -> KernelConfig:
        return selection.serving_config(subject.shape, tokens, device)

    with torch.inference_mode():
        for tokens in token_counts(choose, subject.max_tokens):
            self_test(subject, tokens)
    torch.cuda.empty_cache()
    _ready.add(key)


def self_test(subject: Subject, tokens: int) -> None:
    """One batch on the layer's own weights; rows from end to end are compared.

    A second draw decides when the first differs: two experts may score alike to the last bit, and
    then the oracle may take the other one. What is wrong is wrong twice.
    """
    errors = [_error(subject, tokens, 0)]
    if errors[0] > TOLERANCE:
        errors.append(_error(subject, tokens, 1))
    if min(errors) > TOLERANCE:
        device = subject.weights.w13.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise Refused(
            f"--quantization tma_fp8, layer {subject.name}: the self-test at {tokens} tokens on "
            f"{where} differs from the reference by {min(errors):.2e} (allowed "
            f"{TOLERANCE:g}). Tuned files of your own in MOE_BACKEND_CONFIG_DIR may be the cause; "
            "otherwise report it with the output of `moe-backend doctor`. "
            "Start without --quantization tma_fp8."
        )


def _error(subject: Subject, tokens: int, draw: int) -> float:
    """Relative error of sampled rows; 0 where there is nothing to compare with."""
    x, logits = subject.batch(tokens, draw)
    out = subject.run(x, logits)
    # in integers: an engine that loads a model has bf16 for its default dtype
    steps = torch.arange(SAMPLED_ROWS, device=x.device) * (tokens - 1)
    rows = (steps // (SAMPLED_ROWS - 1)).unique()
    wanted = subject.oracle(x[rows], logits[rows]).float()
    if not bool(wanted.isfinite().all()) or not float(wanted.norm()):
        return 0.0  # dummy weights may hold anything
    error = float((out[rows].float() - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def chosen(shape: MoEShape, max_tokens: int, device: torch.device) -> dict[str, Any]:
    """For status: what a decode step, a small and the largest batch run with, and why."""
    from moe_backend.tuning import selection

    found = {}
    for tokens in sorted({1, min(128, max_tokens), max_tokens}):
        took = selection.select(shape, tokens, device)
        found[str(tokens)] = {"source": took.source, "reason": took.reason, **asdict(took.config)}
    return found
