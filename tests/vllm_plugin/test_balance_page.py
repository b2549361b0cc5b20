# SPDX-License-Identifier: Apache-2.0
"""The heat map in a real browser, on the gateway in front of a stand-in for the engine."""

import threading
import time

import pytest

pytest.importorskip("vllm")
fastapi = pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
import browser as browsers  # noqa: E402
import torch  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402

from moe_backend.vllm_plugin import balance_pages  # noqa: E402
from moe_backend.vllm_plugin.gateway import MoEGateway  # noqa: E402

pytestmark = pytest.mark.skipif(bool(browsers.why_none()), reason=browsers.why_none() or "-")
LAYERS, EXPERTS, TOP_K = 6, 32, 4
CELL = """
const canvas = document.querySelectorAll("#rows canvas")[arguments[0]];
return [...canvas.getContext("2d").getImageData(arguments[1], 0, 1, 1).data].slice(0, 3);
"""


class Engine:
    """Every answer has more tokens; layer 2 sends most of them to expert 5 and none to 9."""

    def __init__(self):
        self.asked, self.error, self.sleeping = 0, None, False

    async def is_sleeping(self):
        return self.sleeping

    async def collective_rpc(self, method):
        if self.error:
            raise RuntimeError(self.error)
        if method == "moe_status":
            return [[]]
        self.asked += 1
        return [[self.row(i) for i in range(LAYERS)]]

    def row(self, number):
        each = torch.full((EXPERTS,), 100)
        if number == 2:
            each[5], each[9] = 1000, 0
        tokens = each * self.asked
        return {
            "layer": f"model.layers.{number}.mlp.experts",
            "top_k": TOP_K,
            "source": "all",
            "num_sources": 1,
            "physical": False,
            "tokens": tokens.tolist(),
            "scores": (tokens.double() / TOP_K).tolist(),
        }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def serve(monkeypatch):
    """Starts the gateway; returns (address of the page, engine)."""
    monkeypatch.setattr(balance_pages, "MAX_AGE_S", 0.05)
    before, running = set(REGISTRY._collector_to_names), []

    def start(on=True):
        monkeypatch.setenv("MOE_BACKEND_BALANCE", str(int(on)))
        app = fastapi.FastAPI()
        app.state.engine_client = engine = Engine()
        app.add_middleware(MoEGateway)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        time.sleep(0.1)  # the reading at the start is then old, and the page gets a new one
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/moe/balance.html", engine

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.fixture
def site(serve):
    return serve()


def shown(browser):
    return browser.run("return document.querySelectorAll('#rows tr').length") == LAYERS


def faster(browser):
    """Refreshes every tenth of a second instead of every five."""
    browser.run("const later = setTimeout; window.setTimeout = f => later(f, 100); tick()")


def test_the_map_shows_hot_and_idle_experts(browser, site):
    url, _ = site
    browser.open(url)
    browser.wait(lambda: shown(browser), "six layers")
    assert browser.run(CELL, 2, 9) == [0, 0, 0], "an expert without tokens is black"
    red, _, blue = browser.run(CELL, 2, 5)
    assert red > 100 and blue < 40, "the full one is deep orange"
    assert browser.run(CELL, 0, 3) == [240, 240, 240], "an even layer is grey"
    wanted = 1000 * EXPERTS / (30 * 100 + 1000)
    cells = browser.text("#rows tr:nth-child(3)").split()
    assert cells[0] == "2" and cells[2:] == [f"{wanted:.2f}", cells[3], "5"]
    assert browser.text("#worst") == f"{wanted:.2f}" and browser.text("#worst-layer") == "layer 2"
    assert browser.text("#idle") == "1"
    assert browser.console() == []


def test_pointing_and_arrow_keys_name_a_cell(browser, site):
    url, _ = site
    browser.open(url)
    browser.wait(lambda: shown(browser), "six layers")
    browser.hover("#rows tr:nth-child(3) canvas", 1)
    middle = EXPERTS // 2
    assert browser.text("#read").startswith(f"Layer 2, expert {middle}: ")
    browser.press("#rows tr:nth-child(2) canvas", "\ue014\ue015")  # right, down
    assert browser.text("#read").startswith(
        f"Layer 2, expert {EXPERTS // 2 + 1}: 100 tokens, 0.80×"
    )
    browser.run("document.querySelector('#order').value = 'load'; draw()")
    red, _, blue = browser.run(CELL, 2, 0)
    assert red > 100 and blue < 40 and browser.run(CELL, 2, EXPERTS - 1) == [0, 0, 0]


def test_it_refreshes_pauses_and_survives_the_engines_failure(browser, site):
    url, engine = site
    browser.open(url)
    browser.wait(lambda: shown(browser), "six layers")
    first = browser.text("#tokens")
    faster(browser)
    browser.wait(lambda: browser.text("#tokens") != first, "a refresh")
    engine.error = "the engine is ill"
    browser.wait(lambda: "the engine is ill" in browser.text("#notice"), "the notice")
    assert shown(browser), "the last numbers stay"
    engine.error = None
    browser.wait(lambda: not browser.text("#notice"), "the way back")
    engine.sleeping = True
    browser.wait(lambda: "sleeps" in browser.text("#notice"), "the sleep")
    browser.click("#pause")
    assert browser.text("#age") == "paused"


def test_it_needs_nothing_from_elsewhere(browser, site):
    """A cluster without internet: one request for the page, then only /moe/balance."""
    url, _ = site
    browser.open(url)
    browser.wait(lambda: shown(browser), "six layers")
    names = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert names and {name.partition("/moe/")[2] for name in names} == {"balance"}


def test_off_it_says_how_to_turn_it_on(browser, serve):
    url, engine = serve(on=False)
    browser.open(url)
    browser.wait(lambda: "MOE_BACKEND_BALANCE=1" in browser.text("#notice"), "the hint")
    assert not browser.run("return document.querySelector('main').checkVisibility()")
    assert engine.asked == 0, "the workers must not be disturbed"
