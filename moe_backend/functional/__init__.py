# SPDX-License-Identifier: Apache-2.0
"""Differentiable routing, balance loss and permutation, as Transformer Engine names them.

On CUDA our kernels run, elsewhere the torch reference. Every call is without host sync except
where its docstring says so, capturable by CUDA graphs and traceable by torch.compile.
"""

from moe_backend.functional.permute import (
    Fp8Rows,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from moe_backend.functional.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

__all__ = [
    "Fp8Rows",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]
