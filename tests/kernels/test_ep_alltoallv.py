# SPDX-License-Identifier: Apache-2.0
"""All-to-all-v through symmetric staging, several ranks in one process."""

import pytest
import torch
from ep_world import make_status, status
from moe_backend.kernels import ep_alltoallv
from moe_backend.kernels.ep_alltoallv import Staging
from moe_backend.kernels.ep_buffers import OVERFLOW, REFUSED, TIMEOUT

WORLD, CAPACITY = 3, 2048


def ends(device, world=WORLD):
    size = 2 * Staging.half_bytes(world, CAPACITY)
    buffers = [torch.full((size,), 0xAA, dtype=torch.uint8, device=device) for _ in range(world)]
    for b in buffers:
        for half in b.split(size // 2):
            half[Staging.flags_at(world) :][:256] = 0
    peers = torch.tensor([b.data_ptr() for b in buffers], device=device)
    clock = device != "cpu"
    patience = 50_000_000 if clock else 20
    return [
        Staging(
            world, r, CAPACITY, buffers[r], peers,
            torch.zeros(8, dtype=torch.int32, device=device), *make_status(device), patience, 2,
            clock,
        )
        for r in range(world)
    ]  # fmt: skip


def rows(source, counts, step, dtype, width):
    parts = [
        (torch.arange(n * width).view(n, width) + 7 * source + 3 * d + step) % 100
        for d, n in enumerate(counts)
    ]
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize(
    "dtype, width", [(torch.uint8, 3), (torch.bfloat16, 5), (torch.float32, 8)], ids=str
)
def test_rows_arrive_over_several_calls(dtype, width, device):
    """More calls than halves: staging is used again without any reset."""
    world = ends(device)
    row_bytes = width * dtype.itemsize
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        counts = torch.randint(0, 9, (WORLD, WORLD), generator=g)
        counts[step % WORLD] = 0
        on_device = counts.to(device)
        sends = [rows(r, counts[r].tolist(), step, dtype, width).to(device) for r in range(WORLD)]
        recvs = [torch.zeros(30, width).to(dtype).to(device) for _ in world]
        got = [torch.zeros(WORLD, dtype=torch.int32, device=device) for _ in world]
        for end, send, n, recv in zip(world, sends, on_device, recvs, strict=True):
            ep_alltoallv.put(end, send, n, recv, row_bytes, 1)
        for end, recv, n in zip(world, recvs, got, strict=True):
            ep_alltoallv.take(end, recv, n, row_bytes, 1)
        for me, (recv, n) in enumerate(zip(recvs, got, strict=True)):
            assert n.tolist() == counts[:, me].tolist() and int(world[me].status) == 0
            want = [s.split(c.tolist())[me] for s, c in zip(sends, counts, strict=True)]
            want = torch.cat(want)
            assert torch.equal(recv[: len(want)].view(torch.uint8), want.view(torch.uint8))
            assert not recv[len(want) :].float().any()


@pytest.mark.parametrize(
    "case, code, culprit",
    [
        ("recv too small", OVERFLOW, 2),
        ("staging too small", REFUSED, 1),
        ("row sizes differ", REFUSED, 1),
        ("silent rank", TIMEOUT, 1),
    ],
)
def test_every_rank_sees_what_is_wrong_and_copies_nothing(case, code, culprit, device):
    world = ends(device)
    small = case == "recv too small"
    recvs = [torch.zeros(5 if small and r == 2 else 600, 1, device=device) for r in range(3)]
    for r, end in enumerate(world):
        odd = r == 1
        if odd and case == "silent rank":
            continue
        n = 513 if odd and case == "staging too small" else 2
        send, counts = torch.ones(3 * n, 1, device=device), torch.full((3,), n, device=device)
        size = 8 if odd and case == "row sizes differ" else 4
        ep_alltoallv.put(end, send, counts, recvs[r], size, 1)
    for r, end in enumerate(world):
        if case == "silent rank" and r == culprit:
            continue
        ep_alltoallv.take(end, recvs[r], torch.zeros(3, dtype=torch.int64, device=device), 4, 1)
        assert not recvs[r].any()
        if case != "row sizes differ" or r != culprit:
            assert status(end) == (code, 0, culprit)
