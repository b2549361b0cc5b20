# SPDX-License-Identifier: Apache-2.0
"""What the plugin asks support.py, on the whole model in the front end and on every layer.

Imports nothing of vLLM, so that ``doctor`` can ask the same questions anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_backend import envs, support
from moe_backend.support import Support
from moe_backend.types import MoEShape


class Refused(ValueError):
    """``tma_fp8`` was asked for and cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class ModelFacts:
    """The expert layers as a checkpoint's config.json describes them; None: not stated."""

    hidden: int | None = None
    intermediate: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    activation: str | None = None

    @classmethod
    def of(cls, hf_config: Any) -> ModelFacts:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        experts = _first(text, "n_routed_experts", "num_experts", "num_local_experts")
        return cls(
            hidden=_first(text, "hidden_size"),
            intermediate=_first(text, "moe_intermediate_size", "intermediate_size"),
            num_experts=experts,
            top_k=_first(text, "num_experts_per_tok", "moe_topk", "top_k_experts"),
            activation=_first(text, "hidden_act", "hidden_activation", of=str),
        )


def _first(config: Any, *names: str, of: type = int) -> Any | None:
    """The first attribute that is set to one value (some models list one per layer)."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, of) and not isinstance(value, bool):
            return value
    return None


@dataclass(frozen=True)
class EngineFacts:
    """What the user asked of the engine besides a model."""

    tp_size: int = 1  # over which an expert's matrices are cut
    ep_size: int = 1
    all2all: str | None = None  # the engine's backend, None unless whole experts are spread
    travels: bool = False  # a rank's tokens need experts of other ranks
    graphs: bool = True
    dbo: bool = False
    elastic: bool = False
    lora: bool = False
    moe_backend: str = "auto"

    @classmethod
    def of(cls, config: Any | None) -> EngineFacts:
        """``config`` is a VllmConfig, possibly half built, or None."""
        parallel = getattr(config, "parallel_config", None)
        if parallel is None:
            return cls()
        tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
        dp *= getattr(parallel, "prefill_context_parallel_size", 1)
        ranks, experts_whole = tp * dp, parallel.enable_expert_parallel and tp * dp > 1
        return cls(
            tp_size=1 if experts_whole else ranks,
            ep_size=ranks if experts_whole else 1,
            all2all=parallel.all2all_backend if experts_whole and dp > 1 else None,
            travels=dp > 1,
            graphs=not getattr(getattr(config, "model_config", None), "enforce_eager", False),
            dbo=bool(parallel.enable_dbo or getattr(parallel, "ubatch_size", 0) > 1),
            elastic=bool(getattr(parallel, "enable_elastic_ep", False)),
            lora=getattr(config, "lora_config", None) is not None,
            moe_backend=str(getattr(getattr(config, "kernel_config", None), "moe_backend", "auto")),
        )


def _refusals(*answers: Support) -> list[str]:
    return [answer.reason for answer in answers if not answer.ok]


def engine_refusals(engine: EngineFacts, transport: str, platform: str) -> list[str]:
    return _refusals(
        support.supports_engine_backend(engine.moe_backend),
        support.supports_experts(lora=engine.lora),
        support.supports_parallelism(
            all2all=engine.all2all, dbo=engine.dbo, elastic=engine.elastic
        ),
        support.supports_transport(
            transport,
            platform=platform,
            expert_parallel=engine.ep_size > 1,
            graphs=engine.graphs,
        )
        if engine.travels
        else support.YES,
    )


def model_refusals(
    model: ModelFacts,
    engine: EngineFacts,
    platform: tuple[str, tuple[int, int] | None],
    settings: envs.Settings | None = None,
) -> list[str]:
    """Every reason not to start, before weights are loaded; empty when all is well."""
    settings = settings or envs.load()
    name, capability = platform
    answers: list[Support] = [
        support.supports_platform(name),
        support.supports_device(capability),
    ]
    if model.num_experts and model.num_experts > 1:
        answers += _model_answers(model, engine)
    return _refusals(*answers) + engine_refusals(engine, settings.ep, name)


def _model_answers(model: ModelFacts, engine: EngineFacts) -> Iterator[Support]:
    if model.activation is not None:
        yield support.supports_activation(model.activation)
    if model.hidden is None or model.intermediate is None:
        return
    whole = support.supports_expert_layout(model.intermediate)
    yield whole
    if whole.ok:
        yield support.supports_tensor_parallel(model.hidden, model.intermediate, engine.tp_size)
    experts = model.num_experts or 1
    yield support.supports_shape(
        MoEShape(experts, experts, model.hidden, model.intermediate, model.top_k or 1)
    )


def refuse(reasons: list[str], where: str = "") -> None:
    """Raises Refused with every reason, when there is one."""
    if not reasons:
        return
    head = f"--quantization tma_fp8{where}: "
    raise Refused(head + (" | ".join(reasons)) + ".")
