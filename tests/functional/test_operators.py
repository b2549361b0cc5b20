# SPDX-License-Identifier: Apache-2.0
"""The training operators under torch's own checks, torch.compile and CUDA graphs."""

import pytest
import torch

from moe_backend import functional as F

OPS = torch.ops.moe_backend
DENSE = (4, "sigmoid", False, 4, 2, 1.5)


def cases(device):
    x, mask = torch.randn(6, 16, device=device), torch.rand(6, 16, device=device) < 0.3
    ids = torch.rand(6, 16, device=device).topk(3).indices.int()
    counts, state = mask.sum(0), torch.rand(2, device=device)
    row_map, offsets, pads, _ = OPS.row_map(mask, 0, 4)
    rows, weight = torch.randn(90, 16, device=device), torch.rand(6, 16, device=device)
    sizes = torch.tensor([2, 4], device=device)
    source = OPS.chunk_sources(sizes, 1 - torch.arange(2, device=device), 6)
    buffer = torch.zeros(6, 4, dtype=torch.int32, device=device)
    return {
        "router_dense": (x, x[0], buffer, True, True, *DENSE),
        "router_dense_backward": (
            x,
            x,
            OPS.router_dense(x, None, None, True, 0, *DENSE)[1],
            *DENSE,
        ),
        "router_scores": (x, 3, "softmax", True),
        "router_scores_backward": (x, x, 3, "sigmoid"),
        "aux_loss": (x, counts, torch.tensor(6, device=device), 1.0, 0.1),
        "aux_loss_backward": (state[0], state, counts, x),
        "row_map": (ids, 16, 4),
        "permute_mask": (x, mask, 4, 90, x[:, :1].contiguous(), weight),
        "permute_rows": (x, row_map, 16, 90, offsets, pads, None, weight),
        "unpermute_rows": (rows, row_map, 16, weight, pads, rows[:, 0].contiguous()),
        "unpermute_rows_backward": (x, rows, row_map, 16, weight, pads),
        "chunk_sources": (sizes, 1 - torch.arange(2, device=device), 9),
        "sort_chunks": (x, source, x[:, 0].contiguous(), True),
    }


@pytest.mark.parametrize("name", cases("cpu"))
def test_opcheck(name):
    """Schema, shapes of the fake operators, and tracing, on the reference or the GPU."""
    on_gpu = torch.cuda.is_available()
    args = cases("cuda" if on_gpu else "cpu")[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if not (on_gpu and name in ("row_map", "permute_mask")):  # parts of a map are never written
        checks += ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, args, test_utils=checks)


def step(logits, x, bias):
    """Router, losses, permutation, experts of identity, and back."""
    probs, routing_map = F.fused_topk_with_score_function(
        logits, 4, False, 4, 2, 1.5, "sigmoid", bias
    )
    _, scores = F.fused_compute_score_for_moe_aux_loss(logits, 4, "softmax")
    counts = routing_map.sum(0)
    loss = F.fused_moe_aux_loss(scores, counts, logits.shape[0], logits.shape[1], 4, 0.01)
    rows, moved, row_map, pads, _ = F.moe_permute_and_pad_with_probs(
        x, probs, routing_map, counts, 8, num_out_tokens=12 * logits.shape[0] + 7 * 16
    )
    out = F.moe_unpermute(rows.sin() * moved[:, None], row_map, probs, pad_offsets=pads)
    return out.square().sum() + loss


def inputs(device):
    return [torch.randn(5, n, device=device, requires_grad=True) for n in (16, 32)]


def test_compiles_without_graph_breaks():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, x = inputs(device)
    bias = torch.linspace(-0.1, 0.1, 16, device=device)
    want = torch.autograd.grad(step(logits, x, bias), (logits, x))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(logits, x, bias), (logits, x))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.gpu
def test_captured_step_follows_new_inputs():
    """No host sync in a whole step, forward and backward; replays equal eager runs."""
    bias = torch.linspace(-0.1, 0.1, 16, device="cuda")
    logits, x = inputs("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(step(logits, x, bias), (logits, x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = torch.autograd.grad(step(logits, x, bias), (logits, x))
        for _ in range(50):
            with torch.no_grad():
                logits.normal_(), x.normal_()
            graph.replay()
            want = torch.autograd.grad(step(logits, x, bias), (logits, x))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w)


@pytest.mark.gpu
def test_captured_aux_loss_reads_the_number_of_tokens_at_replay():
    probs, counts = torch.rand(64, 16, device="cuda", requires_grad=True), torch.ones(16).cuda()
    total = torch.tensor(64, device="cuda")

    def run():
        loss = F.fused_moe_aux_loss(probs, counts, total, 16, 2, 0.1)
        return loss, torch.autograd.grad(loss, probs)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss, grad = run()
        for tokens in (64, 128, 7):
            total.fill_(tokens)
            graph.replay()
            want = F.fused_moe_aux_loss(probs, counts, tokens, 16, 2, 0.1)
            torch.testing.assert_close(loss, want.detach())
            torch.testing.assert_close(grad, torch.autograd.grad(want, probs)[0])


@pytest.mark.gpu
def test_two_thousand_repeats_are_bit_identical():
    probs = torch.rand(4096, 256, device="cuda")
    counts = torch.randint(0, 999, (256,), device="cuda")
    mask = torch.rand(512, 64, device="cuda") < 0.1
    x, weight = torch.randn(512, 256, device="cuda"), torch.rand(512, 64, device="cuda")

    def run():
        rows, moved, row_map, pads, _ = F.moe_permute_and_pad_with_probs(
            x, weight, mask, mask.sum(0), 16, num_out_tokens=8192
        )
        loss = F.fused_moe_aux_loss(probs, counts, 4096, 256, 8, 0.01)
        return loss, rows, moved, F.moe_unpermute(rows, row_map, weight, pad_offsets=pads)

    first = run()
    for _ in range(2000):
        assert all(map(torch.equal, run(), first))


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """A 32-bit offset wraps at 2^31: rows on both sides of it must be exact."""
    tokens, hidden = 40_000, 7168
    ids = torch.rand(tokens, 64, device="cuda").topk(8).indices.int()
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    rows, row_map = F.moe_permute(x, ids, map_type="index")
    assert rows.numel() > 2**31
    token = torch.arange(tokens, device="cuda").repeat_interleave(8)
    order = ids.flatten().sort(stable=True).indices
    for at in (0, 2**31 // hidden - 1, 2**31 // hidden, tokens * 8 - 1):
        assert torch.equal(rows[at], x[token[order[at]]])
    assert torch.equal(F.moe_unpermute(rows, row_map, map_type="index")[-100:], x[-100:] * 8)


@pytest.mark.gpu
def test_too_many_routes_give_nan_and_stay_in_bounds():
    x, mask = torch.randn(64, 128, device="cuda"), torch.ones(64, 8, device="cuda").bool()
    canary = torch.full((600, 128), 7.0, device="cuda")
    rows, _ = F.moe_permute(x, mask, 300)
    assert rows.shape == (300, 128) and rows.isnan().all()
    assert (canary == 7).all()


@pytest.mark.gpu
def test_two_hundred_thousand_tokens():
    """grid.y ends at 65,535."""
    x = torch.randn(200_000, 64, device="cuda")
    ids = torch.randint(0, 32, (200_000, 1), device="cuda", dtype=torch.int32)
    rows, row_map = F.moe_permute(x, ids, map_type="index")
    assert torch.equal(F.moe_unpermute(rows, row_map, map_type="index"), x)
