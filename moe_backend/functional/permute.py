# SPDX-License-Identifier: Apache-2.0
"""Rows by expert and back.

A row map is made by a permutation and read by its inverse; treat it as opaque. On the GPU no count
is read back: where more rows are routed than ``num_out_tokens`` holds, every row of the result is
NaN and nothing is written out of bounds. On the CPU the same raises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_backend.functional.checks import (
    FLOATS,
    expect,
    expect_device,
    expect_float,
    expect_shape,
)
from moe_backend.functional.permute_grad import Permute, SortChunks, Unpermute, operators
from moe_backend.support import MAX_EXPERTS
from moe_backend.types import BLOCK, FP8, cdiv

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Fp8Rows(NamedTuple):
    """FP8 rows with the scales that travel with them."""

    data: torch.Tensor  # [num_rows, hidden] float8_e4m3fn
    scale: torch.Tensor  # [num_rows, ceil(hidden / 128)] fp32


def _rows(inp: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor of rows and, for FP8, its scales."""
    data, scale = inp if isinstance(inp, Fp8Rows) else (inp, None)
    expect("inp", data.dim() == 2, "[num_tokens, hidden]", f"shape {tuple(data.shape)}")
    if scale is not None:
        expect("inp.data", data.dtype is FP8, "dtype float8_e4m3fn", data.dtype)
        expect("inp.scale", scale.dtype is torch.float32, "dtype float32", scale.dtype)
        expect_shape("inp.scale", scale, (data.shape[0], cdiv(data.shape[1], BLOCK)))
        expect_device("inp.scale", scale, data.device)
    else:
        ok = data.dtype in (*FLOATS, FP8)
        expect("inp", ok, "dtype float32, bfloat16, float16 or float8_e4m3fn", data.dtype)
    return data, scale


def _check_map(data: torch.Tensor, routing_map: torch.Tensor, kind: str) -> None:
    expect("map_type", kind in ("mask", "index"), "'mask' or 'index'", repr(kind))
    shape = tuple(routing_map.shape)
    ok = routing_map.dim() == 2 and shape[0] == data.shape[0] and shape[1] >= 1
    columns = "num_experts" if kind == "mask" else "topk"
    expect("routing_map", ok, f"shape ({data.shape[0]}, {columns})", shape)
    expect("routing_map", routing_map.dtype in _INTEGERS, "bool or integers", routing_map.dtype)
    expect_device("routing_map", routing_map, data.device)


def _readable(tensor: torch.Tensor) -> bool:
    """Whether values can be checked: without a host sync, and not while tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _routed(routing_map: torch.Tensor, kind: str) -> torch.Tensor:
    return (routing_map >= 0 if kind == "index" else routing_map != 0).sum()


def _capacity(routing_map: torch.Tensor, kind: str, num_out_tokens: int | None) -> int:
    """Rows of the result; reads the count back only where nothing else is known."""
    if num_out_tokens is None or num_out_tokens < 0:
        return routing_map.numel() if kind == "index" else int(_routed(routing_map, kind))
    if _readable(routing_map):
        routed = int(_routed(routing_map, kind))
        expect("num_out_tokens", routed <= num_out_tokens, f"at least {routed}", num_out_tokens)
    return num_out_tokens


def _total(counts: torch.Tensor | None) -> int:
    return 0 if counts is None else int(counts.sum())


def _permute(inp, probs, routing_map, kind, align, capacity):
    data, scale = _rows(inp)
    # the largest index is not read back
    experts = 0 if kind == "mask" else max(MAX_EXPERTS, routing_map.shape[1])
    out, out_scale, out_probs, row_map, pads, targets = Permute.apply(
        data, probs, scale, routing_map, experts, align, capacity
    )
    return out if scale is None else Fp8Rows(out, out_scale), out_probs, row_map, pads, targets


def moe_permute(
    inp: torch.Tensor | Fp8Rows,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """Rows ordered by expert, each token once per route, and the row map.

    Args:
        inp: ``[num_tokens, hidden]`` fp32, bf16, fp16 or FP8; :class:`Fp8Rows` take scales along.
        routing_map: mask ``[num_tokens, num_experts]`` (not zero = routed) or indices
            ``[num_tokens, topk]`` (−1 = absent).
        num_out_tokens: rows of the result; −1 counts a mask (a host sync on the GPU). Rows
            without a route are zero.
        max_token_num: accepted for compatibility; nothing is sized by it.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    data, _ = _rows(inp)
    _check_map(data, routing_map, map_type)
    capacity = _capacity(routing_map, map_type, num_out_tokens)
    rows, _, row_map, _, _ = _permute(inp, None, routing_map, map_type, 1, capacity)
    return rows, row_map


def _check_probs(probs: torch.Tensor, routing_map: torch.Tensor) -> None:
    expect_float("probs", probs)
    expect_shape("probs", probs, tuple(routing_map.shape))
    expect_device("probs", probs, routing_map.device)


