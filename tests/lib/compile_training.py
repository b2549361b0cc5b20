# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of the routing and permutation family for sm_90a; one line of JSON each.

Run as a program, in a process whose Triton does not interpret.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import offline_sm90  # noqa: E402
import torch  # noqa: E402

from moe_backend.types import RouterSpec  # noqa: E402

FP8 = torch.float8_e4m3fn


def routers():
    from moe_backend.kernels.router_dense import DenseSpec, router_dense, router_dense_backward
    from moe_backend.kernels.router_scores import router_scores, router_scores_backward
    from moe_backend.kernels.router_topk import router_topk

    deepseek = RouterSpec(8, "sigmoid", 8, 4, 0, True, 2.5)
    for tokens, experts, spec in [
        (1, 256, deepseek),
        (300, 256, deepseek),
        (300, 128, RouterSpec(8, "softmax", renormalize=True)),
        (300, 512, RouterSpec(10, "softmax")),
        (3, 256, RouterSpec(8, "sqrtsoftplus")),
        (3, 2304, RouterSpec(36, "sigmoid")),
    ]:
        logits = torch.randn(tokens, experts)
        router_topk(logits, spec, logits[0])
        router_topk(logits.bfloat16(), spec, want_counts=False)
        dense = DenseSpec(
            spec.top_k, spec.score, True, spec.num_groups, spec.top_groups, spec.group_candidates
        )
        out = router_dense(logits, dense, logits[0], want_bits=True)
        router_dense(logits, dense, indices=torch.zeros(tokens, spec.top_k, dtype=torch.int16))
        for routing_map in out[1:]:
            router_dense_backward(logits, logits, routing_map, dense)
        scores, routing_map = router_scores(logits, spec.top_k, spec.score)
        router_scores_backward(scores, logits, spec.top_k, spec.score)


def losses():
    from moe_backend.kernels.aux_loss import aux_loss, aux_loss_backward

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for experts in (256, 2304):
            probs, counts = torch.rand(64, experts).to(dtype), torch.ones(experts).long()
            state = aux_loss(probs, counts, torch.tensor(64), 1.0)
            aux_loss_backward(state[0], state, counts, probs)


def balance():
    from moe_backend.kernels.balance_sums import balance_sums

    padding = torch.zeros(64, dtype=torch.bool)
    for experts, top_k, score in [
        (256, 8, "sigmoid"),
        (128, 8, "softmax"),
        (2304, 36, "sqrtsoftplus"),
    ]:
        tokens, scores = torch.zeros(experts).long(), torch.zeros(experts).double()
        ids, logits = torch.zeros(64, top_k).int(), torch.randn(64, experts)
        balance_sums(tokens, scores, ids, logits, padding, score)
        balance_sums(tokens, scores, ids[:1], logits[:1].bfloat16(), None, score)
        balance_sums(tokens, scores, ids.long(), None, padding, score)


def permutations():
    from moe_backend.kernels.permute import permute
    from moe_backend.kernels.row_map import row_map_of_ids, row_map_of_mask
    from moe_backend.kernels.sort_chunks import chunk_sources, sort_chunks
    from moe_backend.kernels.unpermute import unpermute, unpermute_backward

    tokens, experts, hidden = 64, 256, 7168
    mask, ids = torch.ones(tokens, experts).bool(), torch.zeros(tokens, 8).int()
    weight, scale = torch.rand(tokens, experts), torch.rand(tokens, 56)
    where, pending = row_map_of_mask(mask, 128)
    by_ids = row_map_of_ids(ids, experts)
    for dtype in (torch.float32, torch.bfloat16, FP8):
        x = torch.randn(tokens, hidden).to(dtype)
        rows = torch.randn(256, hidden).to(dtype)
        carried = {"scale": scale} if dtype is FP8 else {}
        permute(
            x, pending, experts, 256, offsets=where.offsets, pad_offsets=where.pad_offsets,
            probs=weight, **carried,
        )  # fmt: skip
        permute(x, by_ids.row_map, experts, 256, offsets=by_ids.offsets, **carried)
        permute(x, where.row_map, experts, 256, pad_offsets=where.pad_offsets)
        if dtype is not FP8:
            pads = where.pad_offsets
            unpermute(rows, where.row_map, experts, weight=weight, pad_offsets=pads)
            unpermute(rows, where.row_map, experts, pad_offsets=pads, moved=rows[:, 0])
            unpermute(rows, by_ids.row_map, experts, weight=weight[:, :8])
            unpermute_backward(x, rows, where.row_map, experts, weight, pads)
        source = chunk_sources(torch.ones(256).int(), torch.arange(256), 256)
        sort_chunks(rows, source, rows[:, 0].float(), back=True)


def main() -> None:
    with offline_sm90.compiling() as kernels:
        routers()
        losses()
        balance()
        permutations()
    for kernel in kernels:
        print(
            json.dumps(
                {
                    "kernel": kernel.name,
                    "registers": kernel.registers,
                    "stack": kernel.spills,
                    "shared": kernel.shared,
                }
            )
        )


if __name__ == "__main__":
    main()
