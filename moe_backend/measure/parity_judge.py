# SPDX-License-Identifier: Apache-2.0
"""From two engine runs to numbers, and from numbers to a verdict.

Where the bounds come from
    e4m3 keeps three fraction bits: rounding to nearest leaves 2.6e-2 of a value (rms). A layer
    rounds its input (seen by gate and up) and its intermediate, so against arithmetic without
    rounding its routed output differs by about sqrt(3) times that, 4.4e-2 as measured.
    Against an oracle that rounds at the same places only bf16 is left: 1.7e-3 each for our
    output, for the engine's scaling and for the sum with the shared experts, together at most
    3e-3 of the larger of the two; single FP8 codes that a different order of summation flips
    stay below that.
    A log-probability moves by the relative error of the last hidden state (a layer's 4.4e-2 times
    the share of the routed experts, about a half, at most 2.2e-2) times the spread of the logits
    (3 to 4): 5e-2 on average, and 2e-2 from bf16 logits, 6e-2 together. The bound is twice that,
    because now and then a near tie in a router is decided the other way; a normal distribution
    of that width has 99% below 0.4, the bound is 0.6 for the same reason. Two tokens change places
    when their difference moves by their gap, hence no gap above 1 may flip.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_backend import reference
from moe_backend.types import BLOCK, Activation, ExpertWeights, RouterSpec

BF16_ROUNDING = 1.7e-3  # relative, rms
Parts = dict[str, torch.Tensor]  # "x", "logits", "out", and "shared" where the model has it


@dataclass(frozen=True)
class Bounds:
    """Largest (for the agreement: smallest) values that pass."""

    layer_error: float = 4e-3
    layer_worst_cell: float = 2e-2
    layer_rounding: float = 6e-2
    default_rounding: float = 6e-2
    mean_logprob_difference: float = 0.12
    p99_logprob_difference: float = 0.6
    flip_gap: float = 1.0  # the default's lead over our token, where the two disagree
    token_agreement: float = 0.95


def bounds_for(tp: int) -> Bounds:
    """Ranks add their parts in bf16, a rounding each, of sums that are half complete on average."""
    more = BF16_ROUNDING * (tp / 2) ** 0.5 if tp > 1 else 0.0
    return replace(Bounds(), layer_error=Bounds.layer_error + more)


@dataclass(frozen=True)
class LayerParity:
    """Relative errors of a layer's routed experts on activations captured from the default."""

    layer: int
    num_tokens: int
    num_experts_used: int
    error: float  # ours, against the oracle with the kernels' rounding
    worst_cell: float  # the same, in the worst 128 columns of the worst token
    rounding: float  # ours, against arithmetic without rounding
    default_rounding: float  # the default's, median over tokens, likewise


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    bound: float
    ok: bool
    what: str


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def carried(routed_rows: torch.Tensor, block_rows: torch.Tensor, dim: int | None = None) -> Any:
    """The norm that bf16 had to carry: of the routed experts or, if larger, of the whole block."""
    return torch.maximum(routed_rows.norm(dim=dim), block_rows.norm(dim=dim)).clamp_min(1e-30)


def worst_cell(found: torch.Tensor, wanted: torch.Tensor, block: torch.Tensor) -> float:
    """Largest error of 128 neighbouring columns of one token, relative to the token's usual cell.

    One wrong block scale moves one such cell; in the norm of a whole layer it would drown.
    """
    cells = (found - wanted).split(BLOCK, dim=-1)
    errors = torch.stack([cell.norm(dim=-1) for cell in cells], dim=-1)
    usual = carried(wanted, block, dim=-1) / len(cells) ** 0.5
    return float((errors / usual[:, None]).max())


def exact_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """The routed experts in fp32 on dequantised weights: nothing is rounded on the way."""
    x = x.float()
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        w13 = reference.dequant_blocks(weights.w13[expert], weights.w13_scale[expert])
        w2 = reference.dequant_blocks(weights.w2[expert], weights.w2_scale[expert])
        gate, up = (x[tokens] @ w13.T).chunk(2, dim=-1)
        rows = reference.swiglu(gate, up, activation) @ w2.T
        out.index_add_(0, tokens, rows * topk_weights[tokens, slots, None])
    return out


def routed(parts: Parts) -> torch.Tensor:
    """A block's output without its shared experts, fp32."""
    out = parts["out"].float()
    return out - parts["shared"].float() if "shared" in parts else out


@dataclass(frozen=True)
class LayerFacts:
    """A layer as the checkpoint has it, independent of any engine."""

    number: int
    weights: ExpertWeights
    spec: RouterSpec
    bias: torch.Tensor | None
    activation: Activation

    def to(self, device: str) -> LayerFacts:
        w = self.weights
        moved = (t.to(device) for t in (w.w13, w.w13_scale, w.w2, w.w2_scale))
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weights=ExpertWeights(*moved), bias=bias)


