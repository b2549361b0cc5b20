# SPDX-License-Identifier: Apache-2.0
"""Bad input is named on every rank; a dead or stuck rank stops the others within the bound."""

import pytest
import torch
from ranks import run_ranks

from moe_backend import Routing
from moe_backend.distributed import (
    EPConfig,
    EPMismatch,
    EPOverflow,
    EPTimeout,
    ExpertParallel,
    combine,
    dispatch,
    open_backend,
)
from moe_backend.distributed.symm_memory import decode, supports_symmetric_memory

WORLD, EXPERTS, HIDDEN = 4, 8, 128
BASE = EPConfig(EXPERTS, HIDDEN, top_k=2, max_tokens=8, align=16)


def changed(**fields):
    return EPConfig(**{**{f: getattr(BASE, f) for f in BASE.__dataclass_fields__}, **fields})


def tokens(num_tokens=4, hidden=HIDDEN, dtype=torch.bfloat16):
    return torch.ones(num_tokens, hidden, dtype=dtype)


def plain_routing(num_tokens=4, experts=EXPERTS):
    ids = torch.arange(num_tokens * 2).view(num_tokens, 2) % experts
    return Routing(ids.int(), torch.ones(ids.shape), experts)


CONSTRUCTION = {  # name: (what the odd rank gives, the message on every rank)
    "hidden": (
        lambda: ExpertParallel(changed(hidden=256), backend="gloo"),
        "hidden is 128 on rank 0 and 256 on rank 2",
    ),
    "experts": (
        lambda: ExpertParallel(changed(num_experts=16), backend="gloo"),
        "num_experts is 8 on rank 0 and 16 on rank 2",
    ),
    "dtype": (
        lambda: ExpertParallel(changed(dtype=torch.float16), backend="gloo"),
        "dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 2",
    ),
    "two homes": (
        lambda: ExpertParallel(
            BASE, backend="gloo", expert_map=torch.tensor([0, -1, -1, -1, 1, -1, -1, -1])
        ),
        "expert 0 lives on ranks 0 and 2",
    ),
    "no home": (
        lambda: ExpertParallel(BASE, backend="gloo", expert_map=torch.full((8,), -1)),
        "expert 4 lives on no rank",
    ),
    "row twice": (
        lambda: ExpertParallel(
            BASE, backend="gloo", expert_map=torch.tensor([-1, -1, -1, -1, 1, 1, -1, -1])
        ),
        "rank 2: expert_map: expected rows 0 to 1, each at most once, found [1, 1]",
    ),
    "map's length": (
        lambda: ExpertParallel(BASE, backend="gloo", expert_map=torch.zeros(3)),
        "rank 2: expert_map: expected shape (8,), found (3,)",
    ),
}


def _construction(rank, world):
    said = {}
    for name, (odd, _) in CONSTRUCTION.items():
        try:
            odd() if rank == 2 else ExpertParallel(BASE, backend="gloo")
        except EPMismatch as error:
            said[name] = str(error)
    try:
        ExpertParallel(changed(num_experts=10), backend="gloo")
    except EPMismatch as error:
        said["divide"] = str(error)
    return said


def test_ranks_that_disagree_are_told_so_on_every_rank():
    for said in run_ranks(_construction, WORLD):
        for name, (_, expected) in CONSTRUCTION.items():
            assert expected in said[name]
        assert "10 experts cannot be shared equally by 4 ranks. Use 2 ranks" in said["divide"]


INPUTS = {
    "hidden": (lambda ep: dispatch(tokens(hidden=64), plain_routing(), ep), "found shape (4, 64)"),
    "dtype": (
        lambda ep: dispatch(tokens(dtype=torch.float32), plain_routing(), ep),
        "expected torch.bfloat16, found torch.float32",
    ),
    "too many": (
        lambda ep: dispatch(tokens(9), plain_routing(9), ep),
        "expected at most max_tokens=8 tokens, found 9",
    ),
    "routing": (
        lambda ep: dispatch(tokens(), plain_routing(4, 9), ep),
        "routing: expected ids [4, 2] of 8 experts, found [4, 2] of 9",
    ),
    "gradient": (
        lambda ep: dispatch(tokens().requires_grad_(), plain_routing(), ep),
        "use wire='native'",
    ),
}


