# SPDX-License-Identifier: Apache-2.0
"""All-to-all-v: every rank sends each other rank a number of rows of its own."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from moe_backend.distributed.agreement import agree
from moe_backend.distributed.backend import Backend, shared_backend
from moe_backend.distributed.errors import EPOverflow

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
)  # fmt: skip


def alltoallv(
    send: torch.Tensor,
    send_counts: torch.Tensor,
    recv: torch.Tensor,
    recv_counts: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    backend: str | Backend = "gloo",
) -> None:
    """Sends rows to every rank and receives theirs, ordered by rank.

    Args:
        send: ``[rows, ...]`` of any dtype, contiguous: first the rows for rank 0, then rank 1's ...
        send_counts: ``[world_size]`` int32 or int64, rows for each rank; zeros are fine.
        recv: ``[capacity, ...]``, same dtype and row shape; what was received comes first, the
            rest is left as it is.
        recv_counts: ``[world_size]`` int32 or int64; filled with the rows from each rank.
        group: with a backend's name, the ranks that take part; defaults to the world.
        backend: "gloo", "nccl", "symm", or what :func:`open_backend` returned.

    Raises:
        EPMismatch: the ranks' rows differ, or one rank's arguments are wrong. On every rank.
        EPOverflow: more rows than some rank's ``recv`` holds. On every rank, nothing has moved.
        EPTimeout: a rank did not answer.

    ``symm`` reads and writes counts on the device and reports errors at its next call or
    ``check()``.
    """
    opened = shared_backend(backend, group) if isinstance(backend, str) else backend
    opened.alltoallv(send, send_counts, recv, recv_counts)


def problem_of(
    send: torch.Tensor,
    send_counts: torch.Tensor,
    recv: torch.Tensor,
    recv_counts: torch.Tensor,
    world_size: int,
) -> str:
    """What is wrong with one rank's arguments, or nothing; reads no values."""
    for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if counts.shape != (world_size,) or counts.dtype not in (torch.int32, torch.int64):
            return (
                f"{name}: expected int32 or int64 of shape ({world_size},), found "
                f"{counts.dtype} of shape {tuple(counts.shape)}"
            )
    for name, rows in (("send", send), ("recv", recv)):
        if rows.dim() < 1 or not rows.is_contiguous() or rows.dtype not in DTYPES:
            return (
                f"{name}: expected contiguous rows, found {rows.dtype} of shape "
                f"{tuple(rows.shape)} with strides {rows.stride()}"
            )
    if recv.dtype is not send.dtype or recv.shape[1:] != send.shape[1:]:
        return (
            f"recv: expected rows of {send.dtype} {tuple(send.shape[1:])} as in send, found "
            f"{recv.dtype} {tuple(recv.shape[1:])}"
        )
    return ""


def row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """``[rows, row_bytes]`` uint8 over the same memory."""
    return rows.view(rows.shape[0], -1).view(torch.uint8) if rows.numel() else _no_bytes(rows)


def _no_bytes(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty((rows.shape[0], row_bytes(rows)), dtype=torch.uint8, device=rows.device)


def through_host(backend: Backend, send, send_counts, recv, recv_counts) -> None:
    """All-to-all-v of the transports whose counts the host reads."""
    problem = problem_of(send, send_counts, recv, recv_counts, backend.world_size)
    counts = [0] * backend.world_size if problem else send_counts.tolist()
    if not problem and (min(counts) < 0 or sum(counts) > send.shape[0]):
        problem = f"send_counts: expected at most the {send.shape[0]} rows of send, found {counts}"
    fields = {"row size": row_bytes(send), "dtype": 0}
    fields["dtype"] = DTYPES.index(send.dtype) if send.dtype in DTYPES else 0
    every = agree(
        backend,
        "alltoallv",
        fields,
        problem=problem,
        extra=[recv.shape[0] if recv.dim() else 0, *counts][: backend.world_size + 1],
        labels={"dtype": DTYPES},
    )
    received = [theirs[1 + backend.rank] for theirs in every]
    _check_capacity(every)
    sent = as_bytes(send)[: sum(counts)]
    landed = as_bytes(recv)[: sum(received)]
    if fields["row size"]:
        backend.exchange(sent, counts, landed, received, "alltoallv rows")
    recv_counts.copy_(torch.tensor(received))


def _check_capacity(every: list[list[int]]) -> None:
    for rank, (capacity, *_) in enumerate(every):
        total = sum(theirs[1 + rank] for theirs in every)
        if total > capacity:
            raise EPOverflow(
                f"alltoallv: rank {rank} would receive {total} rows and its recv holds {capacity}. "
                "Nothing was sent; give that rank a larger recv"
            )
