# SPDX-License-Identifier: Apache-2.0
"""Lines of zeroed counters: shared where launches are ordered, and never where they are not."""

import types

import pytest
import torch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def counters(monkeypatch):
    """The module with a device of its own imagination: ``now`` says stream and capture."""
    from moe_backend.kernels import launch_counter as module

    now = types.SimpleNamespace(stream=1, capture=None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **k | {"device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda d: types.SimpleNamespace(cuda_stream=now.stream)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capture is not None)
    monkeypatch.setattr(module, "capture_number", lambda stream: now.capture)
    monkeypatch.setattr(module, "_arenas", {})
    monkeypatch.setattr(module, "_stream_lines", {})
    return module, now


def test_launches_of_one_stream_or_one_capture_share_a_line(counters):
    """Once every captured launch took one for good: the lines ran out and memsets took over."""
    module, now = counters
    eager = module.zeroed_line(CUDA, 256)
    assert module.zeroed_line(CUDA, 200) is eager
    now.capture = 7
    captured = module.zeroed_line(CUDA, 256)
    assert module.zeroed_line(CUDA, 256) is captured
    assert captured.data_ptr() != eager.data_ptr()


def test_what_can_overlap_has_lines_of_its_own(counters):
    module, now = counters
    module.zeroed_line(CUDA, 256)
    seen = set()
    for capture in (7, 8):
        for stream in (1, 2):
            now.capture, now.stream = capture, stream
            seen.add(module.zeroed_line(CUDA, 256).data_ptr())
    assert len(seen) == 4


def test_a_capture_without_a_number_shares_nothing(counters, monkeypatch):
    module, now = counters
    module.zeroed_line(CUDA, 256)
    now.capture = 7
    monkeypatch.setattr(module, "capture_number", lambda stream: None)
    first, second = (module.zeroed_line(CUDA, 256).data_ptr() for _ in range(2))
    assert first != second


def test_lines_are_zero_and_disjoint_until_they_are_used_up(counters, monkeypatch):
    module, now = counters
    monkeypatch.setattr(module, "ARENA_BYTES", 4 * 32 * 3)
    for now.stream in range(5):
        line = module.zeroed_line(CUDA, 20)
        assert line.shape == (32,) and not line.any()
        line.fill_(now.stream)


@pytest.mark.gpu
def test_captures_have_numbers_on_a_gpu():
    from moe_backend.kernels.launch_counter import capture_number

    torch.zeros(1, device="cuda")
    assert capture_number(torch.cuda.current_stream().cuda_stream) is None
    numbers = []
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            numbers.append(capture_number(stream))
            assert capture_number(stream) == numbers[-1]
    assert None not in numbers and numbers[0] != numbers[1]
