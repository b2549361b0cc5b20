# SPDX-License-Identifier: Apache-2.0
"""The routers beside vLLM's operators (serving) and torch (training)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from moe_backend import reference, reference_training
from moe_backend.measure import family
from moe_backend.types import RouterSpec

TOKENS = (1, 64, 256, 1024, 4096, 16384)
DEEPSEEK = RouterSpec(8, "sigmoid", 8, 4, 0, True, 2.5)
SERVING = {
    "deepseek E256 groups": (256, DEEPSEEK),
    "softmax E128 top-8": (128, RouterSpec(8, "softmax", renormalize=True)),
    "softmax E512 top-10": (512, RouterSpec(10, "softmax", renormalize=True)),
}
DENSE = [  # tokens, experts, spec
    (16384, 256, DEEPSEEK),
    (8192, 256, RouterSpec(8, "sigmoid")),
    (8192, 2304, RouterSpec(36, "sigmoid")),
    (8192, 2304, RouterSpec(36, "softmax")),
]
SCORES = [(16384, 256, 8, "sigmoid"), (8192, 2304, 36, "sigmoid"), (8192, 2304, 36, "softmax")]
_NEAR_TIES = 1e-3  # share of tokens whose k-th score another rounding of the sigmoid may swap


def _logits(tokens: int, experts: int, sets: int = 4) -> list[torch.Tensor]:
    return [torch.randn(tokens, experts, device="cuda") for _ in range(sets)]


def _mostly_equal(name: str, out: torch.Tensor, want: torch.Tensor) -> str | None:
    """Rows may differ where two scores are within rounding of each other, and only there."""
    rows = (out != want).any(-1)
    share = rows.float().mean().item()
    return None if share <= _NEAR_TIES else f"{name}: {share:.1%} of the rows differ"


def _check_serving(logits, spec, bias) -> str | None:
    from moe_backend.kernels.router_topk import router_topk

    out = router_topk(logits, spec, bias)
    ids, weights, _ = reference.router_topk(logits, spec, bias)
    histogram = torch.bincount(out.topk_ids.flatten(), minlength=logits.shape[1])
    return (
        _mostly_equal("topk_ids", out.topk_ids.sort(-1).values, ids.sort(-1).values)
        or family.differs("counts", out.counts.long(), histogram, 0)
        or family.differs(
            "topk_weights", out.topk_weights.sort(-1).values, weights.sort(-1).values, 1e-5
        )
    )


def _vllm_calls(logits: Sequence[torch.Tensor], spec: RouterSpec, bias: torch.Tensor):
    operators = family.vllm_operators()
    if operators is None:
        return {}
    tokens, k = logits[0].shape[0], spec.top_k
    if spec.num_groups > 1:
        return {
            "vLLM": [
                lambda x=x: operators.grouped_topk(
                    x, spec.num_groups, spec.top_groups, k, spec.renormalize, spec.scale, bias, 1
                )
                for x in logits
            ]
        }

    def softmax(x: torch.Tensor) -> None:
        weights = torch.empty(tokens, k, dtype=torch.float32, device="cuda")
        ids = torch.empty(tokens, k, dtype=torch.int32, device="cuda")
        source = torch.empty(tokens, k, dtype=torch.int32, device="cuda")
        operators.topk_softmax(weights, ids, source, x, spec.renormalize, None)

    return {"vLLM": [lambda x=x: softmax(x) for x in logits]}


def serving_cases(name: str, tokens: int) -> Iterator[family.Case]:
    """ids and weights, as vLLM's operators give them, and the same with the histogram."""
    from moe_backend.kernels.router_topk import router_topk

    experts, spec = SERVING[name]
    bias = torch.randn(experts, device="cuda") * 0.1
    used = bias if spec.num_groups > 1 else None
    logits = _logits(tokens, experts)
    peers = _vllm_calls(logits, spec, bias)
    for histogram in (False, True):
        ours = [lambda x=x, h=histogram: router_topk(x, spec, used, want_counts=h) for x in logits]
        yield family.Case(
            operation=f"route {name}" + (" +histogram" if histogram else ""),
            size=f"{tokens}",
            calls={"ours": ours, **peers},
            bytes=tokens * (4 * experts + 8 * spec.top_k) + 4 * experts * histogram,
            check=lambda: _check_serving(logits[0], spec, used),
            target=">=1.5x" if spec.num_groups > 1 and tokens >= 4096 else ">=1x",
        )


