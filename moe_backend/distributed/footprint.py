# SPDX-License-Identifier: Apache-2.0
"""How many bytes an exchange takes at worst."""

from __future__ import annotations

from moe_backend.distributed.config import EPConfig


def wire_row_bytes(config: EPConfig) -> int:
    """Bytes of one payload on the way out."""
    row = config.hidden + 4 * config.groups if config.wire == "fp8" else _native(config)
    return row + 8 * config.top_k


def footprint(config: EPConfig, world_size: int, backend: str) -> int:
    """Worst-case bytes of a rank's buffers for ``config.slots`` dispatches in flight."""
    if backend == "symm":
        from moe_backend.distributed.symm import layout_of

        layout = layout_of(config, world_size)
        return layout.nbytes + config.slots * layout.local_bytes
    out = config.max_tokens * min(world_size, config.top_k)
    landed = world_size * config.max_tokens
    payloads = (out + landed) * (wire_row_bytes(config) + _native(config))
    rows = config.rows(world_size) * (_native(config) + 4 * config.groups)
    return config.slots * (payloads + rows)


def _native(config: EPConfig) -> int:
    return config.hidden * config.dtype.itemsize
