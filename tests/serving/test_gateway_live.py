# SPDX-License-Identifier: Apache-2.0
"""The gateway on the real server: status, metrics, and the routes of the example."""

import json
import time

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.serving


def metrics_of(text: str) -> dict[str, float]:
    pairs = (line.rpartition(" ") for line in text.splitlines() if line.startswith("moe_backend"))
    return {name: float(value) for name, _, value in pairs}


def test_status_says_that_every_layer_runs_on_our_kernels(client, checkpoint):
    status = client.get("/moe/status").json()
    config = json.loads((checkpoint / "config.json").read_text())
    expected = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    assert status["active"] is True
    assert status["layers"] == {"moe_backend": len(expected)}
    (worker,) = status["workers"]
    assert [row["layer"].split(".")[2] for row in worker["layers"]] == [str(i) for i in expected]
    for row in worker["layers"]:
        assert row["backend"] == "moe_backend" and row["reason"]
        assert row["shape"]["num_experts"] == config["n_routed_experts"]
        assert row["shape"]["top_k"] == config["num_experts_per_tok"]
    assert set(status["versions"]) >= {"moe_backend", "vllm", "torch", "python"}


@pytest.mark.parametrize("path", ["/metrics", "/moe/metrics"])
def test_metrics_are_there_and_beside_vllms_own(client, path):
    text = client.get(path).text
    found = metrics_of(text)
    assert found["moe_backend_status_up"] == 1
    layers = len(client.get("/moe/status").json()["workers"][0]["layers"])
    assert found['moe_backend_layers{backend="moe_backend",rank="0"}'] == layers
    assert found['moe_backend_layers{backend="engine",rank="0"}'] == 0
    assert sum(name.startswith("moe_backend_layer_info{") for name in found) == layers
    assert ("vllm:num_requests_running" in text) == (path == "/metrics")


def test_the_examples_routes(client):
    assert client.get("/moe/ready").json()["ready"] is True
    page = client.get("/moe/")
    assert page.headers["content-type"].startswith("text/html")
    assert "model.layers.1.mlp.experts" in page.text


def test_balance_counts_exactly_the_tokens_that_are_served(client, checkpoint):
    """Compiled, through the API, without warm-up: prompt and all but the last sampled token."""
    config = json.loads((checkpoint / "config.json").read_text())

    def counted():
        time.sleep(2.1)  # readings are not older than two seconds
        text = client.get("/moe/metrics").text
        found = metrics_of(text)
        experts = {k: v for k, v in found.items() if k.startswith("moe_backend_expert_tokens_tot")}
        layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
        assert len(experts) == layers * config["n_routed_experts"]
        return sum(experts.values()) / config["num_experts_per_tok"] / layers

    before = counted()
    body = {"model": "tiny", "prompt": "abc def", "max_tokens": 6, "ignore_eos": True}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert counted() - before == usage["prompt_tokens"] + 5
    answer = client.get("/moe/balance").json()
    assert answer["enabled"] and answer["complete"] and answer["window_s"] > 0
    for layer in answer["layers"]:
        assert layer["imbalance"] >= 1 and 0.5 < layer["aux_loss"] < config["n_routed_experts"]
    assert client.get("/moe/balance.html").headers["content-type"].startswith("text/html")


def test_streaming_goes_on_while_the_status_is_asked(client):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 24, "stream": True, "ignore_eos": True}
    parts = 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            parts += line.startswith("data: ")
            if parts == 2:
                assert client.get("/moe/status").status_code == 200
    assert parts > 12


def test_documentation_of_the_gateway_is_its_own(client):
    assert "/status" in client.get("/moe/openapi.json").json()["paths"]
    assert "/v1/completions" in client.get("/openapi.json").json()["paths"]
