# SPDX-License-Identifier: Apache-2.0
"""The symm exchange through its public face, one rank, with plain memory in place of symmetric."""

import pytest
import torch
import torch.distributed as dist
from factories import expert_weights, relative_error, routing

from moe_backend import Routing, fused_experts
from moe_backend.distributed import (
    EPConfig,
    EPError,
    EPMismatch,
    EPOverflow,
    ExpertParallel,
    alltoallv,
    combine,
    dispatch,
    ep_experts,
    open_backend,
    symm,
)

EXPERTS, HIDDEN = 4, 256
CONFIG = EPConfig(EXPERTS, HIDDEN, top_k=2, max_tokens=8, align=16)


class PlainBuffer:
    def __init__(self, nbytes, control):
        self.local = torch.zeros(nbytes, dtype=torch.uint8)
        self.peers = torch.tensor([self.local.data_ptr()])

    def destroy(self):
        self.local = None


class PlainAlarm(symm.Alarm):
    def __init__(self, device, phases):
        self.status, self.seen = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        self._phases = phases


@pytest.fixture(autouse=True)
def one_rank(device, monkeypatch, tmp_path):
    if device != "cpu":
        pytest.skip("on GPUs tests/distributed/test_symm.py uses real symmetric memory")
    monkeypatch.setattr(symm, "require_peer_access", lambda control: None)
    monkeypatch.setattr(symm, "SymmetricBuffer", PlainBuffer)
    monkeypatch.setattr(symm, "Alarm", PlainAlarm)
    monkeypatch.setattr(symm, "CLOCK", False)
    monkeypatch.setattr(symm, "DEFAULT_PROGRAMS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tokens(n=5):
    return torch.randn(n, HIDDEN).bfloat16(), routing(n, EXPERTS, 2)


def ones(rows):
    return torch.ones(rows.num_rows, HIDDEN).bfloat16()


def test_the_layer_equals_one_process():
    ep, w, (x, r) = ExpertParallel(CONFIG, programs=3), expert_weights(EXPERTS, HIDDEN), tokens()
    out = ep_experts(x, r, w, ep)  # the reference runs the experts here
    assert relative_error(out, fused_experts(x, r, w)) < 3e-3
    spread = torch.stack([x, x], 1)[:, 1]  # rows apart, as views of a fused tensor are
    assert torch.equal(ep_experts(spread, r, w, ep), out)
    ep.check()
    ep.destroy()
    with pytest.raises(ValueError, match="was destroyed"):
        dispatch(x, r, ep)


def test_slots_are_freed_by_combine_and_handles_are_used_once():
    ep, (x, r) = ExpertParallel(CONFIG, programs=3), tokens()
    (a_rows, a), (b_rows, b) = dispatch(x, r, ep), dispatch(x, r, ep)
    assert a_rows.data.data_ptr() != b_rows.data.data_ptr()
    with pytest.raises(ValueError, match="2 dispatches are in flight"):
        dispatch(x, r, ep)
    total = r.topk_weights.sum(1, keepdim=True).expand(-1, HIDDEN)
    torch.testing.assert_close(combine(ones(a_rows), a).float(), total, rtol=2**-7, atol=0)
    with pytest.raises(ValueError, match="combined already"):
        combine(ones(a_rows), a)
    again, c = dispatch(x, r, ep)
    assert again.data.data_ptr() == a_rows.data.data_ptr(), "the lowest free slot is taken"
    with pytest.raises(ValueError, match="rows: expected bfloat16 of shape"):
        combine(ones(again)[:1], c)
    combine(ones(b_rows), b)


def test_a_refused_input_breaks_the_exchange_with_its_reason():
    ep, (x, r) = ExpertParallel(CONFIG, programs=3), tokens()
    with pytest.raises(EPMismatch, match="at most max_tokens=8 tokens, found 9"):
        dispatch(*tokens(9), ep)
    with pytest.raises(EPMismatch, match="rank 0 refused its input"):
        dispatch(x, r, ep)


def test_an_overflow_is_raised_by_the_next_call():
    sizes = EPConfig(EXPERTS, HIDDEN, top_k=2, max_tokens=8, align=16, capacity_rows=16)
    ep, x = ExpertParallel(sizes, programs=3), torch.randn(8, HIDDEN).bfloat16()
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32)
    dispatch(x, Routing(ids, torch.ones(8, 2), EXPERTS), ep)
    with pytest.raises(EPOverflow, match="rank 0 would receive more rows"):
        ep.check()


def test_wrong_dtypes_are_refused_when_it_is_made():
    sizes = EPConfig(EXPERTS, HIDDEN, top_k=2, max_tokens=8, dtype=torch.float16)
    with pytest.raises(EPMismatch, match="symm carries bf16, not torch.float16"):
        ExpertParallel(sizes)


def test_alltoallv():
    backend = open_backend("symm", capacity_bytes=4096)
    send, got = torch.randn(3, 5), torch.zeros(1, dtype=torch.int64)
    recv = torch.zeros(4, 5)
    alltoallv(send, torch.tensor([3]), recv, got, backend=backend)
    assert torch.equal(recv[:3], send) and not recv[3].any() and got.tolist() == [3]
    with pytest.raises(EPMismatch, match="recv: expected rows of torch.float32"):
        alltoallv(send, torch.tensor([3]), recv.int(), got, backend=backend)
    with pytest.raises(EPError, match="refused its input"):
        alltoallv(send, torch.tensor([3]), recv, got, backend=backend)
    backend.destroy()
