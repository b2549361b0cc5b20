# SPDX-License-Identifier: Apache-2.0
"""Reads single tensors out of a checkpoint's shards, and writes it once more dequantised."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moe_backend.measure import checkpoint
from moe_backend.measure.model_config import ModelError
from moe_backend.types import ExpertWeights

SCALE = "_scale_inv"  # stands beside "<name>.weight"
SPARE_BYTES = 1024**3


class TensorStore:
    """The tensors of a folder of safetensors by name; shards are opened on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.home: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            files = sorted(p.name for p in folder.glob("*.safetensors"))
            self.home = {name: file for file in files for name in self._shard(file).keys()}  # noqa: SIM118
        if not self.home:
            raise ModelError(f"{folder}: no *.safetensors; parity needs real weights")

    def _shard(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, "pt")
            except Exception as error:  # safetensors raises its own and OSError alike
                raise ModelError(f"{self.folder / file}: not readable: {error}") from error
        return self._open[file]

    def __contains__(self, name: str) -> bool:
        return name in self.home

    def get(self, name: str) -> torch.Tensor:
        if name not in self.home:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}")
        return self._shard(self.home[name]).get_tensor(name)

    def find(self, pattern: str) -> re.Match[str]:
        """The first name that matches ``pattern`` whole."""
        for name in self.home:
            if found := re.fullmatch(pattern, name):
                return found
        raise ModelError(f"{self.folder}: the checkpoint has no tensor like {pattern}")


def load_experts(store: TensorStore, layer: int) -> tuple[ExpertWeights, torch.Tensor | None]:
    """All experts of a layer and the selection bias, if it has one."""
    found = store.find(rf"(.*layers\.{layer}\.\w+)\.experts\.0\.(gate_proj|w1)\.weight")
    block, gate = found[1], found[2]
    up, down = ("up_proj", "down_proj") if gate == "gate_proj" else ("w3", "w2")
    experts = range(_count(store, f"{block}.experts.{{}}.{gate}.weight"))

    def stack(suffix: str, *names: str) -> torch.Tensor:
        rows = [
            torch.cat([store.get(f"{block}.experts.{e}.{n}.weight{suffix}") for n in names])
            for e in experts
        ]
        return torch.stack(rows)

    weights = ExpertWeights(
        stack("", gate, up), stack(SCALE, gate, up), stack("", down), stack(SCALE, down)
    )
    bias = f"{block}.gate.e_score_correction_bias"
    return weights, store.get(bias).float() if bias in store else None


def _count(store: TensorStore, template: str) -> int:
    number = 0
    while template.format(number) in store:
        number += 1
    return number


def dequantised_copy(
    folder: Path, cache: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The same model in bf16, made once and kept in ``cache``.

    Each FP8 matrix becomes the bf16 rounding of codes × block scales; all else is copied.
    """
    from moe_backend import reference

    config = json.loads((folder / "config.json").read_text())
    target = cache / "dequantised" / f"{folder.name}-{_fingerprint(folder)}"
    if (target / "config.json").is_file():
        return target
    store = TensorStore(folder)
    need = 2 * sum((folder / f).stat().st_size for f in set(store.home.values())) + SPARE_BYTES
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < need:
        raise ModelError(
            f"{target.parent}: the bf16 copy of {folder} needs {need / 1e9:.0f} GB of free space; "
            "set MOE_BACKEND_CACHE_DIR to a larger disk or give --reference"
        )

    def value(name: str) -> torch.Tensor:
        tensor = store.get(name)
        if f"{name}{SCALE}" not in store:
            return tensor
        return reference.dequant_blocks(tensor, store.get(f"{name}{SCALE}").float()).bfloat16()

    with checkpoint.replaced_folder(target) as work:
        for extra in _beside_weights(folder):
            shutil.copy2(extra, work / extra.name)
        config.pop("quantization_config", None)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _copy_shards(store, work, value, progress)
    return target


def _beside_weights(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name != checkpoint.NOTE:
            yield path


def _copy_shards(
    store: TensorStore,
    work: Path,
    value: Callable[[str], torch.Tensor],
    progress: Callable[[int, int], None] | None,
) -> None:
    from safetensors.torch import save_file

    names = [n for n in store.home if not n.endswith(f"weight{SCALE}")]
    done = 0
    for file in sorted(set(store.home.values())):
        mine = {n: value(n).contiguous() for n in names if store.home[n] == file}
        done += len(mine)
        if mine:
            save_file(mine, work / file, metadata={"format": "pt"})
        if progress:
            progress(done, len(names))
    if (work / "model.safetensors.index.json").is_file():
        index = {"metadata": {}, "weight_map": {n: store.home[n] for n in names}}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _fingerprint(folder: Path) -> str:
    """Changes when any file of the model does, without reading gigabytes."""
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
