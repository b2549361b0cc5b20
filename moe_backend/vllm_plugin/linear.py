# SPDX-License-Identifier: Apache-2.0
"""Dense layers of a block-FP8 checkpoint on a CPU, where vLLM has no kernel for them.

Weights are dequantised once, after loading. The method is an UnquantizedLinearMethod from then
on, so whatever the engine does with an ordinary weight (MLA absorbs kv_b_proj) works as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import (
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter

from moe_backend import reference


@register_weight_loader_v2_supported_method
class TmaFp8CpuLinearMethod(UnquantizedLinearMethod):
    """Loads FP8 weights with 128x128 scales, computes in the model's dtype.

    ``layer`` is typed Any: the engine keeps plain attributes on modules.
    """

    def __init__(self, quant_config: Any) -> None:
        super().__init__()
        self.block = list(quant_config.weight_block_size)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs.get("weight_loader")
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        layer.weight_block_size = self.block
        validate_fp8_block_shape(
            layer,
            input_size,
            output_size,
            input_size_per_partition,
            output_partition_sizes,
            self.block,
        )
        weight = create_fp8_weight_parameter(
            layer.output_size_per_partition, input_size_per_partition, loader
        )
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter,  # type: ignore[arg-type]  # vLLM means the class
            output_partition_sizes,
            input_size_per_partition,
            self.block,
            loader,
        )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces weight and scale by one dequantised weight.

        A reload gives the layer its FP8 parameters back, runs this again and copies the result
        into the storage made here, so the plain ``F.linear`` in apply sees it, compiled or not;
        the engine's packed CPU weights would be stale.
        """
        scale = getattr(layer, "weight_scale_inv", None)
        if scale is None:
            return
        weight = reference.dequant_blocks(layer.weight.data, scale.data).to(layer.orig_dtype)
        del layer.weight, layer.weight_scale_inv
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)
