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


@triton.jit
def columns(E: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Expert of each column and whether there is one; groups stand apart at powers of two."""
    col = tl.arange(0, GROUPS * GROUP)
    per_group: tl.constexpr = E // NUM_GROUPS
    expert = (col // GROUP) * per_group + col % GROUP
    return expert, (col % GROUP < per_group) & (col // GROUP < NUM_GROUPS)


@triton.jit
def _best_two(first, second, other_first, other_second):
    """The two largest of two falling pairs."""
    lower = tl.minimum(first, other_first)
    return tl.maximum(first, other_first), tl.maximum(lower, tl.maximum(second, other_second))


@triton.jit
def _group_totals(grouped, CANDIDATES: tl.constexpr):
    """Sum of each group's best keys, as floats, the largest first. grouped [GROUPS, GROUP]."""
    if CANDIDATES == 2:
        nothing = tl.full(grouped.shape, EXCLUDED, tl.int32)
        first, second = tl.reduce((grouped, nothing), 1, _best_two)
        return unsortable(first) + unsortable(second)
    member = tl.arange(0, grouped.shape[1])[None, :]
    total = tl.zeros([grouped.shape[0]], tl.float32)
    for c in tl.static_range(CANDIDATES):
        best = tl.max(grouped, 1)
        total += unsortable(best)
        if c + 1 < CANDIDATES:
            at = tl.min(tl.where(grouped == best[:, None], member, grouped.shape[1]), 1)
            grouped = tl.where(member == at[:, None], TAKEN, grouped)
    return total


@triton.jit
def keep_best_groups(
    keys, num_groups,
    TOP_GROUPS: tl.constexpr, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """keys [GROUPS * GROUP] of one row with those of the groups not chosen EXCLUDED."""
    grouped = tl.reshape(keys, [GROUPS, GROUP])
    group = tl.arange(0, GROUPS)
    total = _group_totals(grouped, CANDIDATES)
    total = tl.where(group < num_groups, sortable(total), EXCLUDED)
    if GROUPS <= 32:  # a group's rank is the number of groups before it
        equal = (total[None, :] == total[:, None]) & (group[None, :] < group[:, None])
        before = (total[None, :] > total[:, None]) | equal
        kept = tl.sum(before.to(tl.int32), 1) < TOP_GROUPS
    else:
        # (total, lowest group first) as one integer: one reduction a step, no two alike
        order = (total.to(tl.int64) << 32) | (GROUPS - group).to(tl.int64)
        last = tl.max(order, 0)
        for _ in range(TOP_GROUPS - 1):
            last = tl.max(tl.where(order < last, order, -0x8000000000000000), 0)
        kept = order >= last
    return tl.reshape(tl.where(kept[:, None], grouped, EXCLUDED), [GROUPS * GROUP])


@triton.jit
def _middle(low, high):
    """Floor of the mean of two integers; never overflows."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _raise_low(values, low, high, K: tl.constexpr):
    """The largest bound found by bisection that at least K values reach, and how many do.

    ``low`` must be such a bound and ``high`` none. Stops as soon as exactly K reach the bound.
    """
    reach = tl.sum((values >= low).to(tl.int32), 0)
    middle = _middle(low, high)
    while (middle != low) & (reach != K):
        count = tl.sum((values >= middle).to(tl.int32), 0)
        low = tl.where(count >= K, middle, low)
        reach = tl.where(count >= K, count, reach)
        high = tl.where(count >= K, high, middle)
        middle = _middle(low, high)
    return low, reach


@triton.jit
def select_top(keys, K: tl.constexpr):
    """Which K of one row's keys are the largest, ties to the lowest column: bool like keys.

    A bound that K keys reach is sought by bisection of the keys' integer range, first among the
    largest keys of K or more chunks, which costs a lane one comparison a pass, then among all.
    Random scores need about six and four passes, ties at most 32: at 36 of 2,304 experts a
    fraction of 36 maximum reductions. Only where more than K reach the bound at last does another
    bisection find the column of the last of the tied that is wanted.
    """
    WIDTH: tl.constexpr = keys.shape[0]
    CHUNKS: tl.constexpr = 32 if K <= 32 else (64 if K <= 64 else 128)
    high = tl.max(keys, 0) + 1
    if K > CHUNKS or WIDTH < 128:
        low = tl.min(keys, 0)
    else:
        chunks = tl.reshape(keys, [WIDTH // 128, CHUNKS, 128 // CHUNKS])
        largest = tl.max(tl.max(chunks, 0), 1)
        low, reach = _raise_low(largest, tl.min(largest, 0), high, K)
    low, reach = _raise_low(keys, low, high, K)
    last = WIDTH
    if reach != K:
        col = tl.arange(0, WIDTH)
        wanted = K - tl.sum((keys > low).to(tl.int32), 0)
        first = -1  # fewer than wanted stand up to this column
        while last - first > 1:
            middle = _middle(first, last)
            ties = tl.sum(((keys == low) & (col <= middle)).to(tl.int32), 0)
            last = tl.where(ties >= wanted, middle, last)
            first = tl.where(ties >= wanted, first, middle)
    return (keys > low) | ((keys == low) & (tl.arange(0, WIDTH) <= last))


@triton.jit
def pack_bits(chosen):
    """bool [WIDTH] -> uint8 [WIDTH / 8], the lowest column in the lowest bit."""
    bits = tl.reshape(chosen.to(tl.int32), [chosen.shape[0] // 8, 8])
    return tl.sum(bits << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def pointwise_slope(x, score, SCORE: tl.constexpr):
    """d score / d logit, given both."""
    if SCORE == "sigmoid":
        return score * (1.0 - score)
    return tl.where(score > 0.0, tl.sigmoid(x) / (2.0 * score), 0.0)  # 0 at -inf, not 0 / 0


@triton.jit
def map_row(map_ptr, row, E: tl.constexpr):
    """A row of the byte map, promised to be aligned to 4 bytes and no more.

    With 16 the compiler would spread all tensors of a row 16 values a lane, logits included,
    whose loads would then not be coalesced. The kernels do not specialise on its alignment.
    """
    start = map_ptr + row * E
    if E % 4 == 0:
        start = tl.multiple_of(start, 4)
    return start


def warps_of_row(width: int) -> int:
    """One warp reduces without shared memory; beyond 128 values a lane registers run out."""
    return 1 if width <= 4096 else 8
