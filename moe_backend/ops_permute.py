# SPDX-License-Identifier: Apache-2.0
"""Permutation by expert as torch operators: our kernels on CUDA, the torch reference elsewhere.

An output that was not asked for is a tensor of no elements. Sizes are checked in functional.
"""

from __future__ import annotations

import torch

from moe_backend import ops_training as training
from moe_backend import reference_training as reference
from moe_backend.ops import operator


def _kernels(name: str):
    from importlib import import_module

    return import_module(f"moe_backend.kernels.{name}")


@operator(
    "row_map(Tensor map, int num_experts, int align) "
    "-> (Tensor row_map, Tensor offsets, Tensor pad_offsets, Tensor targets)"
)
def row_map(routing_map, num_experts, align):
    """From ids [T, k] if ``num_experts`` is given, else from a mask [T, E]."""
    if not training.on_kernels(routing_map):
        if num_experts:
            return reference.row_map_of_ids(routing_map, num_experts, align)
        return reference.row_map_of_mask(routing_map, align)
    if num_experts:
        return _kernels("row_map").row_map_of_ids(routing_map, num_experts, align)
    return _kernels("row_map").row_map_of_mask(routing_map, align)[0]


@torch.library.register_fake("moe_backend::row_map")
def _(routing_map, num_experts, align):
    rows, columns = routing_map.shape
    experts = num_experts or columns
    width = columns if num_experts else 2 * experts + 1

    def make(*shape, dtype=torch.int32):
        return routing_map.new_empty(shape, dtype=dtype)

    return make(rows, width), make(experts + 1), make(experts + 1), make(experts, dtype=torch.int64)


@operator(
    "permute_rows(Tensor x, Tensor row_map, int num_experts, SymInt capacity, Tensor? offsets, "
    "Tensor? pad_offsets, Tensor? scale, Tensor? probs) -> (Tensor out, Tensor scale, Tensor probs)"
)
def permute_rows(x, row_map, num_experts, capacity, offsets, pad_offsets, scale, probs):
    if training.on_kernels(x):
        out = _kernels("permute").permute(
            x, row_map, num_experts, capacity,
            offsets=offsets, pad_offsets=pad_offsets, scale=scale, probs=probs,
        )  # fmt: skip
        return training.present(*out, like=row_map)
    where = reference.routes(row_map, num_experts, pad_offsets)
    return training.present(
        reference.permute(x, where, capacity),
        None if scale is None else reference.permute(scale, where, capacity),
        None if probs is None else reference.permute_probs(probs, where, capacity),
        like=row_map,
    )


@torch.library.register_fake("moe_backend::permute_rows")
def _(x, row_map, num_experts, capacity, offsets, pad_offsets, scale, probs):
    return training.present(
        x.new_empty((capacity, x.shape[1])),
        None if scale is None else scale.new_empty((capacity, scale.shape[1])),
        None if probs is None else probs.new_empty(capacity),
        like=row_map,
    )


@operator(
    "permute_mask(Tensor x, Tensor mask, int align, SymInt capacity, Tensor? scale, Tensor? probs) "
    "-> (Tensor out, Tensor scale, Tensor probs, Tensor row_map, Tensor pad_offsets, "
    "Tensor targets)"
)
def permute_mask(x, mask, align, capacity, scale, probs):
    """row_map and permute_rows in one, two launches cheaper."""
    experts = mask.shape[1]
    if not training.on_kernels(x):
        row_map, offsets, pads, targets = reference.row_map_of_mask(mask, align)
        out = permute_rows(x, row_map, experts, capacity, offsets, pads, scale, probs)
        return *out, row_map, pads, targets
    where, pending = _kernels("row_map").row_map_of_mask(mask, align, assign=False)
    out = _kernels("permute").permute(
        x, pending, experts, capacity, offsets=where.offsets, pad_offsets=where.pad_offsets,
        scale=scale, probs=probs,
    )  # fmt: skip
    return *training.present(*out, like=mask), where.row_map, where.pad_offsets, where.targets


