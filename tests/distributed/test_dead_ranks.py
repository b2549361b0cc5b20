# SPDX-License-Identifier: Apache-2.0
"""No wait is for ever: ranks that are dead, stuck or elsewhere are named within the bound."""

import os
import signal
import time

import pytest
import torch
from ranks import Ranks, run_ranks

from moe_backend import Routing
from moe_backend.distributed import (
    EPConfig,
    EPError,
    EPTimeout,
    ExpertParallel,
    combine,
    dispatch,
    open_backend,
)

WORLD, EXPERTS, HIDDEN = 4, 8, 128
BASE = EPConfig(EXPERTS, HIDDEN, top_k=2, max_tokens=8, align=16)


def tokens():
    return torch.ones(4, HIDDEN).bfloat16()


def plain_routing():
    ids = torch.arange(8).view(4, 2) % EXPERTS
    return Routing(ids.int(), torch.ones(ids.shape), EXPERTS)


def _different_calls(rank, world):
    backend = open_backend("gloo", timeout_s=4)
    ep = ExpertParallel(BASE, backend="gloo", timeout_s=4)
    rows, handle = dispatch(tokens(), plain_routing(), ep)
    began = time.monotonic()
    try:
        if rank == 0:
            dispatch(tokens(), plain_routing(), ep)
        else:
            combine(torch.ones(rows.num_rows, HIDDEN).bfloat16(), handle)
    except EPError as error:
        assert time.monotonic() - began < 6
        backend.destroy()
        return str(error)


def test_ranks_in_different_calls_do_not_hang():
    said = run_ranks(_different_calls, WORLD)
    assert "All ranks must make the same calls" in said[0]
    assert all(said)


TIMEOUT = 4.0


def _until_it_fails(rank, world, pause):
    ep = ExpertParallel(BASE, backend="gloo", timeout_s=TIMEOUT)
    last = time.monotonic()
    for step in range(100_000):
        try:
            rows, handle = dispatch(tokens(), plain_routing(), ep)
            y = combine(torch.ones(rows.num_rows, HIDDEN).bfloat16(), handle)
            assert y.eq(2).all()
        except EPTimeout as error:
            took = time.monotonic() - last
            with pytest.raises(EPError, match="broke earlier"):
                dispatch(tokens(), plain_routing(), ep)
            return {"ranks": error.ranks, "phase": error.phase, "took": took, "text": str(error)}
        last = time.monotonic()
        if step == 3 and rank == 2:
            open(pause, "w").close()  # the victim is in the middle of its work
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_dead_or_stuck_rank_is_named_within_the_bound(how, tmp_path):
    running = str(tmp_path / "running")
    ranks = Ranks(_until_it_fails, WORLD, running)
    try:
        end = time.monotonic() + 30
        while not os.path.exists(running) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(ranks.processes[2].pid, how)
        for rank in (0, 1, 3):
            ok, found = ranks.answer(rank, 20)
            assert ok, found
            assert found["ranks"] == (2,), found
            assert found["took"] < TIMEOUT + 1, found
            assert found["phase"].split()[0] in ("dispatch", "combine"), found
            assert "restart all ranks" in found["text"]
    finally:
        ranks.stop()
    run_ranks(_restart_is_clean, WORLD)


def _restart_is_clean(rank, world):
    ep = ExpertParallel(BASE, backend="gloo")
    rows, handle = dispatch(tokens(), plain_routing(), ep)
    assert combine(torch.ones(rows.num_rows, HIDDEN).bfloat16(), handle).eq(2).all()


def _watched(rank, world):
    ep, told = ExpertParallel(BASE, backend="gloo"), []
    ep.watch(told.append, period_s=0.01)
    time.sleep(0.1)
    assert not told
    ep._control.fail(EPTimeout([1], "dispatch rows", 3.0))
    end = time.monotonic() + 5
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    ep.destroy()
    return [str(error) for error in told]


def test_a_watch_tells_once_what_broke():
    """A replayed graph runs none of our Python: somebody else must notice."""
    (told,) = run_ranks(_watched, 1)
    assert len(told) == 1 and "no answer from rank 1 during dispatch rows" in told[0]