@torch.inference_mode()
def judge_layer(facts: LayerFacts, default: Parts, ours: Parts) -> LayerParity:
    """Compares both engines' routed experts with the two oracles on the default's activations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = facts.to(device)
    x, logits = default["x"].to(device), default["logits"].to(device)
    ids, topk_weights, _ = reference.router_topk(logits, facts.spec, facts.bias)
    matched = reference.fused_experts(
        x.float(), ids, topk_weights, facts.weights, facts.activation
    ).cpu()
    exact = exact_experts(x, ids, topk_weights, facts.weights, facts.activation).cpu()
    mine, theirs, block = routed(ours), routed(default), ours["out"].float()
    per_token = (theirs - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
    return LayerParity(
        layer=facts.number,
        num_tokens=x.shape[0],
        num_experts_used=int(ids.unique().numel()),
        error=float((mine - matched).norm() / carried(matched, block)),
        worst_cell=worst_cell(mine, matched, block),
        rounding=relative(mine, exact),
        default_rounding=float(per_token.median()),
    )


def prefix_agreement(default: list[int], ours: list[int]) -> float:
    """Share of the default's tokens that ours repeats before the first difference."""
    same = 0
    for a, b in zip(default, ours, strict=False):
        if a != b:
            break
        same += 1
    return same / max(len(default), 1)


@dataclass(frozen=True)
class TokenParity:
    """What the two engines say about the same text, position by position."""

    num_positions: int
    agreement: float  # share of positions with the same best token
    flip_gaps: list[float]  # where they differ: the default's lead over our best token
    greedy_agreement: float  # free running: share of tokens before the first difference
    differences: list[float]  # ours minus default, log-probability of each token of the text


def compare_tokens(default: dict[str, Any], ours: dict[str, Any]) -> TokenParity:
    """From the two results of parity_engine."""
    differences, gaps, positions = [], [], 0
    for tokens, theirs, mine in zip(
        default["sequences"], default["forced"], ours["forced"], strict=True
    ):
        for token, a, b in zip(tokens[1:], theirs, mine, strict=True):
            before, after = ({int(t): p for t, p in row} for row in (a, b))
            differences.append(after[token] - before[token])
            positions += 1
            best, own = int(a[0][0]), int(b[0][0])
            if best != own:
                # Not among the alternatives: its lead is at least that of the last one.
                gaps.append(a[0][1] - before.get(own, a[-1][1]))
    greedy = [
        prefix_agreement(a["output"], b["output"])
        for a, b in zip(default["greedy"], ours["greedy"], strict=True)
    ]
    return TokenParity(
        num_positions=positions,
        agreement=1 - len(gaps) / max(positions, 1),
        flip_gaps=sorted(gaps, reverse=True),
        greedy_agreement=sum(greedy) / max(len(greedy), 1),
        differences=differences,
    )


def quantile(values: list[float], share: float) -> float:
    """The smallest value with at least ``share`` of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def verdict(layers: list[LayerParity], tokens: TokenParity, bounds: Bounds) -> list[Check]:
    """Every bound with its value; parity holds when all are ok."""
    sizes = [abs(d) for d in tokens.differences]

    def at_most(name: str, value: float, what: str) -> Check:
        bound = getattr(bounds, name)
        return Check(name, value, bound, value <= bound, what)  # NaN is never ok

    def over_layers(field: str) -> float:
        values = [getattr(layer, field) for layer in layers]
        return max(values, key=lambda v: float("inf") if v != v else v)

    agreement = tokens.agreement
    return [
        at_most("layer_error", over_layers("error"), "ours to the oracle that rounds as we do"),
        at_most("layer_worst_cell", over_layers("worst_cell"), "the same, worst token and block"),
        at_most("layer_rounding", over_layers("rounding"), "ours to unrounded arithmetic"),
        at_most(
            "default_rounding",
            over_layers("default_rounding"),
            "the default's to unrounded arithmetic, median token",
        ),
        at_most("mean_logprob_difference", sum(sizes) / len(sizes), "mean |ours − default|"),
        at_most("p99_logprob_difference", quantile(sizes, 0.99), "99% are below"),
        at_most("flip_gap", max(tokens.flip_gaps, default=0.0), "default's lead where we differ"),
        Check(
            "token_agreement",
            agreement,
            bounds.token_agreement,
            agreement >= bounds.token_agreement,
            "same best token, given the same text",
        ),
    ]


def as_json(layers: list[LayerParity], tokens: TokenParity, checks: list[Check]) -> dict[str, Any]:
    sizes = [abs(d) for d in tokens.differences]
    shares = {f"p{round(100 * q)}": quantile(sizes, q) for q in (0.5, 0.9, 0.99)}
    return {
        "passed": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "layers": [asdict(layer) for layer in layers],
        "tokens": {
            "positions": tokens.num_positions,
            "agreement": tokens.agreement,
            "flips": len(tokens.flip_gaps),
            "flip_gaps": tokens.flip_gaps,
            "greedy_agreement": tokens.greedy_agreement,
        },
        "logprob_differences": {
            "mean_abs": sum(sizes) / len(sizes),
            **shares,
            "max_abs": max(sizes),
            "mean": sum(tokens.differences) / len(sizes),
            "values": tokens.differences,
        },
    }
