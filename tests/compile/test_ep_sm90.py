# SPDX-License-Identifier: Apache-2.0
"""The exchange's kernels compile for sm_90a without a GPU, with the accesses they rely on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parents[1] / "lib"

SCRIPT = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import torch, offline_sm90
from ep_world import make_world
from moe_backend.kernels import ep_alltoallv, ep_combine, ep_dispatch, ep_plan
from moe_backend.kernels.ep_buffers import Layout

layout = Layout(8, 256, 7168, 8, 64, 2048, 64, 1, True)
end = make_world(layout, clock=True, programs=32)[3]
ids, weights = torch.zeros(32, 8, dtype=torch.int32), torch.zeros(32, 8)
x, word = torch.zeros(32, 7168).bfloat16(), lambda n: torch.zeros(n, dtype=torch.int32)
stage = ep_alltoallv.Staging(
    8, 3, 4096, torch.zeros(1 << 20, dtype=torch.uint8), end.peers, word(8), word(1), word(1),
    10**9, 32, True)
counts = torch.zeros(8, dtype=torch.int64)
with offline_sm90.compiling() as kernels:
    ep_plan.count(end, 0, ids)
    ep_plan.arrange(end, 0)
    ep_dispatch.send(end, 0, x, ids, weights)
    ep_dispatch.receive(end, 0)
    ep_combine.send_back(end, 0, torch.zeros(2048, 7168).bfloat16())
    ep_combine.collect(end, 0, x)
    ep_alltoallv.put(stage, x, counts, x, 14336, 1)
    ep_alltoallv.take(stage, x, counts, 14336, 1)
print(json.dumps([
    dict(name=k.name, spills=k.spills, registers=k.registers,
         ops=re.findall(r"(?:ld|st|atom)\\.[\\w.:]+|bar\\.sync|globaltimer", k.asm["ptx"]))
    for k in kernels]))
"""

NAMES = {"count", "arrange", "send", "receive", "send_back", "collect", "put", "take"}
WIDE = {"st.global.v4.b32", "st.global.v2.b64"}  # 16 bytes
WAIT = {"arrange", "receive", "collect", "take"}


@pytest.fixture(scope="module")
def kernels():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(LIB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {k["name"].strip("_").removesuffix("_kernel"): k for k in found}


def test_all_compile_without_spills(kernels):
    assert set(kernels) == NAMES
    assert {n: k["spills"] for n, k in kernels.items() if k["spills"]} == {}


def test_waits_acquire_at_system_scope_and_look_at_the_clock(kernels):
    for name in WAIT:
        ops = kernels[name]["ops"]
        assert any("sys.acquire" in op for op in ops) and "globaltimer" in ops, name


def test_writers_release_at_system_scope_behind_a_barrier(kernels):
    for name in NAMES - WAIT:
        ops = kernels[name]["ops"]
        release = max(i for i, op in enumerate(ops) if "sys.release" in op)
        ticket = max(i for i, op in enumerate(ops) if "sys.acq_rel" in op)
        assert ticket < release and "bar.sync" in ops[ticket:release], name
        assert "bar.sync" in ops[ticket - 2 : ticket], name


def test_rows_move_in_16_byte_accesses(kernels):
    for name in ("send", "receive", "send_back", "collect", "put", "take"):
        assert WIDE & set(kernels[name]["ops"]), name
