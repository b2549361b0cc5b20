# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures; marks that need hardware skip with the reason."""

import os
import signal

import interpreter
import pytest
import torch

# Triton decides at its import whether it interprets, and test modules of any folder may import it
# while they are collected: it must be told before the first of them.
INTERPRETED = interpreter.enable()

# A shell that starts the suite in the background ignores Ctrl-C for it and for all that it starts;
# tests that interrupt a process need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _hopper_count() -> int:
    if not torch.cuda.is_available():
        return 0
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return sum(c == (9, 0) for c in capabilities)


def pytest_collection_modifyitems(items):
    found = _hopper_count()
    for item in items:
        for mark, need in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(mark) and found < need:
                reason = f"needs {need} Hopper GPU(s), this machine has {found}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _clean_settings(monkeypatch):
    """A variable of the person who runs the tests must not change a result."""
    for name in [n for n in os.environ if n.startswith("MOE_BACKEND_")]:
        if name not in ("MOE_BACKEND_CACHE_DIR",):
            monkeypatch.delenv(name)
