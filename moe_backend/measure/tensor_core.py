# SPDX-License-Identifier: Apache-2.0
"""The experts as Hopper's tensor cores compute them: an oracle that rounds inside the MMA as well.

An FP8 MMA of Hopper does not add in fp32. One instruction takes 32 of K: every product and the
accumulator are shifted to the greatest exponent among them, cut off FRACTION bits below it, added
exactly, and the sum is cut to FRACTION bits. Kernels add four such instructions and promote the
result into fp32. ``reference`` adds exactly, so an intermediate close to a rounding boundary gets
another FP8 code there, a 6% step; against this oracle only mistakes of a kernel are left.

Needs a GPU: the products are formed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe_backend import reference
from moe_backend.types import Activation, ExpertWeights


@dataclass(frozen=True)
class Adder:
    """How an instruction adds. The defaults are Hopper's, shown by tests/kernels."""

    fraction: int = 13  # bits kept below the greatest exponent
    depth: int = 32  # of K in one addition


HOPPER = Adder()


@triton.jit
def _exponent(x):
    """Exponent of the leading bit of |x| as fp32 has it."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def _cut(x, bits):
    """x without the part below 2^bits, towards zero."""
    unit = ((bits + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - bits) << 23).to(tl.float32, bitcast=True)
    scaled = x * inverse
    return tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled)) * unit


@triton.jit
def _kernel(
    a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K,
    FRACTION: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """C = A · B^T for A [M, K], B [N, K]; scales [M, K/128] and [N/128, K/128], fp32 out."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, DEPTH)
    groups = tl.cdiv(K, 128)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(groups):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.static_range(128 // DEPTH):
            k = group * 128 + step * DEPTH + depth
            a = tl.load(
                a_ptr + m[:, None] * K + k[None, :],
                mask=(m < M)[:, None] & (k < K)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            b = tl.load(
                b_ptr + n[:, None] * K + k[None, :],
                mask=(n < N)[:, None] & (k < K)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            product = a[:, None, :] * b[None, :, :]
            # a product counts with the sum of its factors' exponents, subnormals with the least
            factors = (
                tl.maximum(_exponent(a), -6)[:, None, :] + tl.maximum(_exponent(b), -6)[None, :, :]
            )
            top = tl.max(tl.where(product == 0.0, -126, factors), axis=2)
            top = tl.maximum(top, _exponent(acc))
            lowest = tl.maximum(top - FRACTION, -126)
            acc = tl.sum(_cut(product, lowest[:, :, None]), axis=2) + _cut(acc, lowest)
            acc = _cut(acc, tl.maximum(_exponent(acc) - FRACTION, -126))
        a_scale = tl.load(as_ptr + m * groups + group, mask=m < M, other=0.0)
        b_scale = tl.load(bs_ptr + n // 128 * groups + group, mask=n < N, other=0.0)
        total += acc * (a_scale[:, None] * b_scale[None, :])
    at = c_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total, mask=(m < M)[:, None] & (n < N)[None, :])


def matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    adder: Adder = HOPPER,
) -> torch.Tensor:
    """fp32 [M, N] of e4m3 ``a`` [M, K] and ``b`` [N, K] with one scale per 128 of K (and of N)."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    _kernel[(triton.cdiv(m, 8), triton.cdiv(n, 32))](
        a.contiguous(), a_scale.contiguous(), b.contiguous(), b_scale.contiguous(), c, m, n, k,
        FRACTION=adder.fraction, DEPTH=adder.depth, BLOCK_M=8, BLOCK_N=32,
    )  # fmt: skip
    return c


def fused_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation | None = None,
    expert_map: torch.Tensor | None = None,
    shared_output: torch.Tensor | None = None,
    adder: Adder = HOPPER,
) -> torch.Tensor:
    """As reference.fused_experts, with the tensor cores' sums."""
    activation = activation or Activation()
    (num_tokens, top_k), inter = topk_ids.shape, weights.intermediate
    routes = reference.local_ids(topk_ids, weights.num_local_experts, expert_map).flatten()
    q, scale = reference.quant_fp8(x)
    rows = torch.zeros(num_tokens * top_k, x.shape[1], dtype=torch.bfloat16, device=x.device)
    for e in routes.unique().tolist():
        if e < 0:
            continue
        mine = (routes == e).nonzero().squeeze(1)
        token = mine // top_k
        gate, up = (
            matmul(q[token], scale[token], w, s, adder)
            for w, s in zip(weights.w13[e].split(inter), weights.w13_scale[e].chunk(2), strict=True)
        )
        h = reference.quant_fp8(reference.swiglu(gate, up, activation))
        rows[mine] = matmul(*h, weights.w2[e], weights.w2_scale[e], adder).bfloat16()
    return reference.unpermute_reduce(
        rows.view(num_tokens, top_k, x.shape[1]),
        topk_weights.masked_fill(routes.view_as(topk_ids) < 0, 0.0),
        shared_output,
    ).to(x.dtype)
