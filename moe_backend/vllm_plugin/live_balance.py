# SPDX-License-Identifier: Apache-2.0
"""Balance statistics of the engine's layers: MOE_BACKEND_BALANCE=1 turns them on, at load.

Off, a layer has no counters and runs exactly what it ran before. On, it counts every batch on its
device (see moe_backend/balance.py); ``moe_balance()`` of a worker reads the counters, between two
steps. A reload and sleep keep them: they are named buffers that no checkpoint fills.

Rows that are no token (padding to a captured graph's size, idle steps of a data-parallel rank,
warm-up) are left out where the engine tells them apart; where its own all-to-all has mixed the rows
of all ranks, they count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_backend import balance, envs, ops
from moe_backend.types import RouterSpec
from moe_backend.vllm_plugin import compat, readiness
from moe_backend.vllm_plugin.layers import travels

COUNTERS = "moe_balance"  # name of the submodule


@dataclass(frozen=True)
class Watched:
    """What a reading of a layer must say so that ranks can be put together."""

    layer: str
    top_k: int
    source: str  # whose tokens this rank counts: readings of one source are the same
    num_sources: int
    speaks: bool  # False where another rank of this engine reports the same tokens
    physical: bool  # ids are those of copies of experts
    scored: bool  # the layer sees logits


_watched: WeakKeyDictionary[Any, Watched] = WeakKeyDictionary()


def attach(layer: Any, *, exchanged: bool, scored: bool) -> bool:
    """Gives a layer its counters; whether it counts. Called again by every reload.

    Args:
        layer: the engine's RoutedExperts, its weights allocated.
        exchanged: our exchange moves its tokens, so that it sees this rank's own only.
        scored: it gets raw logits.
    """
    if not envs.load().balance:
        return False
    if COUNTERS not in layer._modules:
        # Another thread's allocations stay out of the pool that sleep takes the memory of.
        with ThreadPoolExecutor(1) as aside:
            made = aside.submit(balance.Counters, layer.global_num_experts, layer.w13_weight.device)
        layer.add_module(COUNTERS, made.result())
    _watched[layer] = _describe(layer, exchanged, scored)
    # Whether the engine's mask lies as the rows do that this layer sees.
    moe = layer.moe_config
    local = (exchanged or not travels(moe)) and not moe.is_sequence_parallel
    layer.moe_balance_masked = local and compat.slots_tell_padding()
    return True


def _describe(layer: Any, exchanged: bool, scored: bool) -> Watched:
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    own = exchanged and travels(moe)  # else every rank sees every token
    source, sources, speaks = "all", 1, compat.tensor_parallel_rank() == 0
    if own and moe.is_sequence_parallel:
        source, sources, speaks = f"ep {parallel.ep_rank}", parallel.ep_size, True
    elif own:
        source = f"dp {parallel.dp_rank} pcp {parallel.pcp_rank}"
        sources = moe.dp_size * moe.pcp_size
    return Watched(
        layer=layer.layer_name,
        top_k=moe.experts_per_token,
        source=source,
        num_sources=sources,
        speaks=speaks,
        physical=parallel.enable_eplb,
        scored=scored,
    )


@ops.operator(
    "observe_engine_batch(Tensor(a!) tokens, Tensor(b!) scores, Tensor ids, Tensor? logits, "
    "bool masked, str score) -> ()"
)
def observe_engine_batch(tokens, scores, ids, logits, masked, score):
    # Inside an operator: a compiler that traces the layer must not see the engine's context.
    padding = compat.padding_mask(ids.shape[0]) if masked else None
    balance.observe_balance(tokens, scores, ids, logits, padding, score)


@torch.library.register_fake("moe_backend::observe_engine_batch")
def _(*_args):
    return None


def observe(
    layer: Any,
    ids: torch.Tensor,
    logits: torch.Tensor | None = None,
    spec: RouterSpec | None = None,
) -> None:
    """Counts a batch of a layer that ``attach`` answered True for."""
    counters, masked = getattr(layer, COUNTERS), layer.moe_balance_masked
    torch.ops.moe_backend.observe_engine_batch(
        counters.tokens, counters.scores, ids, logits, masked, balance.score_of(spec)
    )


_ready: set[tuple[int, int, RouterSpec | None, int]] = set()


def make_ready(layer: Any, spec: RouterSpec | None, max_tokens: int) -> None:
    """Compiles for every size of a batch what counting adds to a layer; CUDA."""
    counters, top_k = getattr(layer, COUNTERS), layer.moe_config.experts_per_token
    key = (counters.tokens.numel(), top_k, spec, max_tokens)
    if key in _ready:
        return
    device = counters.tokens.device
    with torch.inference_mode():
        for tokens in readiness.token_counts(lambda n: (n > 1, n > 128, n > 256), max_tokens):
            logits = torch.zeros(tokens, key[0], device=device) if spec else None
            ids = torch.zeros(tokens, top_k, dtype=torch.int32, device=device)
            if spec:  # with its histogram, which the layer does without when it does not count
                bias = layer.e_score_correction_bias
                ids, _, _ = torch.ops.moe_backend.router_topk(logits, bias, *ops.flat(spec))
            for padding in (None, torch.ones(tokens, dtype=torch.bool, device=device)):
                balance.observe(counters, ids, logits=logits, spec=spec, padding=padding)
    counters.clear()
    _ready.add(key)


def moe_balance() -> list[dict[str, Any]]:
    """One plain dict per counting layer for which this rank speaks; sums since load."""
    found = []
    for layer, about in _watched.items():
        if about.speaks:
            counters = getattr(layer, COUNTERS)
            found.append(
                {
                    "layer": about.layer,
                    "top_k": about.top_k,
                    "source": about.source,
                    "num_sources": about.num_sources,
                    "physical": about.physical,
                    "tokens": counters.tokens.tolist(),
                    "scores": counters.scores.tolist() if about.scored else None,
                }
            )
    return found
