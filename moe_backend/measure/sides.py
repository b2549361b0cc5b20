# SPDX-License-Identifier: Apache-2.0
"""Which model stock vLLM serves when it is compared with the plugin, and how both share a GPU."""

from __future__ import annotations

from pathlib import Path

from moe_backend import envs
from moe_backend.measure.loadtest import Report


def stock_model(model: str, on_gpu: bool, report: Report) -> str:
    """The same model on a GPU; on a CPU its bf16 copy, because stock vLLM has no FP8 path there.

    Raises:
        ValueError: on a CPU, when ``model`` is not a folder with FP8 weights.
    """
    if on_gpu:
        return model
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{model}: not a model folder. Without a GPU the default side needs the weights here, "
            "to make their bf16 copy; give a folder, or the other side's model as --compare-model."
        )
    from moe_backend.measure.tensor_store import dequantised_copy

    def progress(done: int, total: int) -> None:
        report("bf16 copy", "dequantising the weights", done, total)

    return str(dequantised_copy(folder, envs.load().cache_dir, progress))


def shared_gpu_args(cache_gib: float) -> tuple[str, ...]:
    """For servers that start and stay on one GPU: each takes a cache of a fixed size, because
    neither can measure what is free while the other is starting."""
    cache = str(int(cache_gib * 2**30))
    return "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", cache