def dense_cases(tokens: int, experts: int, spec: RouterSpec) -> Iterator[family.Case]:
    from moe_backend.kernels.router_dense import DenseSpec, router_dense, router_dense_backward

    dense = DenseSpec(
        spec.top_k, spec.score, True, spec.num_groups, spec.top_groups, spec.group_candidates,
        spec.scale,
    )  # fmt: skip
    logits = _logits(tokens, experts, 2)
    used = torch.randn(experts, device="cuda") * 0.1 if spec.num_groups > 1 else None
    grads = [torch.randn_like(x) for x in logits]
    maps = [router_dense(x, dense, used).routing_map for x in logits]

    def by_torch(x: torch.Tensor, g: torch.Tensor | None = None):
        leaf = x.detach().requires_grad_(g is not None)
        probs, chosen = reference_training.router_dense(leaf, spec, True, used)
        return probs, chosen, None if g is None else torch.autograd.grad(probs, leaf, g)[0]

    def check() -> str | None:
        x, g, chosen = logits[0], grads[0], maps[0]
        probs, want_map, want = by_torch(x, g)
        same = (chosen == want_map).all(-1)
        out = router_dense(x, dense, used).probs
        back = router_dense_backward(g, x, chosen, dense)
        return (
            _mostly_equal("routing_map", chosen, want_map)
            or family.differs("probs", out[same], probs.detach()[same], 1e-5)
            or family.differs("grad", back[same], want[same], 1e-5)
        )

    def both(x: torch.Tensor, g: torch.Tensor) -> None:
        router_dense_backward(g, x, router_dense(x, dense, used).routing_map, dense)

    size = f"{tokens}x{experts} top-{spec.top_k}" + (" groups" if spec.num_groups > 1 else "")
    name = f"dense {spec.score}"
    pairs = list(zip(logits, grads, strict=True))
    values = tokens * experts
    yield family.Case(
        f"{name} forward", size,
        {
            "ours": [partial(router_dense, x, dense, used) for x in logits],
            "torch": [partial(by_torch, x) for x in logits],
        },
        values * 9, check, ">=4x; 40% of copy at 2304; 16384x256 <=30 us",
    )  # fmt: skip
    yield family.Case(
        f"{name} backward", size,
        {
            "ours": [
                partial(router_dense_backward, g, x, m, dense)
                for (x, g), m in zip(pairs, maps, strict=True)
            ]
        },
        values * 13, check, "40% of copy at 2304",
    )  # fmt: skip
    yield family.Case(
        f"{name} fwd+bwd", size,
        {
            "ours": [partial(both, x, g) for x, g in pairs],
            "torch": [partial(by_torch, x, g) for x, g in pairs],
        },
        values * 22, check, ">=4x",
    )  # fmt: skip


def score_cases(tokens: int, experts: int, k: int, score: str) -> Iterator[family.Case]:
    from moe_backend.kernels.router_scores import router_scores, router_scores_backward

    logits = _logits(tokens, experts, 2)
    grads = [torch.randn_like(x) for x in logits]
    pairs = list(zip(logits, grads, strict=True))

    def check() -> str | None:
        leaf = logits[0].clone().requires_grad_()
        want, want_map = reference_training.router_scores(leaf, k, score)
        out, chosen = router_scores(logits[0], k, score)
        back = router_scores_backward(grads[0], logits[0], k, score)
        return (
            _mostly_equal("routing_map", chosen, want_map)
            or family.differs("scores", out, want.detach(), 1e-5)
            or family.differs("grad", back, torch.autograd.grad(want, leaf, grads[0])[0], 1e-5)
        )

    size, values = f"{tokens}x{experts} top-{k}", tokens * experts
    yield family.Case(
        f"scores {score} forward", size,
        {
            "ours": [partial(router_scores, x, k, score) for x in logits],
            "torch": [partial(reference_training.router_scores, x, k, score) for x in logits],
        },
        values * 9, check, "60% of copy at 2304",
    )  # fmt: skip
    backward = [partial(router_scores_backward, g, x, k, score) for x, g in pairs]
    yield family.Case(f"scores {score} backward", size, {"ours": backward}, values * 12, check)


def run(tokens: Sequence[int] = TOKENS, *, training: bool = True) -> Iterator[family.Row]:
    """A row per operation and size, as each is done."""

    def cases() -> Iterator[family.Case]:
        for name in SERVING:
            for count in tokens:
                yield from serving_cases(name, count)
        if training:
            for dense in DENSE:
                yield from dense_cases(*dense)
            for scores in SCORES:
                yield from score_cases(*scores)

    return family.run(cases())
