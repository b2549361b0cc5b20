# SPDX-License-Identifier: Apache-2.0
"""Stands in for the vLLM server: health, helpers that try to escape, shared memory, bad ends.

    python fake_server.py --mode MODE --port N …

Writes the ids of all its processes and its segments into the file in FAKE_SERVER_NOTES.
"""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def helpers():
    """A child, and one that leaves the session and the process tree as daemons do."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    escape = (
        "import subprocess, sys; null = subprocess.DEVNULL; "
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], "
        "start_new_session=True, stdout=null, stderr=null).pid)"
    )
    orphan = subprocess.run([sys.executable, "-c", escape], stdout=subprocess.PIPE, text=True)
    return [child.pid, int(orphan.stdout)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    if known.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # The tracker of this segment is told nothing: it is what a killed process leaves behind.
    segment = shared_memory.SharedMemory(create=True, size=4096)
    from multiprocessing import resource_tracker

    resource_tracker.unregister(segment._name, "shared_memory")
    notes = {"pids": [os.getpid(), *helpers()], "segment": segment.name}
    with open(os.environ["FAKE_SERVER_NOTES"], "w") as file:
        json.dump(notes, file)
    if known.mode == "fails":
        print("(Worker pid=7) ERROR 11-20 18:46:07 [executor.py:94] Traceback (most recent call")
        print("(Worker pid=7) ERROR 11-20 18:46:07 [executor.py:94] ValueError: hidden size 100")
        print("(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause")
        sys.stdout.flush()
        time.sleep(1.5)  # longer than the guard's look at shared memory is apart
        sys.exit(1)
    if known.mode == "hangs":
        time.sleep(600)
    print("Starting vLLM server on", known.port, flush=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", known.port), Health)
    if known.mode == "dies":
        signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
        signal.setitimer(signal.ITIMER_REAL, 1.5)
    server.serve_forever()


if __name__ == "__main__":
    main()
