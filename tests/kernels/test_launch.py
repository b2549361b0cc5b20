# SPDX-License-Identifier: Apache-2.0
"""Repeated launches: the compiled kernel gets addresses only, and only where that is the same."""

from types import SimpleNamespace

import pytest
import torch
from moe_backend.kernels import launch as module
from moe_backend.kernels.launch import Launch, Launches


class Kernel:
    """Stands for a jitted kernel: notes what goes through Triton, and what goes straight on."""

    params = ("x", "y", "size", "BLOCK", "PDL")

    def __init__(self):
        self.bound, self.straight = [], []

    def __getitem__(self, grid):
        def bind(*args, **constants):
            self.bound.append((grid, args, constants))
            run = lambda *values: self.straight.append(values)  # noqa: E731
            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return bind


@pytest.fixture
def launch(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    kernel = Kernel()
    device = torch.device("cpu")
    return kernel, Launch(kernel, device, (3,), (7,), {"BLOCK": 64, "PDL": False})


def test_the_second_launch_hands_over_addresses(launch):
    kernel, call = launch
    x, y = torch.zeros(64), torch.zeros(64)
    call(x, None)
    call(y, None)
    assert kernel.bound == [((3, 1, 1), (x, None, 7), {"BLOCK": 64, "PDL": False})]
    (values,) = kernel.straight
    grid, stream, hooks, args = values[:3], values[3], values[6:9], values[9:]
    assert (grid, stream, hooks) == ((3, 1, 1), "stream", (None,) * 3)
    assert args == (y.data_ptr(), None, 7, None, None)  # as many as the kernel has parameters


def test_an_unaligned_tensor_goes_through_triton(launch):
    kernel, call = launch
    x = torch.zeros(64)
    for tensor in (x, x[1:], x):
        call(tensor, None)
    assert [args[0].data_ptr() % 16 for _, args, _ in kernel.bound] == [0, 4]
    assert len(kernel.straight) == 1


def test_an_unaligned_first_launch_is_not_kept(launch):
    kernel, call = launch
    x = torch.zeros(64)
    for tensor in (x[1:], x, x):
        call(tensor, None)
    assert len(kernel.bound) == 2 and len(kernel.straight) == 1


def test_a_profiler_sees_every_launch(launch, monkeypatch):
    kernel, call = launch
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(
        module, "knobs", SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hook))
    )
    for _ in range(2):
        call(torch.zeros(64), None)
    assert len(kernel.bound) == 2 and not kernel.straight


def test_the_table_is_bounded(launch, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    table = Launches()
    for key in range(5):
        table.add(key, launch[1])
        assert table.get(key) is launch[1] and len(table) <= 3
