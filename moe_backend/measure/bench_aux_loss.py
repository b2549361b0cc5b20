# SPDX-License-Identifier: Apache-2.0
"""The balance loss and its gradient beside the same in torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_backend import reference_training
from moe_backend.measure import family

SIZES = ((8192, 256, 8), (8192, 512, 10), (8192, 2304, 36), (16384, 256, 8))


def cases(tokens: int, experts: int, k: int) -> Iterator[family.Case]:
    from moe_backend.kernels.aux_loss import aux_loss, aux_loss_backward

    factor = 1e-2 * experts / k
    probs = [torch.rand(tokens, experts, device="cuda") for _ in range(4)]
    counts = torch.randint(0, tokens, (experts,), device="cuda")
    total = torch.tensor(tokens, device="cuda")
    grad = torch.tensor(0.7, device="cuda")
    state = aux_loss(probs[0], counts, tokens, factor)

    def by_torch(p: torch.Tensor, backward: bool = False):
        leaf = p.detach().requires_grad_(backward)
        loss = reference_training.aux_loss(leaf, counts, total, factor)
        return loss, torch.autograd.grad(loss, leaf, grad.to(loss))[0] if backward else None

    def check() -> str | None:
        out = aux_loss(probs[0], counts, total, factor)
        want, want_grad = by_torch(probs[0].double(), True)
        back = aux_loss_backward(grad, out, counts, probs[0])
        relative = ((out[0] - want) / want).detach()[None]
        return family.differs("loss", relative, torch.zeros_like(relative), 1e-6) or (
            family.differs("grad", back / want_grad.max(), want_grad / want_grad.max(), 1e-6)
        )

    def both(p: torch.Tensor) -> None:
        aux_loss_backward(grad, aux_loss(p, counts, tokens, factor), counts, p)

    size, values = f"{tokens}x{experts}", tokens * experts
    yield family.Case(
        "aux loss forward", size,
        {
            "ours": [partial(aux_loss, p, counts, tokens, factor) for p in probs],
            "torch": [partial(by_torch, p) for p in probs],
        },
        values * 4, check, "60% of copy at 2304; <=6 us at 8192x256",
    )  # fmt: skip
    backward = [partial(aux_loss_backward, grad, state, counts, p) for p in probs]
    yield family.Case(
        "aux loss backward", size, {"ours": backward}, values * 4, check, "60% of write"
    )
    yield family.Case(
        "aux loss fwd+bwd", size,
        {
            "ours": [partial(both, p) for p in probs],
            "torch": [partial(by_torch, p, True) for p in probs],
        },
        values * 8, check,
    )  # fmt: skip


def run() -> Iterator[family.Row]:
    """A row per direction and size, as each is done."""
    return family.run(case for size in SIZES for case in cases(*size))
