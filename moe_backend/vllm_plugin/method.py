# SPDX-License-Identifier: Apache-2.0
"""The MoE method: vLLM's routed experts on moe_backend.

Two forms, decided when weights have been loaded. *Monolithic*: the engine hands over raw logits
and one operator routes and computes. *Modular*: the engine routes (EPLB, routing simulation,
routers of a model's own) and hands over expert ids.

Where a rank's tokens need experts of other ranks, our own exchange takes them there and back, or
the engine moves tokens before us and reduces after us. Under tensor parallelism (with or without
whole experts) tokens stay and the engine reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
)
from vllm.model_executor.utils import set_weight_attrs

from moe_backend import envs, ops, pipeline
from moe_backend.distributed import EPConfig
from moe_backend.types import (
    BLOCK,
    FP8,
    Activation,
    ExpertWeights,
    RouterSpec,
    Routing,
)
from moe_backend.vllm_plugin import (
    METHOD,
    checks,
    compat,
    exchange,
    live_balance,
    readiness,
    routing,
    status,
)
from moe_backend.vllm_plugin.layers import replicated, shape_of, travels

logger = compat.logger()


class TmaFp8MoEMethod(FusedMoEMethodBase):
    """FP8 block-scaled experts through :mod:`moe_backend.pipeline`.

    Weights, scales, bias and maps are read from the layer at every call and nothing is derived
    from them, so reload, sleep and expert rebalancing need no care here.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.moe_config)
        config = get_current_vllm_config_or_none()
        # The engine's map from layer name to runner; the runner is added after this constructor.
        self._runners = config.compilation_config.static_forward_context if config else {}
        model = getattr(config, "model_config", None)
        self._captured = bool(getattr(model, "enable_return_routed_experts", False))
        self._activation = Activation(limit=layer.swiglu_limit)
        self._plan = routing.engine_routes("weights are not loaded yet")
        self._replicated = replicated(layer.moe_config)  # a reload has no current configuration
        self._exchange: int | None = None  # ours; None: the engine moves tokens, if they move
        self._counts = False  # the load of its experts

    # What the engine asks a method.

    @property
    def is_monolithic(self) -> bool:
        return self._plan.spec is not None

    @property
    def supports_internal_mk(self) -> bool:
        """True makes the engine's runner leave dispatch and combine to us."""
        return self._exchange is not None

    @property
    def supports_eplb(self) -> bool:
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return None  # quantisation happens inside our operator

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """vLLM 0.26 asks here for an all-to-all; None leaves dispatch to its runner."""
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the checkpoint's tensors as they are: gate rows, up rows, block scales."""
        layer.num_experts = num_experts
        layer.orig_dtype = params_dtype
        layer.weight_block_size = [BLOCK, BLOCK]
        inter, hidden = intermediate_size_per_partition, hidden_size

        def add(name: str, *shape: int, dtype: torch.dtype, **attributes: Any) -> None:
            data = torch.zeros(num_experts, *shape, dtype=dtype)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {**extra_weight_attrs, **attributes})

        add("w13_weight", 2 * inter, hidden, dtype=FP8)
        add("w2_weight", hidden, inter, dtype=FP8)
        block = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
        rows = (2 * inter // BLOCK, hidden // BLOCK), (hidden // BLOCK, inter // BLOCK)
        add("w13_weight_scale_inv", *rows[0], dtype=torch.float32, **block)
        add("w2_weight_scale_inv", *rows[1], dtype=torch.float32, **block)
        layer.w13_input_scale = None
        layer.w2_input_scale = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Decides who routes. The weights stay as they came."""
        _weights(layer)  # raises with the tensor's name when a loader left something unusable
        router = compat.router_of(self._runners, layer.layer_name)
        self._plan = routing.plan(
            layer, router, simulated=compat.simulated_routing(), captured=self._captured
        )
        if self._plan.spec is None:
            self._require_engine_router(layer, router)
        self._exchange = self._plan_exchange(layer)
        self._counts = live_balance.attach(
            layer, exchanged=self._exchange is not None, scored=self._plan.spec is not None
        )
        own, words = self._plan.spec is not None, self._plan.reason
        logger.info_once(
            "%s: MoE layers run on moe_backend; %s selects the experts (%s)",
            METHOD,
            "the fused router" if own else "the engine",
            words,
        )
        self._make_ready(layer)
        self._record(layer, f"{'moe_backend' if own else 'engine'}: {words}")

    def _make_ready(self, layer: Any) -> None:
        """Compiles and proves kernels before the server is ready.

        With an exchange the profile run does: rows arrive in a layout of the exchange's own.
        """
        if compat.platform()[0] != "cuda":
            return
        shape, moe = shape_of(layer), self.moe
        gathered = moe.dp_size * moe.pcp_size if travels(moe) else 1
        if self._counts:
            live_balance.make_ready(layer, self._plan.spec, moe.max_num_tokens * gathered)
        if self._exchange is not None:
            return
        readiness.make_ready(
            readiness.Subject(
                name=layer.layer_name,
                weights=_weights(layer),
                shape=shape,
                spec=self._plan.spec or RouterSpec(shape.top_k),
                activation=self._activation,
                bias=layer.e_score_correction_bias if self._plan.spec else None,
                expert_map=layer.expert_map,
                max_tokens=moe.max_num_tokens * gathered,
            )
        )

    def _require_engine_router(self, layer: Any, router: Any) -> None:
        problem = compat.router_cannot_run(router)
        if problem:
            reason = f"the engine must select the experts ({self._plan.reason}), and {problem}. "
            remedy = "Drop what asks for it or serve this model on a GPU"
            checks.refuse([reason + remedy], f", layer {layer.layer_name}")

    def _plan_exchange(self, layer: Any) -> int | None:
        moe = self.moe
        if not (travels(moe) and moe.use_ep):
            return None
        platform, _ = compat.platform()
        transport = exchange.transport(envs.load().ep, platform, self._replicated)
        if transport == exchange.ENGINE or moe.num_experts % moe.ep_size:
            return None
        config = EPConfig(
            num_experts=moe.num_experts,
            hidden=moe.hidden_dim,
            top_k=moe.experts_per_token,
            max_tokens=moe.max_num_tokens,
            slots=1,  # layers follow each other
        )
        return exchange.register(config, transport, layer.expert_map)

    def _record(self, layer: Any, words: str) -> None:
        parallel = self.moe.moe_parallel_config
        cuda, shape, most = compat.platform()[0] == "cuda", shape_of(layer), self.moe.max_num_tokens
        status.record(
            layer,
            status.LayerStatus(
                layer=layer.layer_name,
                backend="moe_backend",
                reason="kernels on sm_90" if cuda else "torch reference on CPU",
                shape=shape,
                routing=words,
                config=readiness.chosen(shape, most, layer.w13_weight.device) if cuda else {},
                ep={
                    "size": parallel.ep_size,
                    "rank": parallel.ep_rank,
                    "transport": exchange.describe(self._exchange, travels(self.moe)),
                },
            ),
        )

    # The hot path.

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Raw logits to the routed experts' output, a fresh tensor."""
        spec = self._plan.spec
        assert spec is not None  # is_monolithic
        if self._exchange is None and not self._counts:
            return pipeline.moe_layer(
                x.contiguous(),
                router_logits,
                _weights(layer),
                spec,
                bias=layer.e_score_correction_bias,
                activation=self._activation,
                expert_map=layer.expert_map,
            )
        ids, weights, _counts = torch.ops.moe_backend.router_topk(
            router_logits, layer.e_score_correction_bias, *ops.flat(spec)
        )
        if self._counts:
            live_balance.observe(layer, ids, router_logits, spec)
        return self._routed(layer, x, ids, weights)

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The engine's selection (physical ids) to the routed experts' output."""
        if self._counts:
            live_balance.observe(layer, topk_ids)
        return self._routed(layer, x, topk_ids, topk_weights)

    def _routed(
        self, layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        x, experts = x.contiguous(), _weights(layer)
        if self._exchange is not None:
            return exchange.run(x, (ids, weights), experts, self._exchange, self._activation)
        return pipeline.fused_experts(
            x,
            Routing(ids, weights, layer.global_num_experts),
            experts,
            activation=self._activation,
            expert_map=layer.expert_map,
        )


def _weights(layer: Any) -> ExpertWeights:
    return ExpertWeights(
        layer.w13_weight, layer.w13_weight_scale_inv, layer.w2_weight, layer.w2_weight_scale_inv
    )