@torch.library.register_fake("moe_backend::permute_mask")
def _(x, mask, align, capacity, scale, probs):
    tokens, experts = mask.shape
    return (
        *training.present(
            x.new_empty((capacity, x.shape[1])),
            None if scale is None else scale.new_empty((capacity, scale.shape[1])),
            None if probs is None else probs.new_empty(capacity),
            like=mask,
        ),
        mask.new_empty((tokens, 2 * experts + 1), dtype=torch.int32),
        mask.new_empty(experts + 1, dtype=torch.int32),
        mask.new_empty(experts, dtype=torch.int64),
    )


@operator(
    "unpermute_rows(Tensor rows, Tensor row_map, int num_experts, Tensor? weight, "
    "Tensor? pad_offsets, Tensor? moved) -> (Tensor out, Tensor probs)"
)
def unpermute_rows(rows, row_map, num_experts, weight, pad_offsets, moved):
    if training.on_kernels(rows):
        out = _kernels("unpermute").unpermute(
            rows, row_map, num_experts, weight=weight, pad_offsets=pad_offsets, moved=moved
        )
        return training.present(*out, like=row_map)
    where = reference.routes(row_map, num_experts, pad_offsets)
    probs = None
    if moved is not None:
        probs = moved.new_zeros(row_map.shape[0], _width(row_map, num_experts))
        probs[where[0], where[1]] = moved[where[2]]
    out = reference.unpermute(rows, where, row_map.shape[0], weight)
    return training.present(out, probs, like=row_map)


def _width(row_map: torch.Tensor, num_experts: int) -> int:
    columns = row_map.shape[1]
    return num_experts if columns == 2 * num_experts + 1 else columns


@torch.library.register_fake("moe_backend::unpermute_rows")
def _(rows, row_map, num_experts, weight, pad_offsets, moved):
    tokens = row_map.shape[0]
    probs = None if moved is None else moved.new_empty((tokens, _width(row_map, num_experts)))
    return training.present(rows.new_empty((tokens, rows.shape[1])), probs, like=row_map)


@operator(
    "unpermute_rows_backward(Tensor grad, Tensor rows, Tensor row_map, int num_experts, "
    "Tensor weight, Tensor? pad_offsets) -> (Tensor grad_rows, Tensor grad_weight)"
)
def unpermute_rows_backward(grad, rows, row_map, num_experts, weight, pad_offsets):
    if training.on_kernels(rows):
        return _kernels("unpermute").unpermute_backward(
            grad, rows, row_map, num_experts, weight, pad_offsets
        )
    where = reference.routes(row_map, num_experts, pad_offsets)
    return reference.unpermute_backward(grad, rows, where, weight)


@torch.library.register_fake("moe_backend::unpermute_rows_backward")
def _(grad, rows, row_map, num_experts, weight, pad_offsets):
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


@operator("chunk_sources(Tensor split_sizes, Tensor order, SymInt num_rows) -> Tensor")
def chunk_sources(split_sizes, order, num_rows):
    home = _kernels("sort_chunks") if training.on_kernels(split_sizes) else reference
    return home.chunk_sources(split_sizes, order, num_rows)


@torch.library.register_fake("moe_backend::chunk_sources")
def _(split_sizes, order, num_rows):
    return split_sizes.new_empty(num_rows, dtype=torch.int32)


@operator(
    "sort_chunks(Tensor inp, Tensor source, Tensor? probs, bool back) -> (Tensor out, Tensor probs)"
)
def sort_chunks(inp, source, probs, back):
    if training.on_kernels(inp):
        out = _kernels("sort_chunks").sort_chunks(inp, source, probs, back=back)
        return training.present(*out, like=source)
    return training.present(*(_reorder(t, source, back) for t in (inp, probs)), like=source)


def _reorder(x: torch.Tensor | None, source: torch.Tensor, back: bool) -> torch.Tensor | None:
    if x is None:
        return None
    valid = source >= 0
    raw = x.view(torch.uint8) if x.itemsize == 1 else x
    out = torch.zeros_like(raw)
    if back:
        out[source[valid].long()] = raw[valid]
    else:
        out[valid] = raw[source[valid].long()]
    return out.view(x.dtype)


@torch.library.register_fake("moe_backend::sort_chunks")
def _(inp, source, probs, back):
    out = inp.new_empty(inp.shape)
    return training.present(
        out, None if probs is None else probs.new_empty(probs.shape), like=source
    )
