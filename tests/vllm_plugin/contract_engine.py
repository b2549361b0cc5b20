# SPDX-License-Identifier: Apache-2.0
"""A real vLLM MoE layer around the plugin's method, for one process and any supported version.

Runs inside the contract subprocess, where vLLM may be a bare source tree without compiled code.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import vllm.model_executor.layers.fused_moe.layer as engine_layer
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from moe_backend import ExpertWeights
from moe_backend.types import FP8
from moe_backend.vllm_plugin.entry import TmaFp8Entry

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
make_runner = getattr(engine_layer, "FusedMoEFactory", None) or engine_layer.FusedMoE


@dataclass(frozen=True)
class Case:
    """A layer's arguments; the fields are the engine's names."""

    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 256
    intermediate_size: int = 128
    renormalize: bool = True
    scoring_func: str = "softmax"
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    apply_routed_scale_to_output: bool = False


DEEPSEEK_V3 = Case(
    scoring_func="sigmoid",
    use_grouped_topk=True,
    num_expert_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    apply_routed_scale_to_output=True,
)


class Engine:
    """Owns the process group and the configuration the engine's layers are built under."""

    def __init__(self, store: str) -> None:
        self.config = VllmConfig()
        self.count = 0
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel()

    def quant_config(self, **changes):
        return TmaFp8Entry.from_config({**BLOCKS, **changes})

    def build(self, case: Case, *, bias=None, ep=None, dp=1, **more):
        """A runner with loaded weights; ``ep`` pretends (size, rank) of expert parallelism."""
        runner = self.bare(case, bias=bias, ep=ep, dp=dp, **more)
        layer = runner.routed_experts
        load(layer, checkpoint(case))
        layer.quant_method.process_weights_after_loading(layer)
        return runner

    def bare(self, case: Case, *, bias=None, ep=None, dp=1, quant_config=None, **more):
        self.count += 1
        prefix = f"model.layers.{self.count}.mlp.experts"
        eplb = more.get("enable_eplb", False)
        with set_current_vllm_config(self.config), pretended(ep, eplb, dp):
            return make_runner(
                **{**case.__dict__, **more},
                e_score_correction_bias=bias,
                quant_config=quant_config or self.quant_config(),
                params_dtype=torch.bfloat16,
                prefix=prefix,
            )

    def run(self, runner, x, logits):
        with set_forward_context(None, self.config, num_tokens=x.shape[0]):
            return runner(x, logits)


@contextmanager
def pretended(ep, eplb=False, dp=1):
    """Builds layers as rank ep[1] of ep[0] expert-parallel ranks would, in one process."""
    if ep is None:
        yield
        return
    original = FusedMoEParallelConfig.make

    def make(*args, **kwargs):
        found = original(*args, **kwargs)
        ranks = {"ep_size": ep[0], "ep_rank": ep[1], "dp_size": dp, "dp_rank": ep[1] % dp}
        return replace(found, **ranks, use_ep=True, enable_eplb=eplb)

    FusedMoEParallelConfig.make = staticmethod(make)
    try:
        yield
    finally:
        FusedMoEParallelConfig.make = original


def checkpoint(case: Case, seed: int = 0) -> ExpertWeights:
    """All experts of a layer as the checkpoint holds them, gate rows first."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, inter = case.num_experts, case.hidden_size, case.intermediate_size

    def weight(*shape):
        return torch.randn(*shape, generator=generator).to(FP8)

    def scale(*shape):
        return torch.rand(*shape, generator=generator) * 0.02 + 0.01

    rows, columns = 2 * inter // 128, hidden // 128
    return ExpertWeights(
        weight(experts, 2 * inter, hidden),
        scale(experts, rows, columns),
        weight(experts, hidden, inter),
        scale(experts, columns, inter // 128),
    )


def load(layer, weights: ExpertWeights) -> None:
    """Through the engine's own loader, one checkpoint tensor at a time."""
    for expert in range(weights.num_local_experts):
        for kind, w13, w2 in (
            ("weight", weights.w13, weights.w2),
            ("weight_scale_inv", weights.w13_scale, weights.w2_scale),
        ):
            gate, up = w13[expert].chunk(2)
            for shard, name, tensor in (
                ("w1", "w13", gate),
                ("w3", "w13", up),
                ("w2", "w2", w2[expert]),
            ):
                parameter = getattr(layer, f"{name}_{kind}")
                parameter.weight_loader(
                    parameter, tensor, f"experts.{expert}.{name}_{kind}", shard, expert
                )
