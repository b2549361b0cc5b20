# SPDX-License-Identifier: Apache-2.0
"""All-to-all-v over gloo with four processes: exact rows, errors on every rank."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from moe_backend.distributed import EPMismatch, EPOverflow, alltoallv, open_backend

WORLD = 4
CASES = {
    "even": [[2, 2, 2, 2]] * 4,
    "uneven": [[0, 5, 1, 3], [7, 0, 0, 2], [1, 1, 1, 1], [0, 0, 9, 0]],
    "nobody sends": [[0] * 4] * 4,
    "all to one": [[0, 0, 6, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
}


def _row(source, destination, i, shape, dtype):
    code = source * 37 + destination * 11 + i * 3 + torch.arange(shape.numel()).view(shape)
    return (code % 120).to(dtype)


def _exchange(rank, world, counts, dtype, shape, backend):
    shape = torch.Size(shape)
    mine = counts[rank]
    rows = [_row(rank, d, i, shape, dtype) for d in range(world) for i in range(mine[d])]
    send = torch.stack(rows) if rows else torch.empty((0, *shape), dtype=dtype)
    want_counts = [counts[s][rank] for s in range(world)]
    want = [_row(s, rank, i, shape, dtype) for s in range(world) for i in range(want_counts[s])]
    recv = torch.zeros((sum(want_counts) + 3, *shape)).to(dtype)
    recv_counts = torch.full((world,), -1, dtype=torch.int32)
    alltoallv(send, torch.tensor(mine), recv, recv_counts, backend=backend)
    assert recv_counts.tolist() == want_counts
    landed, rest = _bits(recv[: len(want)]), _bits(recv[len(want) :])
    assert not want or torch.equal(landed, _bits(torch.stack(want)))
    assert not rest.any(), "rows beyond the received ones were touched"


def _bits(rows):
    return rows.flatten().view(torch.uint8)


DTYPES = [torch.uint8, torch.int16, torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn]


def _all_cases(rank, world):
    backend = open_backend("gloo")
    for counts in CASES.values():
        for dtype, shape in zip(DTYPES, [(1,), (3,), (2, 5), (7,), (128,), (33,)], strict=True):
            _exchange(rank, world, counts, dtype, shape, backend)
    _exchange(rank, world, CASES["uneven"], torch.float32, (), "gloo")
    _exchange(rank, world, CASES["uneven"], torch.float32, (0,), "gloo")
    return True


def test_any_dtype_row_size_and_counts():
    assert all(run_ranks(_all_cases, WORLD))


def _overlapping_groups(rank, world):
    """Two groups that share ranks 1 and 2, in use alternately."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])]
    members = zip(groups, ([0, 1, 2], [1, 2, 3]), strict=True)
    mine = [(group, ranks) for group, ranks in members if rank in ranks]
    for round_ in range(20):
        for group, ranks in mine:
            send = torch.tensor([[rank, peer, round_] for peer in ranks], dtype=torch.int32)
            recv, counts = torch.zeros_like(send), torch.zeros(3, dtype=torch.int64)
            alltoallv(send, torch.ones(3, dtype=torch.int64), recv, counts, group=group)
            assert recv.tolist() == [[peer, rank, round_] for peer in ranks]


def test_overlapping_groups():
    run_ranks(_overlapping_groups, WORLD)


CASES_OF_ONE_RANK = {
    "row size": "row size is 16 on rank 0 and 24 on rank 1",
    "dtype": "dtype is torch.float32 on rank 0 and torch.int32 on rank 2",
    "counts": "rank 3: send_counts: expected at most the 8 rows of send, found [3, 3, 3, 3]",
    "argument": "rank 0: send_counts: expected int32 or int64 of shape (4,), found",
    "capacity": "rank 2 would receive 8 rows and its recv holds 7",
}


def _raises(rank, world):
    said = {}
    backend = open_backend("gloo", timeout_s=10)
    for case in CASES_OF_ONE_RANK:
        send, recv = torch.zeros(8, 4), torch.zeros(8, 4)
        counts, got = torch.full((world,), 2), torch.zeros(world, dtype=torch.int64)
        if case == "row size" and rank == 1:
            send, recv = torch.zeros(8, 6), torch.zeros(8, 6)
        if case == "dtype" and rank == 2:
            send, recv = send.int(), recv.int()
        if case == "counts" and rank == 3:
            counts = torch.full((world,), 3)
        if case == "argument" and rank == 0:
            counts = counts.float()
        if case == "capacity" and rank == 2:
            recv = torch.zeros(7, 4)
        with pytest.raises((EPMismatch, EPOverflow)) as raised:
            alltoallv(send, counts, recv, got, backend=backend)
        said[case] = str(raised.value)
        assert not recv.any()
        # the transport survives an error that every rank has seen
        one = torch.ones(world, dtype=torch.int64)
        alltoallv(torch.ones(world, 1), one, torch.zeros(world, 1), got, backend=backend)
        assert got.tolist() == [1] * world
    return said


def test_an_error_of_one_rank_is_raised_on_all():
    for said in run_ranks(_raises, WORLD):
        for case, expected in CASES_OF_ONE_RANK.items():
            assert expected in said[case]


def test_an_unknown_backend_is_named():
    message = run_ranks(_unknown, 1)[0]
    assert "expected one of gloo, nccl, symm, found 'mpi'" in message


def _unknown(rank, world):
    try:
        open_backend("mpi")
    except ValueError as error:
        return str(error)
