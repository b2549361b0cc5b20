# SPDX-License-Identifier: Apache-2.0
"""What the plugin expects of vLLM and promises to it, shown on real layers of one version.

Run as a script it prints one line of JSON: check -> "ok" or what went wrong. test_contract.py
runs it against the installed vLLM and against source trees of the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback

import contract_balance  # noqa: F401  (registers its checks)
import contract_layers  # noqa: F401
import contract_load  # noqa: F401
from contract_engine import Engine
from contract_kit import CHECKS

from moe_backend.vllm_plugin import compat


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine, found = Engine(f"{folder}/store"), {}
        for name, function in CHECKS.items():
            try:
                function(engine)
                found[name] = "ok"
            except Exception:
                found[name] = traceback.format_exc(limit=-6)
    print(json.dumps({"version": compat.engine_version(), "checks": found}), file=sys.stderr)


if __name__ == "__main__":
    main()
