# SPDX-License-Identifier: Apache-2.0
"""The balance loss as a kernel; its value and gradient are tested in tests/functional."""

import pytest
import torch

from moe_backend import reference_training as oracle


def run(*args):
    from moe_backend.kernels.aux_loss import aux_loss

    return aux_loss(*args)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 256), (300, 257), (20, 2304), (9, 600)])
def test_sum_over_all_blocks(rows, cols, device, poisoned_memory):
    probs = torch.rand(rows, cols, device=device)
    counts = torch.randint(0, 99, (cols,), device=device)
    out = run(probs, counts, rows, 2.0)
    want = oracle.aux_loss(probs.double(), counts, rows, 2.0)
    assert abs(out[0].item() / max(want.item(), 1e-30) - 1) < 1e-5 or want == out[0] == 0
    assert abs(out[1].item() * rows * rows / 2 - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_counts_of_any_dtype(dtype, device):
    probs = torch.rand(4, 16, device=device)
    counts = torch.arange(16, device=device)
    assert torch.equal(run(probs, counts.to(dtype), 4, 1.0), run(probs, counts, 4, 1.0))


def test_strided_rows(device):
    wide, counts = torch.rand(5, 64, device=device), torch.arange(32, device=device)
    part = wide[:, 16:48]
    assert torch.equal(run(part, counts, 5, 1.0), run(part.contiguous(), counts, 5, 1.0))
    assert torch.equal(run(part.T.contiguous().T, counts, 5, 1.0), run(part, counts, 5, 1.0))


def test_line_of_partial_sums_is_left_zero_and_nothing_needs_zeroing(device, monkeypatch):
    """A race with the zeroing of an accumulator is impossible: there is none."""
    from moe_backend.kernels import aux_loss as module

    line = torch.zeros(32, dtype=torch.int32, device=device)
    monkeypatch.setattr(module, "zeroed_line", lambda device, size: line)
    monkeypatch.setattr(module, "sm_count", lambda device: 3)
    probs, counts = torch.rand(300, 64, device=device), torch.arange(64, device=device)
    first = run(probs, counts, 300, 1.0)
    assert not line.any()
    for _ in range(5):
        assert torch.equal(run(probs, counts, 300, 1.0), first)


@pytest.mark.gpu
def test_more_than_two_billion_probabilities():
    rows = 2**31 // 2304 + 1000
    probs = torch.zeros(rows, 2304, device="cuda", dtype=torch.bfloat16)
    probs[-1000:] = 1.0
    counts = torch.ones(2304, device="cuda")
    assert abs(run(probs, counts, 1, 1.0)[0].item() / (1000 * 2304) - 1) < 1e-6
