# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the project, in one place.

A variable that starts with ``MOE_BACKEND_`` and is not listed here is refused: a typing error in
a deployment must not pass in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "MOE_BACKEND_"


class Settings(BaseModel):
    """Field ``name`` is read from ``MOE_BACKEND_NAME``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fallback: Literal["refuse", "allow"] = Field(
        "refuse",
        description="what a layer that cannot run on our kernels does: stop the start, or let the "
        "engine's default method take that layer",
    )
    config_dir: Path | None = Field(
        None, description="folder of tuned configuration files that come before the shipped ones"
    )
    cache_dir: Path = Field(
        Path("~/.cache/moe-backend"), description="where generated checkpoints and sources are kept"
    )
    ep: Literal["auto", "symm", "nccl", "engine"] = Field(
        "auto",
        description="all-to-all under expert parallelism; auto takes the engine's own on GPUs and "
        "ours without; symm and nccl are on request",
    )
    ep_timeout_s: float = Field(
        30.0, gt=0, description="bound on every wait for another rank, in seconds"
    )
    balance: bool = Field(False, description="keep live statistics of the experts' load per layer")


class SettingsError(ValueError):
    """A MOE_BACKEND_* variable is unknown or has an illegal value."""


def variables() -> dict[str, str]:
    """Name and description of every variable."""
    return {PREFIX + n.upper(): f.description or "" for n, f in Settings.model_fields.items()}


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings; raises SettingsError with the list of what is known."""
    environ = os.environ if environ is None else environ
    given = {k: v for k, v in environ.items() if k.startswith(PREFIX)}
    unknown = sorted(set(given) - set(variables()))
    if unknown:
        raise SettingsError(
            f"unknown environment variable {', '.join(unknown)}. "
            f"Known: {', '.join(variables())}. Correct the name or unset it."
        )
    try:
        settings = Settings(**{k[len(PREFIX) :].lower(): v for k, v in given.items()})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + str(first["loc"][0]).upper()
        raise SettingsError(
            f"{name}={given[name]!r}: {first['msg'].lower()}. {variables()[name]}."
        ) from None
    return settings.model_copy(update={"cache_dir": settings.cache_dir.expanduser()})
