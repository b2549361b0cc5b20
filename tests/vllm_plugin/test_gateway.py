# SPDX-License-Identifier: Apache-2.0
"""The gateway on a stand-in for vLLM's application: mounting, failures, metrics, caching."""

import asyncio

import pytest

pytest.importorskip("vllm")
fastapi = pytest.importorskip("fastapi")
from fastapi.testclient import TestClient  # noqa: E402
from prometheus_client import REGISTRY, generate_latest  # noqa: E402

from moe_backend.vllm_plugin import rpc  # noqa: E402
from moe_backend.vllm_plugin.gateway import MoEGateway, summarise  # noqa: E402


def layer(number: int, backend: str = "moe_backend") -> dict:
    return {"layer": f"model.layers.{number}", "backend": backend, "reason": f"because {backend}"}


class Engine:
    """Answers collective_rpc as vLLM's engine client does."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    async def collective_rpc(self, method):
        assert method == "moe_status"
        self.asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer == "never":
            await asyncio.sleep(60)
        return self.answer


@pytest.fixture
def serve():
    """Starts a FastAPI application with the gateway as its middleware, as vLLM does."""
    clients, before = [], set(REGISTRY._collector_to_names)

    def start(answer, **options):
        app = fastapi.FastAPI()
        app.state.engine_client = engine = Engine(answer)

        @app.get("/v1/models")
        def models():
            return {"data": []}

        @app.get("/metrics")
        def metrics():
            return fastapi.Response(generate_latest(REGISTRY))

        app.add_middleware(MoEGateway)
        client = TestClient(app)
        client.__enter__()
        clients.append(client)
        return client, engine

    yield start
    for client in clients:
        client.__exit__(None, None, None)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_vllms_own_routes_stay(serve):
    client, _ = serve([[layer(1)]])
    assert client.get("/v1/models").json() == {"data": []}
    assert client.get("/moe/status").json()["active"] is True
    assert client.get("/moe/else").status_code == 404


def test_one_layer_on_the_engines_backend_is_not_active(serve):
    client, _ = serve([[layer(1), layer(2, "engine")], [layer(1), layer(2)]])
    status = client.get("/moe/status").json()
    assert status["active"] is False
    assert status["layers"] == {"moe_backend": 3, "engine": 1}
    assert [worker["rank"] for worker in status["workers"]] == [0, 1]


def test_a_model_without_moe_layers_is_not_active():
    assert summarise([[]])["active"] is False


def test_both_metrics_pages_show_the_layers(serve):
    client, _ = serve([[layer(1), layer(2, "engine")]])
    for path in ("/metrics", "/moe/metrics"):
        text = client.get(path).text
        assert "moe_backend_status_up 1.0" in text
        assert 'moe_backend_layers{backend="engine",rank="0"} 1.0' in text
        assert 'layer="model.layers.2",rank="0",reason="because engine"} 1.0' in text


def test_the_engine_is_not_asked_for_every_page(serve):
    client, engine = serve([[layer(1)]])
    for _ in range(5):
        client.get("/moe/status")
        client.get("/metrics")
    assert engine.asked == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (AttributeError("no attribute 'moe_status'"), "--worker-extension-cls"),
        (RuntimeError("EngineCore encountered an issue"), "EngineCore"),
        ("never", "no answer from the engine"),
    ],
)
def test_an_engine_that_cannot_answer_gives_503_and_why(serve, monkeypatch, answer, words):
    monkeypatch.setattr(rpc, "ENGINE_TIMEOUT_S", 0.1)
    client, _ = serve(answer)
    response = client.get("/moe/status")
    assert response.status_code == 503 and words in response.json()["error"]
    assert "moe_backend_status_up 0.0" in client.get("/metrics").text, "metrics must not fail"


def test_a_front_end_without_an_engine_says_so(serve):
    client, _ = serve([])
    client.app.state.engine_client = None
    assert "no engine" in client.get("/moe/status").json()["error"]


def test_after_a_failure_it_is_asked_again(serve):
    client, engine = serve(RuntimeError("asleep"))
    assert client.get("/moe/status").status_code == 503
    engine.answer = [[layer(1)]]
    assert client.get("/moe/status").status_code == 200
