# SPDX-License-Identifier: Apache-2.0
"""Several ranks of a symmetric exchange in one process: their buffers are plain tensors.

Steps run rank after rank, so that every wait finds its flags set (in the interpreter programs run
one after the other: a wait for something later would never end but for its bound).
"""

import torch

from moe_backend.kernels.ep_buffers import Endpoint, Layout, make_slot


def make_world(
    layout: Layout, device: str = "cpu", patience: int = 50, programs: int = 3, clock: bool = False
):
    """Endpoints of all ranks; memory beyond counters is poisoned."""
    buffers = [
        torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8, device=device)
        for _ in range(layout.world)
    ]
    peers = torch.tensor([b.data_ptr() for b in buffers], device=device)
    place = torch.arange(layout.num_experts, dtype=torch.int32, device=device)
    world = [
        Endpoint(
            layout, rank, buffers[rank], peers, place.clone(),
            torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32),
            patience, programs, clock, tuple(make_slot(layout, device) for _ in range(layout.slots)),
        )
        for rank in range(layout.world)
    ]  # fmt: skip
    for ep in world:
        for slot in range(layout.slots):
            ep.view("flags", slot, torch.int32, 3, layout.world).zero_()
    return world
