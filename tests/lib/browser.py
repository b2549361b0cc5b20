# SPDX-License-Identifier: Apache-2.0
"""A real browser without a display: the few commands of the WebDriver protocol that tests need."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of a found element


def why_none() -> str:
    """Empty when a browser and its driver are here."""
    browser = any(map(shutil.which, BROWSERS))
    missing = [n for n, found in (("Chromium", browser), ("chromedriver", _driver())) if not found]
    hint = "on Debian: apt-get install chromium chromium-driver"
    return f"no {' and no '.join(missing)} on the PATH ({hint})" if missing else ""


def _driver() -> str | None:
    return shutil.which("chromedriver")


class Browser:
    """One window. ``run`` evaluates a script's body in the page and returns its value."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._session.post(path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message']}")
        return answer

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        return self._post("execute/sync", script=script, args=args)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/click")

    def press(self, selector: str, keys: str) -> None:
        self._post(f"element/{self._find(selector)}/value", text=keys)

    def _find(self, selector: str) -> str:
        return self._post("element", using="css selector", value=selector)[ELEMENT]

    def hover(self, selector: str, x: int, y: int = 0) -> None:
        """Points at an offset in pixels from the element's middle."""
        origin = {ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": origin}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def wait(self, ready: Callable[[], Any], what: str, seconds: float = 15) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"{what}: not within {seconds} s"
            time.sleep(0.05)

    def console(self) -> list[str]:
        """Errors of the page since the last call."""
        lines = self._post("se/log", type="browser")
        return [line["message"] for line in lines if line["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        answer = self._session.get("screenshot").json()["value"]
        path.write_bytes(base64.b64decode(answer))


def _options(size: tuple[int, int]) -> dict:
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage"]
    arguments += ["--disable-background-networking", f"--window-size={size[0]},{size[1]}"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # which Chromium refuses root with
    binary = next(filter(None, map(shutil.which, BROWSERS)))
    chrome = {"binary": binary, "args": arguments}
    return {"alwaysMatch": {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}}


@contextmanager
def open_browser(folder: Path, size: tuple[int, int] = (1280, 800)) -> Iterator[Browser]:
    """A browser whose files lie in ``folder``; all its processes end with it."""
    log = folder / "chromedriver.log"
    driver = subprocess.Popen(
        [_driver() or "chromedriver", "--port=0"],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
    )
    try:
        base = f"http://127.0.0.1:{_port(driver, log)}/session"
        with httpx.Client(timeout=60, trust_env=False) as client:
            made = client.post(base, json={"capabilities": _options(size)}).json()["value"]
            assert "sessionId" in made, f"no browser: {made.get('message')}"
            client.base_url = httpx.URL(f"{base}/{made['sessionId']}/")
            try:
                yield Browser(client)
            finally:
                client.delete("")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def _port(driver: subprocess.Popen, log: Path) -> int:
    end = time.monotonic() + 20
    while time.monotonic() < end and driver.poll() is None:
        _, found, rest = log.read_text().partition("started successfully on port ")
        if found and "." in rest:
            return int(rest.split(".")[0])
        time.sleep(0.05)
    raise AssertionError(f"chromedriver did not start:\n{log.read_text()}")