def _inputs(rank, world):
    ep, said = ExpertParallel(BASE, backend="gloo"), {}
    for name, (odd, _) in INPUTS.items():
        try:
            odd(ep) if rank == 1 else dispatch(tokens(), plain_routing(), ep)
        except EPMismatch as error:
            said[name] = str(error)
    rows, handle = dispatch(tokens(), plain_routing(), ep)
    out = torch.ones(rows.num_rows, HIDDEN if rank != 3 else 1).bfloat16()
    try:
        combine(out, handle)
    except EPMismatch as error:
        said["rows"] = str(error)
    # every rank has seen the same errors: the exchange goes on
    rows, handle = dispatch(tokens(), plain_routing(), ep)
    done = torch.ones(rows.num_rows, HIDDEN).bfloat16()
    assert combine(done, handle).eq(2).all()
    for again in (
        handle,
        dispatch(tokens(), plain_routing(), ExpertParallel(BASE, backend="gloo"))[1],
    ):
        with pytest.raises(ValueError, match="combined already|another ExpertParallel"):
            ep.combine(done, again)
    return said


def test_wrong_input_of_one_rank_is_raised_on_all():
    for said in run_ranks(_inputs, WORLD):
        for name, (_, expected) in INPUTS.items():
            assert "rank 1: " in said[name] and expected in said[name]
        assert "rank 3: rows: expected torch.bfloat16 of shape" in said["rows"]


def _overflow(rank, world):
    ep = ExpertParallel(changed(capacity_rows=32), backend="gloo")
    everyone_to_two = torch.tensor(
        [[4, 5]] * 8, dtype=torch.int32
    )  # 32 routes to each of two experts
    with pytest.raises(EPOverflow) as raised:
        dispatch(tokens(8), Routing(everyone_to_two, torch.ones(8, 2), EXPERTS), ep)
    rows, handle = dispatch(tokens(), plain_routing(), ep)  # 4 routes to each expert: two tiles
    assert rows.num_rows == 32 and ep.capacity_rows == 32
    assert combine(torch.ones(32, HIDDEN).bfloat16(), handle).eq(2).all()
    return str(raised.value)


def test_overflow_is_raised_on_every_rank_before_a_token_moves():
    for message in run_ranks(_overflow, WORLD):
        assert "rank 2 would receive 64 rows (padding included)" in message
        assert "stated capacity is 32" in message


def test_worst_case_capacity_holds_the_worst_case():
    assert BASE.rows(WORLD) == 80  # 64 routes to two experts: five tiles of 16, as 1 + 63
    one = EPConfig(4, HIDDEN, top_k=1, max_tokens=3, align=16)
    assert one.rows(4) == 16  # twelve routes to one expert take one tile


def _without_peer_access(rank, world):
    said = []
    for make in (lambda: ExpertParallel(BASE), lambda: open_backend("symm")):
        with pytest.raises(EPMismatch) as raised:
            make()
        said.append(str(raised.value))
    with pytest.raises(ValueError, match="no NCCL transport"):
        open_backend("nccl")
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPUs")
def test_symm_is_refused_on_every_rank_without_gpus():
    for said in run_ranks(_without_peer_access, 2):
        for message in said:
            assert "rank 0: symm writes into other GPUs' memory, and here is no GPU" in message
            assert "Use MOE_BACKEND_EP=nccl or engine" in message


@pytest.mark.parametrize(
    "capability, hosts, unreachable, reason",
    [
        ((9, 0), 2, [], "the group spans 2"),
        ((9, 0), 1, [1, 3], "no peer access to those of ranks 1, 3"),
        ((8, 0), 1, [], "the GPU is sm_80"),
        ((9, 0), 1, [], ""),
    ],
)
def test_what_symm_needs(capability, hosts, unreachable, reason):
    answer = supports_symmetric_memory(capability, hosts, unreachable)
    assert answer.ok == (not reason) and reason in answer.reason


def test_a_status_word_becomes_an_error_with_rank_and_phase():
    phases = ("dispatch counts", "dispatch rows", "combine results")
    assert decode(0, phases, 1.0) is None
    late = decode(1 | 2 << 8 | 5 << 16, phases, 1.0)
    assert isinstance(late, EPTimeout) and late.ranks == (5,) and late.phase == "combine results"
    assert isinstance(decode(3 | 1 << 16, phases, 1.0), EPOverflow)
    assert "rank 7 refused" in str(decode(2 | 7 << 16, phases, 1.0))
