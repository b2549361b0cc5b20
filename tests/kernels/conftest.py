# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import interpreter
import pytest
import torch

INTERPRETED = interpreter.enable()


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh tensors hold NaN (floats), 0xAA.. (integers): nothing may rely on or leave them."""
    plain = torch.empty

    def empty(*args, **kwargs):
        out = plain(*args, **kwargs)
        if out.numel():
            raw = out.view(torch.uint8) if out.dtype is not torch.bool else out.view(torch.uint8)
            raw.fill_(0xFF if out.is_floating_point() else 0xAA)
        return out

    monkeypatch.setattr(torch, "empty", empty)
