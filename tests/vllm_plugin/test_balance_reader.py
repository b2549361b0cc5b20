# SPDX-License-Identifier: Apache-2.0
"""/moe/balance and its metrics on a stand-in for vLLM's application."""

import asyncio

import pytest

pytest.importorskip("vllm")
fastapi = pytest.importorskip("fastapi")
from fastapi.testclient import TestClient  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402

from moe_backend.vllm_plugin import balance_pages, compat  # noqa: E402
from moe_backend.vllm_plugin.gateway import MoEGateway  # noqa: E402

NAME = "model.layers.3.mlp.experts"


def row(tokens, **changes):
    about = {"layer": NAME, "top_k": 2, "source": "all", "num_sources": 1, "physical": False}
    return {**about, "tokens": tokens, "scores": [t / 2 for t in tokens], **changes}


class Engine:
    """Answers in turn, the last answer again and again."""

    def __init__(self, *answers):
        self.answers, self.asked, self.sleeping = list(answers), 0, False

    async def is_sleeping(self):
        return self.sleeping

    async def collective_rpc(self, method):
        if method != "moe_balance":
            return [[]]
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def serve(monkeypatch):
    clients, before = [], set(REGISTRY._collector_to_names)
    monkeypatch.setattr(balance_pages, "MAX_AGE_S", 0.0)
    monkeypatch.setenv("MOE_BACKEND_BALANCE", "1")

    def start(*answers):
        app = fastapi.FastAPI()
        app.state.engine_client = engine = Engine(*answers)
        app.add_middleware(MoEGateway)
        client = TestClient(app)
        client.__enter__()
        clients.append(client)
        client.get("/nothing")  # lets the reading at the start finish
        return client, engine

    yield start
    for client in clients:
        client.__exit__(None, None, None)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_warm_up_is_not_in_the_window(serve):
    """Counters hold profiling and graph capture, which route noise."""
    client, _ = serve([[row([900, 0, 0, 0])]], [[row([906, 2, 0, 0])]])
    found = client.get("/moe/balance").json()
    (layer,) = found.pop("layers")
    assert found.pop("window_s") >= 0
    assert found == {"enabled": True, "asleep": False, "complete": True}
    assert layer["layer"] == NAME and layer["tokens"] == 4 and layer["physical"] is False
    assert layer["tokens_per_expert"] == [6, 2, 0, 0] and layer["imbalance"] == 3.0
    assert layer["aux_loss"] == pytest.approx(4 / (2 * 16) * (3 * 6 + 1 * 2))


def test_metrics_count_from_load_and_judge_the_window(serve):
    client, _ = serve([[row([900, 0, 0, 0])]], [[row([906, 2, 0, 0])]])
    text = client.get("/moe/metrics").text
    for expert, count in enumerate((906, 2, 0, 0)):
        name = f'moe_backend_expert_tokens_total{{expert="{expert}",layer="{NAME}"}}'
        assert f"{name} {float(count)}\n" in text
    assert f'moe_backend_expert_imbalance{{layer="{NAME}"}} 3.0\n' in text
    assert f'moe_backend_aux_loss{{layer="{NAME}"}} 2.5\n' in text
    assert "moe_backend_balance_up 1.0\n" in text and "balance_window_seconds" in text


def test_a_window_without_tokens_has_nulls_and_no_series(serve):
    client, _ = serve([[row([5, 5])]])
    (layer,) = client.get("/moe/balance").json()["layers"]
    assert (layer["tokens"], layer["imbalance"], layer["aux_loss"]) == (0, None, None)
    assert "moe_backend_expert_imbalance{" not in client.get("/moe/metrics").text


def test_off_nobody_is_asked(serve, monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_BALANCE", "0")
    client, engine = serve([[row([1])]])
    found = client.get("/moe/balance").json()
    assert found["enabled"] is False and "MOE_BACKEND_BALANCE=1" in found["reason"]
    assert "balance" not in client.get("/moe/metrics").text and engine.asked == 0


def test_a_sleeping_engine_is_not_asked_and_the_last_numbers_stay(serve):
    """The counters of a sleeping worker have no memory behind them."""
    client, engine = serve([[row([1, 1])]], [[row([4, 4])]])
    assert client.get("/moe/balance").json()["layers"][0]["tokens"] == 3
    asked, engine.sleeping = engine.asked, True
    found = client.get("/moe/balance").json()
    assert found["asleep"] is True and found["layers"][0]["tokens"] == 3
    assert "moe_backend_balance_up 0.0" in client.get("/moe/metrics").text
    assert engine.asked == asked


def test_a_failure_is_503_with_the_reason_and_metrics_go_on(serve):
    client, engine = serve(AttributeError("no attribute 'moe_balance'"))
    response = client.get("/moe/balance")
    assert response.status_code == 503 and "--worker-extension-cls" in response.json()["error"]
    assert "moe_backend_balance_up 0.0" in client.get("/moe/metrics").text
    engine.answers = [[[row([2, 2])]]]
    assert client.get("/moe/balance").status_code == 200


def test_the_engine_is_not_asked_for_every_page(serve, monkeypatch):
    client, engine = serve([[row([1, 1])]])
    monkeypatch.setattr(balance_pages, "MAX_AGE_S", 60.0)
    asked = engine.asked
    for _ in range(3):
        client.get("/moe/balance")
        client.get("/moe/metrics")
    assert engine.asked == asked


class Core:
    """The client of two data-parallel engines: its own call returns the first one's answer."""

    def __init__(self, *engines):
        self.core_engines = list(engines)

    async def _call_utility_async(self, method, name, timeout, args, kwargs, *, engine):
        assert (method, args, kwargs) == ("collective_rpc", (), None)
        return [f"{name} of {engine}", f"{name} of {engine}, second worker"]


def test_every_data_parallel_engine_is_heard():
    client = Engine([["only the first"]])
    client.engine_core = Core("a", "b")
    heard = asyncio.run(compat.ask_every_rank(client, "moe_balance"))
    assert [word.split(",")[0][-1] for word in heard] == ["a", "a", "b", "b"]
    client.engine_core = Core("a")
    assert asyncio.run(compat.ask_every_rank(client, "moe_balance")) == [["only the first"]]
