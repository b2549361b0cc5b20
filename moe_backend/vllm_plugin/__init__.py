# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: ``--quantization tma_fp8``.

vLLM calls :func:`register` in the front end, the engine core, every worker and even in
``vllm bench serve``, so this module imports nothing and registration imports no kernel.
"""

from __future__ import annotations

METHOD = "tma_fp8"
LOGGER = "vllm.plugins.tma_fp8"  # vLLM attaches handlers below "vllm." only

_registered = False


def register() -> None:
    """Makes ``tma_fp8`` known to vLLM. Idempotent, free of CUDA, never raises.

    When something is wrong here the name is registered all the same, with a configuration that
    says what happened to the user who chooses it; users of other models are left in peace.
    """
    global _registered
    if _registered:
        return
    try:
        from moe_backend.vllm_plugin.entry import register_entry

        register_entry()
    except Exception as error:  # an exception here would break vLLM for every model
        _register_explanation(error)
    _registered = True


def _register_explanation(error: Exception) -> None:
    import logging

    logger = logging.getLogger(LOGGER)
    logger.warning("tma_fp8 is unavailable: %s: %s", type(error).__name__, error)
    try:
        from moe_backend.vllm_plugin.unavailable import register_unavailable

        register_unavailable(error)
    except Exception as second:
        logger.warning("and its name could not be registered: %s", second)
