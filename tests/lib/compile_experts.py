# SPDX-License-Identifier: Apache-2.0
"""Compile the experts for sm_90a, in a process of its own; prints a line of JSON per kernel.

python compile_experts.py tuned | paths
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import offline_sm90
import torch

from moe_backend import execution, tuned_configs
from moe_backend.tuning import schema
from moe_backend.tuning.heuristics import heuristic
from moe_backend.types import Activation, ExpertWeights, GemmConfig, KernelConfig, MoEShape, cdiv

SMALL = MoEShape(8, 8, 256, 256, 2)


def compile_one(shape: MoEShape, tokens: int, config: KernelConfig, limit: float | None) -> list:
    """Few experts and meta-sized tensors: what is compiled depends on neither."""
    experts, hidden, inter = min(shape.num_local_experts, 4), shape.hidden, shape.intermediate

    def fp8(*size):
        return torch.empty(size, dtype=torch.float8_e4m3fn)

    blocks = cdiv(inter, 128), cdiv(hidden, 128)
    weights = ExpertWeights(
        fp8(experts, 2 * inter, hidden),
        torch.empty(experts, 2 * blocks[0], blocks[1]),
        fp8(experts, hidden, inter),
        torch.empty(experts, blocks[1], blocks[0]),
    )
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32)
    with offline_sm90.compiling() as kernels:
        execution.run_experts(
            x, ids, torch.empty(ids.shape), weights, Activation(limit=limit), None, None, config
        )
    return [
        {"kernel": k.name, "registers": k.registers, "stack": k.spills, "shared": k.shared}
        for k in kernels
    ]


def tuned():
    """Every distinct configuration and shape of the shipped files."""
    seen = set()
    for folder in tuned_configs.__path__:
        for path in sorted(Path(folder).glob("*.json")):
            for entry in schema.load(path).entries:
                shape, config = entry.shape.moe_shape(), entry.config.kernel_config()
                if (shape, config) not in seen:
                    seen.add((shape, config))
                    yield shape, min(entry.tokens, 64), config, None


def paths():
    """Each kernel of each path once, with the variants that a shape or an option selects."""
    gluon = GemmConfig(kernel="gluon")
    plain = GemmConfig(num_warps=8, swap=False)
    yield SMALL, 4, KernelConfig(16, direct=True), 7.0
    yield SMALL, 64, KernelConfig(16, up=GemmConfig(unroll=2, num_stages=2)), None
    yield SMALL, 64, KernelConfig(64, up=plain, down=plain, slab=128), 7.0
    yield SMALL, 2048, KernelConfig(128, up=gluon, down=gluon, gather=True), 7.0
    yield SMALL, 64, KernelConfig(128, up=gluon, down=gluon), None
    single = MoEShape(8, 8, 256, 256, 1)
    yield single, 64, KernelConfig(128, up=gluon, down=gluon), None
    yield single, 64, KernelConfig(64, up=plain, down=plain), None
    for tokens in (1, 300, 5000):
        for inter in (80, 704):
            shape = MoEShape(8, 8, 1024, inter, 4)
            yield shape, min(tokens, 64), heuristic(shape, tokens), None


if __name__ == "__main__":
    for case in {"tuned": tuned, "paths": paths}[sys.argv[1]]():
        for kernel in compile_one(*case):
            print(json.dumps({**kernel, "case": str(case)}), flush=True)
