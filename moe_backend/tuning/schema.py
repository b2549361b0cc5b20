# SPDX-License-Identifier: Apache-2.0
"""What a file of tuned configurations may say, checked when it is read.

One file per device name. An entry holds for one layer shape, one number of tokens and one load
profile; it names both GEMMs' tiles, because they share the rows of a tile.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_backend.support import supports_config
from moe_backend.types import GemmConfig, KernelConfig, MoEShape

VERSION: Literal[1] = 1


class ConfigFileError(ValueError):
    """A file that cannot be used; the message names file, entry and reason."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gemm(_Strict):
    kernel: Literal["triton", "gluon"] = "triton"
    block_n: Literal[64, 128] = 128
    block_k: Literal[128] = 128  # the quantisation group; nothing else is right
    num_warps: Literal[4, 8] = 4
    num_stages: int = Field(default=4, ge=1, le=8)
    swap: bool = True
    unroll: int = Field(default=1, ge=1, le=4)
    span: int = Field(default=1, ge=1, le=64)
    turns: bool = True


class Shape(_Strict):
    num_experts: int = Field(ge=1)
    num_local_experts: int = Field(ge=1)
    hidden: int = Field(ge=128)
    intermediate: int = Field(ge=16)
    top_k: int = Field(ge=1)
    ep_size: int = Field(default=1, ge=1)
    block_shape: tuple[Literal[128], Literal[128]] = (128, 128)

    def moe_shape(self) -> MoEShape:
        return MoEShape(**self.model_dump(exclude={"block_shape"}))


class Config(_Strict):
    align: Literal[16, 32, 64, 128]
    up: Gemm = Gemm()
    down: Gemm = Gemm()
    slab: int = Field(default=0, ge=0)
    gather: bool = False
    direct: bool = False
    pdl: bool = True

    def kernel_config(self) -> KernelConfig:
        up, down = (
            GemmConfig(**gemm.model_dump(exclude={"block_k"})) for gemm in (self.up, self.down)
        )
        return KernelConfig(**self.model_dump(exclude={"up", "down"}), up=up, down=down)


class Entry(_Strict):
    """One measured choice."""

    shape: Shape
    tokens: int = Field(ge=1)
    load: str = Field(pattern=r"^(uniform|zipf|trace(:.*)?)$")
    config: Config
    us: float = Field(gt=0, description="median time of the layer, microseconds")
    triton: str
    torch: str
    commit: str = ""

    @model_validator(mode="after")
    def _runs(self) -> Entry:
        support = supports_config(self.config.kernel_config(), self.shape.moe_shape())
        if not support.ok:
            raise ValueError(support.reason)
        return self


class ConfigFile(_Strict):
    version: Literal[1] = VERSION
    device: str = Field(min_length=1)
    entries: list[Entry]


def file_name(device: str) -> str:
    """``NVIDIA H200`` -> ``NVIDIA_H200.json``."""
    return "".join(c if c.isalnum() else "_" for c in device) + ".json"


def load(path: Path, device: str | None = None) -> ConfigFile:
    """Reads and checks a file; raises ConfigFileError with what is wrong and where."""
    try:
        found = ConfigFile.model_validate_json(path.read_text())
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigFileError(f"{path}: {where}: {first['msg']}{more}") from error
    if device is not None and found.device != device:
        raise ConfigFileError(f"{path}: tuned for {found.device!r}, this device is {device!r}")
    return found


def entry(
    shape: MoEShape, tokens: int, load_profile: str, config: KernelConfig, us: float, **stamp: str
) -> Entry:
    """An entry from what the tuner holds; ``stamp``: triton, torch, commit."""
    return Entry(
        shape=Shape(**asdict(shape)),
        tokens=tokens,
        load=load_profile,
        config=Config(**asdict(config)),
        us=round(us, 2),
        **stamp,
    )


def save(path: Path, file: ConfigFile) -> None:
    """Writes atomically, one entry a line, so that a difference reads well."""
    lines = ",\n  ".join(
        json.dumps(e.model_dump(mode="json", exclude_defaults=True)) for e in file.entries
    )
    head = json.dumps({"version": file.version, "device": file.device})[:-1]
    text = f'{head}, "entries": [\n  {lines}\n]}}\n'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
