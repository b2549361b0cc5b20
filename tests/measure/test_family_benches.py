# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of routing, permutation and balance loss, run small in Triton's interpreter.

Only the clock is stubbed: inputs, checks against the oracle and every timed call are real.
"""

import interpreter
import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = interpreter.enable()

from moe_backend.measure import (  # noqa: E402
    bench_aux_loss,
    bench_permute,
    bench_router,
    family,
    timing,
)
from moe_backend.types import RouterSpec  # noqa: E402


@pytest.fixture(autouse=True)
def _small_and_here(monkeypatch):
    if not INTERPRETED:
        pytest.skip("a GPU is here: run the benchmarks themselves")
    for name in ("randn", "rand", "randint", "empty", "tensor"):
        make = getattr(torch, name)

        def here(*args, make=make, **kwargs):
            return make(*args, **{k: "cpu" if v == "cuda" else v for k, v in kwargs.items()})

        monkeypatch.setattr(torch, name, here)
    monkeypatch.setattr(family, "_wake", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(family, "vllm_operators", lambda: None)

    class Captured:
        def __init__(self, calls, graph_us):
            for call in calls:
                call()

        def sample(self, replays):
            return [2.0] * replays

    monkeypatch.setattr(timing, "Captured", Captured)
    groups = RouterSpec(4, "sigmoid", 4, 2, 0, True, 2.5)
    monkeypatch.setattr(bench_router, "SERVING", {"small": (32, groups)})
    monkeypatch.setattr(bench_router, "DENSE", [(3, 32, groups), (3, 40, RouterSpec(4))])
    monkeypatch.setattr(bench_router, "SCORES", [(3, 32, 4, "sigmoid")])
    monkeypatch.setattr(bench_router, "_NEAR_TIES", 0.5)
    monkeypatch.setattr(bench_aux_loss, "SIZES", ((9, 32, 4),))
    for name, value in dict(EXPERTS=8, TOP_K=2, HIDDEN=128, ALIGN=4).items():
        monkeypatch.setattr(bench_permute, name, value)


@pytest.mark.parametrize(
    ("rows_of", "operations"),
    [
        (lambda: bench_router.run((1, 3)), 12),
        (lambda: bench_aux_loss.run(), 3),
        (lambda: bench_permute.run((5,)), 6),
    ],
)
def test_every_row_is_right_and_timed(rows_of, operations):
    rows = list(rows_of())
    assert len(rows) == operations
    for row in rows:
        assert not row.failed, row.failed
        assert row.ours == 2 and row.of_copy > 0