def moe_permute_with_probs(
    inp: torch.Tensor | Fp8Rows,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor]:
    """:func:`moe_permute` by mask, with ``probs [num_tokens, num_experts]`` at their rows.

    Returns rows, permuted probs ``[num_out_tokens]`` and the row map; differentiable in both.
    """
    data, _ = _rows(inp)
    _check_map(data, routing_map, "mask")
    _check_probs(probs, routing_map)
    capacity = _capacity(routing_map, "mask", num_out_tokens)
    rows, out_probs, row_map, _, _ = _permute(inp, probs, routing_map, "mask", 1, capacity)
    return rows, out_probs, row_map


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor | Fp8Rows,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`moe_permute_with_probs`, every expert beginning at a multiple of ``align_size``.

    Args:
        tokens_per_expert: ``[num_experts]`` integers on the CPU or on inp's device.
        num_out_tokens: rows of the result. None adds up the padded counts, which is a host sync
            if they are on the GPU; ``num_tokens * topk + num_experts * (align_size - 1)`` always
            suffices.

    Returns:
        rows, permuted probs, row map, pad offsets ``[num_experts]`` for :func:`moe_unpermute`, and
        the padded tokens per expert on the device of ``tokens_per_expert``. Rows without a route
        are zero.
    """
    data, _ = _rows(inp)
    _check_map(data, routing_map, "mask")
    _check_probs(probs, routing_map)
    expect("align_size", align_size >= 1, "at least 1", align_size)
    expect_shape("tokens_per_expert", tokens_per_expert, (routing_map.shape[1],))
    integers = tokens_per_expert.dtype in _INTEGERS
    expect("tokens_per_expert", integers, "integers", tokens_per_expert.dtype)
    home = tokens_per_expert.device
    near = home.type == "cpu" or home == data.device
    expect("tokens_per_expert", near, f"device cpu or {data.device}", home)
    given = None  # the padded counts, where they must be known before or elsewhere
    if num_out_tokens is None or home != data.device or home.type == "cpu":
        given = (tokens_per_expert.long() + align_size - 1) // align_size * align_size
    capacity = num_out_tokens if num_out_tokens is not None else _total(given)
    if _readable(routing_map):
        counts = (routing_map != 0).sum(0)
        needed = int(((counts + align_size - 1) // align_size * align_size).sum())
        expect("num_out_tokens", needed <= capacity, f"at least {needed}", capacity)
    rows, out_probs, row_map, pads, targets = _permute(
        inp, probs, routing_map, "mask", align_size, capacity
    )
    return rows, out_probs, row_map, pads[:-1], targets if given is None else given


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: tuple[int, ...] | torch.Size | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens ``[num_tokens, hidden]`` as sums of their rows, weighted by ``merging_probs``.

    Args:
        inp: ``[num_rows, hidden]`` fp32, bf16 or fp16; sums are fp32, in the order of the routes.
        row_id_map: from the permutation, which also says how many tokens there are.
        merging_probs: ``[num_tokens, num_experts]`` (mask) or ``[num_tokens, topk]`` (index).
        restore_shape: checked if given.
        probs: older name of ``merging_probs``.
        pad_offsets: from :func:`moe_permute_and_pad_with_probs`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    expect("map_type", map_type in ("mask", "index"), "'mask' or 'index'", repr(map_type))
    expect("inp", inp.dim() == 2, "[num_rows, hidden]", f"shape {tuple(inp.shape)}")
    expect_float("inp", inp)
    ok = row_id_map.dim() == 2 and row_id_map.dtype is torch.int32
    expect("row_id_map", ok, "int32 of two axes", f"{row_id_map.dtype} {tuple(row_id_map.shape)}")
    expect_device("row_id_map", row_id_map, inp.device)
    tokens, columns = row_id_map.shape
    odd = map_type == "index" or columns % 2 == 1
    expect("row_id_map", odd, "the map of a mask", f"{columns} columns")
    # an index map says nothing of experts: any number that makes it no mask's
    experts = columns + 1 if map_type == "index" else columns // 2
    weight = merging_probs if merging_probs is not None else probs
    if weight is not None:
        expect_float("merging_probs", weight)
        width = columns if map_type == "index" else experts
        expect_shape("merging_probs", weight, (tokens, width))
        expect_device("merging_probs", weight, inp.device)
    if restore_shape is not None:
        shape = (tokens, inp.shape[1])
        expect("restore_shape", tuple(restore_shape) == shape, str(shape), tuple(restore_shape))
    if pad_offsets is not None:
        expect_shape("pad_offsets", pad_offsets, (experts,))
        expect_device("pad_offsets", pad_offsets, inp.device)
        pad_offsets = pad_offsets.to(torch.int32)
    return Unpermute.apply(inp, weight, row_id_map.contiguous(), pad_offsets, experts)


def _sources(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor):
    for name, tensor in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        expect(name, tensor.dim() == 1, "one axis", f"shape {tuple(tensor.shape)}")
        expect(name, tensor.dtype in _INTEGERS[1:], "integers", tensor.dtype)
    expect_shape("sorted_index", sorted_index, tuple(split_sizes.shape))
    if _readable(split_sizes):
        total = int(split_sizes.sum())
        expect("split_sizes", total <= inp.shape[0], f"at most {inp.shape[0]} rows", total)
    sizes = split_sizes.to(inp.device, non_blocking=True)
    order = sorted_index.to(inp.device, non_blocking=True)
    return operators().chunk_sources(sizes, order, inp.shape[0])


def moe_sort_chunks_by_index(
    inp: torch.Tensor | Fp8Rows, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor | Fp8Rows:
    """Chunks of ``split_sizes`` rows in the order ``sorted_index``; differentiable.

    Sizes and order may be on the CPU or on inp's device.
    """
    data, scale = _rows(inp)
    source = _sources(data, split_sizes, sorted_index)
    out, _ = SortChunks.apply(data, None, source)
    if scale is None:
        return out
    return Fp8Rows(out, SortChunks.apply(scale, None, source)[0])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor | Fp8Rows,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """:func:`moe_sort_chunks_by_index` with ``probs [num_rows]`` that travel along."""
    data, scale = _rows(inp)
    expect_float("probs", probs)
    expect_shape("probs", probs, (data.shape[0],))
    expect_device("probs", probs, data.device)
    source = _sources(data, split_sizes, sorted_index)
    out, out_probs = SortChunks.apply(data, probs, source)
    if scale is None:
        return out, out_probs
    return Fp8Rows(out, SortChunks.apply(scale, None, source)[0]), out_probs
