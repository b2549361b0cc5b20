# SPDX-License-Identifier: Apache-2.0
"""Counting, the formulas, and putting readings together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_backend import RouterSpec, balance, reference, reference_training

EXPERTS, SPEC = 8, RouterSpec(2, "sigmoid", renormalize=True)


def batch(tokens, seed=0):
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return logits, reference.router_topk(logits, SPEC, None)[0]


def load_of(counters):
    return balance.Load(SPEC.top_k, counters.tokens.clone(), counters.scores.clone())


def row(layer="a", tokens=(4, 0), **changes):
    about = {"layer": layer, "top_k": 1, "source": "all", "num_sources": 1, "physical": False}
    return {**about, "tokens": list(tokens), "scores": [t / 2 for t in tokens], **changes}


def test_a_window_of_batches_equals_one_batch():
    counters = balance.Counters(EXPERTS)
    whole, ids = batch(96)
    for part, chosen in zip(whole.split(31), ids.split(31), strict=True):
        balance.observe(counters, chosen, logits=part, spec=SPEC)
    load = load_of(counters)
    counts = ids.flatten().long().bincount(minlength=EXPERTS)
    assert load.num_tokens == 96 and torch.equal(load.tokens, counts)
    scores = reference_training.router_scores(whole, SPEC.top_k, SPEC.score)[0]
    wanted = reference_training.aux_loss(scores, counts, 96, EXPERTS / SPEC.top_k)
    assert load.aux_loss == pytest.approx(float(wanted), rel=1e-6)
    assert load.imbalance == pytest.approx(int(counts.max()) / (96 * 2 / EXPERTS))


def test_even_load_is_one_and_collapse_is_the_number_of_experts():
    even = balance.Load(1, torch.full((4,), 5), torch.full((4,), 5.0).double())
    assert (even.imbalance, even.aux_loss) == (1.0, 1.0)
    one = torch.tensor([20, 0, 0, 0])
    collapsed = balance.Load(1, one, one.double())
    assert (collapsed.imbalance, collapsed.aux_loss) == (4.0, 4.0)


def test_no_token_has_no_imbalance():
    nothing = balance.Load(2, torch.zeros(4, dtype=torch.int64), torch.zeros(4).double())
    assert (nothing.imbalance, nothing.aux_loss, nothing.num_tokens) == (None, None, 0)


def test_padding_absent_and_stale_ids_do_not_count():
    counters = balance.Counters(EXPERTS)
    logits, ids = batch(6)
    padding = torch.tensor([False, False, False, False, True, True])
    balance.observe(counters, ids, logits=logits, spec=SPEC, padding=padding)
    wanted = balance.Counters(EXPERTS)
    balance.observe(wanted, ids[:4], logits=logits[:4], spec=SPEC)
    assert torch.equal(counters.tokens, wanted.tokens)
    torch.testing.assert_close(counters.scores, wanted.scores)
    before = counters.tokens.clone()
    balance.observe(counters, torch.tensor([[-1, EXPERTS], [2**30, -7]], dtype=torch.int32))
    assert torch.equal(counters.tokens, before)


def test_one_requests_nan_does_not_end_the_statistics():
    counters = balance.Counters(EXPERTS)
    logits, ids = batch(5)
    logits[2] = torch.nan
    balance.observe(counters, ids, logits=logits, spec=SPEC)
    assert counters.scores.isfinite().all()
    assert float(counters.scores.sum()) == pytest.approx(4, rel=1e-6)


def test_an_empty_batch_counts_nothing():
    counters = balance.Counters(EXPERTS)
    logits, ids = batch(0)
    balance.observe(counters, ids, logits=logits, spec=SPEC)
    assert not counters.tokens.any() and not counters.scores.any()


def test_small_batches_are_seen_beside_long_sums():
    """A float32 sum stops moving after a day of decoding."""
    counters = balance.Counters(EXPERTS)
    counters.scores += 1e12
    logits, ids = batch(1)
    balance.observe(counters, ids, logits=logits, spec=SPEC)
    assert float((counters.scores - 1e12).sum()) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_operator_is_sound(masked):
    """Declares what it changes, works on fake tensors and under compilation."""
    counters = balance.Counters(EXPERTS)
    logits, ids = batch(7)
    padding = torch.arange(7) > 4 if masked else None
    args = (counters.tokens, counters.scores, ids, logits, padding, "sigmoid")
    torch.library.opcheck(torch.ops.moe_backend.observe_balance.default, args)


def test_logits_need_a_spec():
    logits, ids = batch(3)
    with pytest.raises(ValueError, match="spec: expected a RouterSpec"):
        balance.observe(balance.Counters(EXPERTS), ids, logits=logits)


def test_replicas_count_once_and_other_ranks_add_up():
    first, second = (
        row(source=f"dp {i}", num_sources=2, tokens=t) for i, t in ((0, (4, 0)), (1, (1, 3)))
    )
    (found,) = balance.merge([first, dict(first), second, dict(second)]).values()
    assert found.load.tokens.tolist() == [5, 3] and found.load.scores.tolist() == [2.5, 1.5]
    assert found.complete
    assert not balance.merge([first])["a"].complete, "a rank that was not heard must show"


def test_a_source_without_scores_leaves_no_loss():
    rows = [row(source="dp 0", num_sources=2), row(source="dp 1", num_sources=2, scores=None)]
    load = balance.merge(rows)["a"].load
    assert load.aux_loss is None and load.imbalance == 2.0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 30), st.lists(st.integers(0, 9), min_size=2, max_size=2)),
        min_size=2,
        max_size=25,
    )
)
def test_window_covers_at_least_what_was_asked_for(steps):
    window, now, total, seen = balance.Window(60), 0.0, torch.zeros(2, dtype=torch.int64), []
    for pause, more in steps:
        now, total = now + pause, total + torch.tensor(more)
        window.add(now, balance.merge([row(tokens=total.tolist())]))
        seen.append((now, total))
    start = max((t for t, _ in seen if now - t >= 60), default=seen[0][0])
    assert window.length == pytest.approx(now - start)
    assert torch.equal(window.loads()["a"].tokens, total - dict(seen)[start])


@pytest.mark.parametrize("later", [row(tokens=(1, 0)), row(layer="b"), row(tokens=(9, 9, 9))])
def test_window_begins_anew_when_the_counters_did(later):
    """A restarted rank, another model: a difference would be negative or of different things."""
    window = balance.Window(60)
    window.add(0, balance.merge([row(tokens=(4, 0))]))
    window.add(1, balance.merge([later]))
    assert window.length == 0 and not next(iter(window.loads().values())).tokens.any()
    assert balance.Window(60).loads() == {} and balance.Window(60).length == 0
