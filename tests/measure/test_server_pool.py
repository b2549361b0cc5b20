# SPDX-License-Identifier: Apache-2.0
"""The pool keeps up as many servers as it should and ends them all; servers are stand-ins."""

import pytest

from moe_backend.measure import loadtest
from moe_backend.measure.loadtest import Plan, ServerPool, Side, measure, plugin_side
from moe_backend.measure.server import ServerError
from moe_backend.measure.vllm_bench import Load

LOADS = (Load(1, 8, 4, 2), Load(4, 8, 4, 2))
RESULT = {
    "ttfts": [0.1], "itls": [[0.01] * 3], "output_lens": [4],
    "output_throughput": 1.0, "request_throughput": 1.0,
}  # fmt: skip


@pytest.fixture
def world(monkeypatch):
    """Servers that only count, and a load generator that notes who was up."""
    up, peak, log = set(), [], []

    class Server:
        started_in, base_url = 3.0, "http://nowhere"

        def __init__(self, model, args, *, env, log, on_stage, grace):
            self.model, self.looks, self.on_stage = model, 0, on_stage

        def start(self):
            up.add(self.model)
            peak.append(len(up))
            return self

        def advance(self):
            self.looks += 1
            self.on_stage("loading weights", self.looks)
            if self.model == "broken":
                raise ServerError("the vLLM server ended with code 1")
            return self.looks > 1

        def check(self):
            pass

        def get_json(self, path):
            return {"active": True, "path": path}

        def ask_to_stop(self):
            pass

        def stop(self):
            up.discard(self.model)

    monkeypatch.setattr(loadtest, "VllmServer", Server)
    monkeypatch.setattr(loadtest, "POLL_S", 0)

    class Generator:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, url, model, load, seed, on_progress):
            log.append((model, frozenset(up)))
            on_progress(1, 2)
            return RESULT

    monkeypatch.setattr(loadtest, "Generator", Generator)
    return up, peak, log


def plan(**fields) -> Plan:
    return Plan(**{"sides": (Side("default", "a"), plugin_side("b")), "loads": LOADS, **fields})


@pytest.mark.parametrize(("together", "most"), [(True, 2), (False, 1)])
def test_as_many_servers_as_fit(world, together, most):
    up, peak, log = world
    p, said = plan(rounds=3, together=together), []
    with ServerPool(p, lambda *words: said.append(words)) as pool:
        runs = list(measure(p, pool, lambda *words: said.append(words)))
        assert pool.status == {"tma_fp8": {"active": True, "path": "/moe/status"}}
        assert set(pool.started_in) == {"default", "tma_fp8"}
    assert len(runs) == 12 and not up
    assert max(peak) == most and all(model in running for model, running in log)
    # A B | B A | A B: in turn, the server at the end of a round is kept for the next.
    assert len(peak) == (2 if together else 4)
    assert said[-1] == ("load", "12 runs", 12, 12)


def test_when_one_server_fails_the_other_is_ended_too(world):
    up, _, _ = world
    p = plan(sides=(Side("default", "a"), Side("tma_fp8", "broken")))
    with (
        pytest.raises(ServerError, match="^tma_fp8: the vLLM server ended"),
        ServerPool(p, lambda *_: None) as pool,
    ):
        list(measure(p, pool, lambda *_: None))
    assert not up


def test_no_pair_begins_that_would_not_end_in_time(world, monkeypatch):
    """A load takes 10 s here: of four pairs two fit into 45 s, and no pair is cut in half."""
    now = [0.0]
    monkeypatch.setattr(loadtest.time, "monotonic", lambda: now[0])
    real = loadtest.Generator.run

    def slow(self, *args):
        now[0] += 10
        return real(self, *args)

    monkeypatch.setattr(loadtest.Generator, "run", slow)
    p = plan(rounds=2, budget_s=45.0)
    with ServerPool(p, lambda *_: None) as pool:
        runs = list(measure(p, pool, lambda *_: None))
    assert len(runs) == 4 and loadtest.paired(p, runs) == runs
