# SPDX-License-Identifier: Apache-2.0
"""Writes seeded checkpoints that stock vLLM, transformers and the plugin read.

The folder appears whole or not at all: everything is written beside it and renamed. A note in the
folder says how it was made, so that the same wish is met without writing again and a folder that
somebody else filled is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_backend.measure import model_presets

NOTE = "moe_backend_checkpoint.json"
NOTE_VERSION = 2  # raise it with every change of the values, or old folders are taken for new
MAX_SHARD_BYTES = 2 * 1024**3
WEIGHTS = ("fp8", "bf16", "none")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is made from; equal recipes give equal bytes."""

    preset: str
    seed: int
    weights: str
    overrides: dict[str, Any] = field(default_factory=dict)
    version: int = NOTE_VERSION

    def config(self) -> dict[str, Any]:
        config = model_presets.build_config(self.preset, self.overrides)
        if self.weights == "bf16":
            del config["quantization_config"]
        return config


def default_weights(preset: str) -> str:
    """Tiny models come with weights; full-size ones are for ``--load-format dummy``."""
    return "fp8" if preset in model_presets.TINY else "none"


def write_checkpoint(
    path: str | os.PathLike[str],
    preset: str = "tiny-deepseek",
    seed: int = 0,
    weights: str | None = None,
    *,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **overrides: Any,
) -> Path:
    """Writes a model folder: config, tokenizer, generation settings and (mostly) weights.

    Args:
        path: the folder. Missing, empty, or one that this function filled before; an equal
            recipe returns at once, another recipe replaces the folder.
        preset: a key of ``model_presets.PRESETS``.
        seed: of the weights; the same seed gives the same bytes.
        weights: "fp8" (128×128 blocks, ``weight_scale_inv``), "bf16" (the same model
            dequantised, for engines without an FP8 path) or "none" (config and tokenizer only).
            Default: fp8 for the tiny presets, none for the full-size ones.
        progress: called with (bytes done, bytes in all).
        max_shard_bytes: a larger model is split, with an index.
        **overrides: fields of the configuration; a dotted name reaches into a nested one.

    Returns:
        The folder.

    Raises:
        ValueError: unknown preset, field or kind of weights, or a value no model could have.
        FileExistsError: the folder holds something this function did not write.
    """
    weights = default_weights(preset) if weights is None else weights
    if weights not in WEIGHTS:
        raise ValueError(f"weights: expected one of {', '.join(WEIGHTS)}, found {weights!r}")
    recipe = Recipe(preset, seed, weights, overrides)
    config = recipe.config()
    target = Path(path).expanduser().absolute()
    if _is_made(target, recipe):
        return target
    with replaced_folder(target) as folder:
        _write_json(folder / "config.json", config)
        _write_generation_config(folder, config)
        from moe_backend.measure.model_tokenizer import write_tokenizer

        write_tokenizer(folder, config)
        if weights != "none":
            _write_weights(folder, recipe, max_shard_bytes, progress)
        files = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
        _write_json(folder / NOTE, {"recipe": asdict(recipe), "files": files})
    return target


def read_note(path: str | os.PathLike[str]) -> Recipe | None:
    """The recipe of a folder that ``write_checkpoint`` wrote, else None."""
    try:
        return Recipe(**json.loads((Path(path) / NOTE).read_text())["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_made(target: Path, recipe: Recipe) -> bool:
    """Whether ``target`` already is this recipe, complete; raises when it is somebody else's."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose another folder")
    if any(target.iterdir()) and not (target / NOTE).exists():
        raise FileExistsError(
            f"{target} is not empty and was not written by make-checkpoint; "
            "choose another folder or empty this one"
        )
    # Through JSON, because that is how the note was stored (tuples become lists).
    if read_note(target) != Recipe(**json.loads(json.dumps(asdict(recipe)))):
        return False
    files = json.loads((target / NOTE).read_text())["files"]
    found = {p.name: p.stat().st_size for p in target.iterdir()}
    return all(found.get(name) == size for name, size in files.items())


@contextlib.contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place at the end, or vanishes on any failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        work.chmod(0o755)
        folder = work / "new"
        folder.mkdir()
        yield folder
        if target.exists():
            os.replace(target, work / "old")
        os.replace(folder, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_generation_config(folder: Path, config: dict[str, Any]) -> None:
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def _shards(sizes: list[int], limit: int) -> list[int]:
    """The shard of each tensor: as many consecutive tensors in one as fit under the limit."""
    shard, used, out = 0, 0, []
    for size in sizes:
        if used and used + size > limit:
            shard, used = shard + 1, 0
        used += size
        out.append(shard)
    return out


def _write_weights(
    folder: Path, recipe: Recipe, max_shard_bytes: int, progress: Progress | None
) -> None:
    from safetensors.torch import save_file

    from moe_backend.measure import model_tensors

    # The bf16 model is the rounding of the FP8 one, so both start from the FP8 configuration.
    config = model_presets.build_config(recipe.preset, recipe.overrides)
    block = (config["quantization_config"] or {}).get("weight_block_size")
    if not block:
        raise ValueError("weights need quantization_config.weight_block_size; use weights='none'")
    quantized = recipe.weights == "fp8"
    specs = model_tensors.plan(config)
    sizes = [spec.num_bytes(block if quantized else None) for spec in specs]
    shards = _shards(sizes, max_shard_bytes)
    total, done, index = sum(sizes), 0, {}
    pending: dict[str, Any] = {}
    for i, spec in enumerate(specs):
        pending.update(model_tensors.values(spec, recipe.seed, block, quantized))
        done += sizes[i]
        if progress:
            progress(done, total)
        if i + 1 == len(specs) or shards[i + 1] != shards[i]:
            name = _shard_name(shards[i], shards[-1] + 1)
            save_file(pending, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # safetensors creates it for its owner alone
            index.update(dict.fromkeys(pending, name))
            pending = {}
    if shards[-1]:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        _write_json(folder / "model.safetensors.index.json", content)


def _shard_name(shard: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
