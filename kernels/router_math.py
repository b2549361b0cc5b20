# SPDX-License-Identifier: Apache-2.0
"""Device helpers that the routing kernels share: scores and order-preserving integer keys.

All arithmetic is fp32. A key is an int32 with the order of the float it stands for, so that one
integer reduction finds a maximum; two values below every float's key mark experts that are out of
the question (``EXCLUDED``: padding, groups not chosen) and experts already taken (``TAKEN``).
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**31))
EXCLUDED = tl.constexpr(-(2**31) + 1)  # the key of -inf is far above both


@triton.jit
def sortable(x):
    """fp32 -> int32 of the same order. NaN counts as -inf."""
    x = tl.where(x == x, x, float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unsortable(key):
    """Inverse of sortable."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def softplus(x):
    """log(1 + e^x) with full relative precision; the hardware's log is too coarse near 1.

    log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3, whose series converges to fp32 in eight terms.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    w = z * z
    p = 1.0 / 15.0 + w * (1.0 / 17.0)
    p = 1.0 / 11.0 + w * (1.0 / 13.0 + w * p)
    p = 1.0 / 7.0 + w * (1.0 / 9.0 + w * p)
    p = 1.0 / 3.0 + w * (1.0 / 5.0 + w * p)
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + w * p)


@triton.jit
def pointwise_score(x, SCORE: tl.constexpr):
    """Score of each logit where it depends on that logit alone."""
    tl.static_assert(SCORE == "sigmoid" or SCORE == "sqrtsoftplus")
    if SCORE == "sigmoid":
        return tl.sigmoid(x)
    return tl.sqrt(softplus(x))
