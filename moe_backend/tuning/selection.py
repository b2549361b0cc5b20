# SPDX-License-Identifier: Apache-2.0
"""Which configuration a layer takes: a measured entry for this very size, the nearest measured
size of the same layer, or the heuristic; always with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from moe_backend import envs
from moe_backend.tuning import schema
from moe_backend.tuning.heuristics import expected_rows, heuristic
from moe_backend.types import ExpertWeights, KernelConfig, MoEShape

LOAD_PROFILE = "uniform"  # what serving looks up; others are for study


@dataclass(frozen=True)
class Selection:
    config: KernelConfig
    source: str  # "exact", "bucket" or "heuristic"
    reason: str


def shape_of(weights: ExpertWeights, top_k: int, num_experts: int) -> MoEShape:
    local = weights.num_local_experts
    return MoEShape(
        num_experts,
        local,
        weights.hidden,
        weights.intermediate,
        top_k,
        ep_size=max(1, num_experts // local),
    )


def config_paths(device_name: str) -> list[Path]:
    """Files that may hold entries for a device, the user's own first."""
    name = schema.file_name(device_name)
    own = envs.load().config_dir
    shipped = Path(str(schema.__file__)).parent.parent / "tuned_configs"
    if not shipped.is_dir():  # an editable checkout maps the package elsewhere
        from moe_backend import tuned_configs

        shipped = Path(next(iter(tuned_configs.__path__)))
    return [Path(folder) / name for folder in (own, shipped) if folder is not None]


@lru_cache(maxsize=8)
def _entries(device_name: str, paths: tuple[Path, ...]) -> tuple[tuple[Path, schema.Entry], ...]:
    return tuple(
        (path, entry)
        for path in paths
        if path.is_file()
        for entry in schema.load(path, device_name).entries
    )


def select(
    shape: MoEShape,
    num_tokens: int,
    device: torch.device | str = "cuda",
    load: str = LOAD_PROFILE,
) -> Selection:
    """Configuration for ``num_tokens`` tokens.

    Args:
        device: a CUDA device, or a device name such as "NVIDIA H200".
        load: load profile of the measured entries to look at.
    """
    if isinstance(device, torch.device):
        device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _select(shape, num_tokens, device, load, tuple(config_paths(device)))


@lru_cache(maxsize=65536)
def serving_config(shape: MoEShape, num_tokens: int, device: torch.device) -> KernelConfig:
    """What a layer runs with; settings and files are read once."""
    return select(shape, num_tokens, device).config


@lru_cache(maxsize=65536)
def _select(
    shape: MoEShape, num_tokens: int, device: str, load: str, paths: tuple[Path, ...]
) -> Selection:
    found = [
        (path, entry)
        for path, entry in _entries(device, paths)
        if _weights(entry.shape.moe_shape()) == _weights(shape) and entry.load == load
    ]
    if not found:
        return Selection(
            heuristic(shape, num_tokens),
            "heuristic",
            f"no entry for this layer on {device} in {', '.join(map(str, paths)) or 'no file'}",
        )

    def distance(candidate: tuple[Path, schema.Entry]) -> tuple[float, bool]:
        """In routes that stay on the rank, which is what decides; the same layer wins a tie."""
        entry = candidate[1]
        theirs = expected_rows(entry.shape.moe_shape(), entry.tokens)[0]
        mine = expected_rows(shape, max(num_tokens, 1))[0]
        return abs(math.log2(theirs / mine)), entry.shape.moe_shape() != shape

    path, best = min(found, key=distance)  # the first file wins a further tie
    config = best.config.kernel_config()
    same = best.shape.moe_shape() == shape
    if same and best.tokens == num_tokens:
        return Selection(config, "exact", f"{path.name}: measured at {num_tokens} tokens")
    routes, theirs = num_tokens * shape.top_k, best.tokens * best.shape.top_k
    if config.direct and routes > 1.5 * theirs:  # it walks every route, absent ones too
        return Selection(
            heuristic(shape, num_tokens),
            "heuristic",
            f"{path.name}: the nearest entry, {best.tokens} tokens, is only for fewer",
        )
    other = "" if same else f" of a layer with the same weights on a rank, top-{best.shape.top_k}"
    return Selection(
        config, "bucket", f"{path.name}: nearest measured size is {best.tokens} tokens{other}"
    )


def _weights(shape: MoEShape) -> tuple[int, int, int]:
    """What two layers must share for one's tiles to suit the other."""
    return shape.num_local_experts, shape.hidden, shape.intermediate
