# SPDX-License-Identifier: Apache-2.0
"""The real server with the plugin speaks the OpenAI API, also to clients that misbehave."""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.serving
MODEL = "tiny"
PROMPT = {"model": MODEL, "prompt": "the router gives each token to", "temperature": 0}


def completion(client, **fields) -> dict:
    answer = client.post("/v1/completions", json={**PROMPT, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(response) -> list:
    """The JSON documents of a stream; it must be closed by [DONE]."""
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def until_running(client, wanted: int) -> None:
    """vLLM's metrics follow the engine's steps, so they are looked at until they are there."""
    deadline = time.monotonic() + 20
    while running_requests(client) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running_requests(client) == wanted


def running_requests(client) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:num_requests_running"):
            return float(line.rpartition(" ")[2])
    raise AssertionError("vLLM's metrics are gone")


def test_completion(client):
    answer = completion(client)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_greedy_text_repeats_itself(client):
    """Deterministic by default: one request at a time, the same bytes."""
    texts = {completion(client, max_tokens=24)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


def test_chat_through_the_openai_client(server):
    from openai import OpenAI

    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=120) as client:
        assert [m.id for m in client.models.list()] == [MODEL]
        messages = [{"role": "user", "content": "who was there?"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
        assert answer.usage.completion_tokens <= 6
        parts = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=6, stream=True
        )
        assert [p.choices[0].finish_reason for p in parts if p.choices][-1] in ("length", "stop")


def test_streamed_text_is_the_unstreamed_text(client):
    whole = completion(client, max_tokens=12)["choices"][0]["text"]
    body = {**PROMPT, "max_tokens": 12, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        parts = events(response)
    assert len(parts) > 2, "nothing was streamed"
    assert "".join(part["choices"][0]["text"] for part in parts) == whole


def test_logprobs(client):
    found = completion(client, logprobs=3)["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 8
    for chosen, best in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert math.isfinite(chosen) and chosen <= 0
        # Two tokens may print alike, so a table can hold fewer than three.
        assert 1 <= len(best) <= 4 and max(best.values()) == pytest.approx(chosen)


def test_prompt_logprobs_are_finite(client):
    found = completion(client, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    values = [entry["logprob"] for row in found[1:] for entry in row.values()]
    assert values and all(math.isfinite(v) and v <= 0 for v in values)


def test_sixteen_clients_at_once(client):
    def ask(i: int) -> dict:
        return completion(client, prompt=f"{'again ' * (i % 5)}client {i}", max_tokens=4 + i)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert [a["usage"]["completion_tokens"] for a in answers] == [4 + i for i in range(16)]
    assert len({a["id"] for a in answers}) == 16


@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_prompt_lengths_around_the_tiles(client, length):
    answer = completion(client, prompt=[5 + i % 250 for i in range(length)], max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == length


def test_a_client_that_leaves_mid_stream_frees_its_place(client, server):
    body = {**PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=server.base_url, timeout=120) as rude,
        rude.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()  # kept: the stream ends with its iterator
        next(lines)
        until_running(client, 1)
    until_running(client, 0)
    completion(client)


def test_clients_that_leave_do_not_disturb_the_one_that_stays(client, server):
    alone = completion(client, max_tokens=16)["usage"]
    stop = threading.Event()

    def leave_again_and_again() -> None:
        body = {**PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=server.base_url, timeout=120) as rude:
            for _ in range(6):
                if stop.is_set():
                    return
                with rude.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())

    thread = threading.Thread(target=leave_again_and_again)
    thread.start()
    try:
        assert completion(client, max_tokens=16)["usage"] == alone
    finally:
        stop.set()
        thread.join()


MALFORMED = [
    pytest.param({"content": b"{not json"}, 400, id="no-json"),
    pytest.param({"json": {"model": MODEL}}, 400, id="no-prompt"),
    pytest.param({"json": {**PROMPT, "model": "another"}}, 404, id="unknown-model"),
    pytest.param({"json": {**PROMPT, "max_tokens": -1}}, 400, id="negative-length"),
    pytest.param({"json": {**PROMPT, "max_tokens": "many"}}, 400, id="length-is-a-word"),
    pytest.param({"json": {**PROMPT, "temperature": -3}}, 400, id="negative-temperature"),
    pytest.param({"json": {**PROMPT, "logprobs": 10**6}}, 400, id="too-many-logprobs"),
    pytest.param({"json": {**PROMPT, "prompt": [10**7]}}, 400, id="token-outside-vocabulary"),
    pytest.param({"json": {**PROMPT, "prompt": [7] * 4000}}, 400, id="prompt-too-long"),
    pytest.param({"json": {**PROMPT, "prompt": []}}, 400, id="empty-prompt"),
]


@pytest.mark.parametrize(("request_", "code"), MALFORMED)
def test_malformed_requests_are_refused_and_the_server_stays_well(client, request_, code):
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", headers=headers, **request_)
    assert answer.status_code == code, answer.text
    assert "message" in answer.text
    completion(client, max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/v1/completions", 405), ("GET", "/no/such", 404), ("GET", "/moe/no-such", 404)],
)
def test_wrong_paths_and_methods(client, method, path, code):
    assert client.request(method, path).status_code == code
