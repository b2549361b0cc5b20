# SPDX-License-Identifier: Apache-2.0
"""What both halves of the functional face check: errors name tensor, expected and found."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int16, torch.int32, torch.int64)


def expect(name: str, ok: bool, expected: str, found: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, found {found}")


def expect_float(name: str, tensor: torch.Tensor) -> None:
    ok = tensor.dtype in FLOATS
    expect(name, ok, "dtype float32, bfloat16 or float16", tensor.dtype)


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    expect(name, tuple(tensor.shape) == shape, f"shape {shape}", tuple(tensor.shape))


def expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    expect(name, tensor.device == device, f"device {device}", tensor.device)
