# SPDX-License-Identifier: Apache-2.0
"""Permutation and its inverse, padded, beside vLLM's operators and beside two separate steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moe_backend import reference, reference_training
from moe_backend.measure import family

TOKENS = (1024, 4096, 16384)
EXPERTS, TOP_K, HIDDEN, ALIGN = 256, 8, 7168, 128


class Layer:
    """Inputs of one number of tokens and what the kernels made of their routing."""

    def __init__(self, tokens: int, fp8: bool):
        from moe_backend.kernels.row_map import row_map_of_mask

        noise = torch.rand(tokens, EXPERTS, device="cuda")
        self.tokens, self.fp8 = tokens, fp8
        self.ids = noise.topk(TOP_K).indices.int()
        self.mask = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, self.ids.long(), True)
        self.probs = torch.rand(tokens, EXPERTS, device="cuda")
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.x: torch.Tensor = x
        self.scale: torch.Tensor | None = None
        if fp8:
            self.x, self.scale = reference.quant_fp8(x)
        self.where, _ = row_map_of_mask(self.mask, ALIGN)
        self.capacity = int(self.where.targets.sum())
        self.routed = tokens * TOP_K
        self.row_bytes = HIDDEN * self.x.itemsize + (4 * HIDDEN // 128 if fp8 else 0)

        order = self.routes(padded=False)[2].argsort()
        self.padded_rows = self.routes()[2][order]

    def routes(self, padded: bool = True):
        pads = self.where.pad_offsets if padded else None
        return reference_training.routes(self.where.row_map, EXPERTS, pads)


def permute_pad(layer: Layer, padded: bool = True):
    """Map and permutation, as a training step calls them: no host sync."""
    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_mask

    where, pending = row_map_of_mask(layer.mask, ALIGN if padded else 1, assign=False)
    return permute(
        layer.x, pending, EXPERTS, layer.capacity if padded else layer.routed,
        offsets=where.offsets, pad_offsets=where.pad_offsets, scale=layer.scale, probs=layer.probs,
    )  # fmt: skip


def permute_then_pad(layer: Layer) -> None:
    """The same in two steps: our permutation without padding, then a padded copy by torch."""
    for part in permute_pad(layer, padded=False):
        if part is not None:
            raw = part.view(torch.uint8) if part.itemsize == 1 else part
            target = raw.new_zeros(layer.capacity, *raw.shape[1:])
            target.index_copy_(0, layer.padded_rows, raw)


def _same_bytes(name: str, out: torch.Tensor, want: torch.Tensor) -> str | None:
    if out.itemsize == 1:
        out, want = out.view(torch.uint8), want.view(torch.uint8)
    return family.differs(name, out, want, 0)


def _check_permute(layer: Layer) -> str | None:
    out, routes = permute_pad(layer), layer.routes()
    wrong = _same_bytes(
        "output", out.out, reference_training.permute(layer.x, routes, layer.capacity)
    ) or _same_bytes(
        "probs", out.probs, reference_training.permute_probs(layer.probs, routes, layer.capacity)
    )
    if layer.scale is not None and not wrong:
        want = reference_training.permute(layer.scale, routes, layer.capacity)
        return _same_bytes("scale", out.scale, want)
    return wrong


def _vllm_permute(layer: Layer):
    if family.vllm_operators() is None:
        return {}
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_permute

    return {"vLLM": [lambda: moe_permute(layer.x, layer.scale, layer.ids, EXPERTS)]}


def permute_cases(tokens: int, fp8: bool) -> Iterator[family.Case]:
    layer = Layer(tokens, fp8)
    kind = "FP8+scales" if fp8 else "bf16"
    yield family.Case(
        f"permute+pad {kind}", f"{tokens}",
        {
            "ours": [lambda: permute_pad(layer)],
            "in two steps": [lambda: permute_then_pad(layer)],
            **_vllm_permute(layer),
        },
        (tokens + layer.capacity) * layer.row_bytes + tokens * EXPERTS + 8 * layer.routed,
        lambda: _check_permute(layer),
        "80% of copy; >=1x vLLM (unpadded); >=1.5x two steps",
    )  # fmt: skip

    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_ids

    def by_ids():
        where = row_map_of_ids(layer.ids, EXPERTS)
        return permute(
            layer.x, where.row_map, EXPERTS, layer.routed, offsets=where.offsets, scale=layer.scale
        )

    def check() -> str | None:
        routes = reference_training.routes(
            row_map_of_ids(layer.ids, EXPERTS).row_map, EXPERTS, None
        )
        want = reference_training.permute(layer.x, routes, layer.routed)
        return _same_bytes("output", by_ids().out, want)

    yield family.Case(
        f"permute by ids {kind}", f"{tokens}", {"ours": [by_ids], **_vllm_permute(layer)},
        (tokens + layer.routed) * layer.row_bytes, check, ">=1x vLLM",
    )  # fmt: skip


def unpermute_cases(tokens: int) -> Iterator[family.Case]:
    from moe_backend.kernels.unpermute import unpermute, unpermute_backward

    layer = Layer(tokens, fp8=False)
    where = layer.where
    rows = torch.randn(layer.capacity, HIDDEN, device="cuda").bfloat16()

    def ours():
        return unpermute(
            rows, where.row_map, EXPERTS, weight=layer.probs, pad_offsets=where.pad_offsets
        )[0]

    def check() -> str | None:
        want = reference_training.unpermute(rows, layer.routes(), tokens, layer.probs)
        return family.differs("output", ours(), want, 0.2)  # bf16 of sums near 10, other order

    calls = {
        "ours": [ours],
        "in two steps": [
            lambda: unpermute(rows[layer.padded_rows], where.row_map, EXPERTS, weight=layer.probs)
        ],
    }
    if family.vllm_operators() is not None:
        from vllm.model_executor.layers.fused_moe import moe_permute_unpermute as vllm

        permuted, _, offset, inverse, _ = vllm.moe_permute(layer.x, None, layer.ids, EXPERTS)
        weights = torch.rand(tokens, TOP_K, device="cuda")
        out = torch.empty_like(layer.x)
        calls["vLLM"] = [lambda: vllm.moe_unpermute(out, permuted, weights, inverse, offset)]
    bytes_moved = (tokens + layer.routed) * layer.row_bytes
    yield family.Case(
        "unpermute+unpad bf16", f"{tokens}", calls, bytes_moved, check,
        "90% of copy at 16384; >=1.7x two steps",
    )  # fmt: skip
    grad = torch.randn_like(layer.x)
    backward = [
        lambda: unpermute_backward(
            grad, rows, where.row_map, EXPERTS, layer.probs, where.pad_offsets
        )
    ]
    both = bytes_moved + layer.capacity * layer.row_bytes
    yield family.Case("unpermute backward", f"{tokens}", {"ours": backward}, both, check)


def cases(tokens: Sequence[int] = TOKENS) -> Iterator[family.Case]:
    for count in tokens:
        for fp8 in (False, True):
            yield from permute_cases(count, fp8)
        yield from unpermute_cases(count)


def run(tokens: Sequence[int] = TOKENS) -> Iterator[family.Row]:
    """A row per operation and size, as each is done."""
    return family.run(cases(tokens))
