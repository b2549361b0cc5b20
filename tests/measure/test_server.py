# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a server's owner, nothing of the server stays: a stand-in server, no vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from leaks import Traces, alive, hear_interrupts

from moe_backend.measure import server as server_module
from moe_backend.measure.server import ServerError, VllmServer

FAKE = Path(__file__).parents[1] / "lib" / "fake_server.py"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Makes a VllmServer of the stand-in; its notes are read back with ``notes_of``."""
    notes = tmp_path / "notes.json"
    monkeypatch.setenv("FAKE_SERVER_NOTES", str(notes))
    monkeypatch.setattr(
        server_module, "server_command", lambda words: [sys.executable, str(FAKE), *words]
    )

    def make(mode: str = "works", **options) -> VllmServer:
        return VllmServer("model", ["--mode", mode], **{"grace": 1.0, **options})

    make.notes = notes
    return make


def notes_of(path: Path) -> dict:
    return json.loads(path.read_text())


def assert_nothing_left(notes: dict, port: int = 0) -> None:
    assert not Traces(notes["pids"], {notes["segment"]}, port).left_after()


def test_leaving_the_block_ends_all_even_daemons_that_left_the_session(fake):
    with fake() as server:
        notes = notes_of(fake.notes)
        assert server.healthy() and all(map(alive, notes["pids"]))
        assert Path("/dev/shm", notes["segment"]).exists()
        log, port = server.log, server.port
    assert_nothing_left(notes, port)
    assert not log.parent.exists(), "the private folder stayed"
    server.stop()  # again is harmless


def test_an_exception_inside_the_block_ends_all(fake):
    with pytest.raises(ZeroDivisionError), fake():
        notes = notes_of(fake.notes)
        1 / 0  # noqa: B018
    assert_nothing_left(notes)


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(fake):
    with fake("stubborn"):
        notes = notes_of(fake.notes)
        began = time.monotonic()
    assert 0.9 < time.monotonic() - began < 10
    assert_nothing_left(notes)


def test_a_failed_start_quotes_the_cause_and_leaves_nothing(fake):
    with pytest.raises(ServerError, match="ValueError: hidden size 100") as caught, fake("fails"):
        pass
    assert "with code 1" in str(caught.value)
    assert "Engine core initialization" not in str(caught.value)
    assert_nothing_left(notes_of(fake.notes))


def test_a_start_that_takes_too_long_is_ended(fake):
    with pytest.raises(ServerError, match="not healthy after 2 s"), fake("hangs", start_timeout=2):
        pass
    assert_nothing_left(notes_of(fake.notes))


def test_a_server_that_dies_while_serving_is_noticed_and_swept(fake):
    with fake("dies") as server:
        notes = notes_of(fake.notes)
        server._guard.wait(15)
        with pytest.raises(ServerError, match="ended with code 3"):
            server.check()
    assert_nothing_left(notes)


def test_somebody_elses_segment_is_not_touched(fake):
    foreign = shared_memory.SharedMemory(create=True, size=64)
    try:
        with fake():
            pass
        assert Path("/dev/shm", foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_owner_ends_the_server(fake, tmp_path, number):
    """SIGKILL cannot be handled by the owner: its closed pipe is what the guard sees."""
    owner = tmp_path / "owner.py"
    owner.write_text(
        "import sys\n"
        "from moe_backend.measure import server\n"
        f"server.server_command = lambda words: [sys.executable, {str(FAKE)!r}, *words]\n"
        "with server.VllmServer('m', ['--mode', 'works'], grace=1.0) as s:\n"
        "    print(s.port, s.log.parent, flush=True)\n"
        "    import time; time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(owner)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    try:
        port, folder = process.stdout.readline().split()
        notes = notes_of(fake.notes)
        process.send_signal(number)
        process.wait(20)
    finally:
        process.kill()
    assert_nothing_left(notes, int(port))
    deadline = time.monotonic() + 5
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_two_servers_get_different_ports(fake, tmp_path):
    with fake() as first, fake() as second:
        assert first.port != second.port


def test_the_servers_folder_is_not_on_its_path(monkeypatch, tmp_path):
    """A folder `kernels` where the server starts must not shadow another package."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    probe = "import importlib.util as u; print(u.find_spec('kernels'))"
    environment = server_module.server_environment()
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == "None"


def test_the_users_variables_win(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert server_module.server_environment()["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert server_module.server_environment({"A": "b"})["A"] == "b"
    assert "A" not in os.environ
