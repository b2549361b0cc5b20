# SPDX-License-Identifier: Apache-2.0
"""Several ranks of a symmetric exchange in one process: their buffers are plain tensors.

Steps run rank after rank, so that every wait finds its flags set (in the interpreter programs run
one after the other: a wait for something later would never end but for its bound).
"""

import torch
from moe_backend.kernels.ep_buffers import Endpoint, Layout, make_slot


def make_world(layout: Layout, device: str = "cpu", clock: bool = False, programs: int = 3):
    """Endpoints of all ranks; memory beyond counters is poisoned. A wait ends after 50 ms, or
    after 50 looks without a ``clock``."""
    buffers = [
        torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8, device=device)
        for _ in range(layout.world)
    ]
    peers = torch.tensor([b.data_ptr() for b in buffers], device=device)
    place = torch.arange(layout.num_experts, dtype=torch.int32, device=device)
    clock = clock or device != "cpu"
    world = [
        Endpoint(
            layout, rank, buffers[rank], peers, place.clone(), *make_status(device),
            50_000_000 if clock else 50, programs, clock,
            tuple(make_slot(layout, device) for _ in range(layout.slots)),
        )
        for rank in range(layout.world)
    ]  # fmt: skip
    for ep in world:
        for slot in range(layout.slots):
            ep.view("flags", slot, torch.int32, 3, layout.world).zero_()
    return world


def make_status(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's status word and its copy in host memory."""
    alarm = torch.zeros(1, dtype=torch.int32)
    return torch.zeros(1, dtype=torch.int32, device=device), (
        alarm if device == "cpu" else alarm.pin_memory()
    )


def status(end) -> tuple[int, int, int]:
    """Code, phase and rank that an endpoint has reported."""
    word = int(end.status)
    if end.status.is_cuda:
        torch.cuda.synchronize()
    assert int(end.alarm) == word, "the host must see what the device has seen"
    return word & 0xFF, word >> 8 & 0xFF, word >> 16
