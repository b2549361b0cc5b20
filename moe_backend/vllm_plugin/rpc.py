# SPDX-License-Identifier: Apache-2.0
"""How the gateway asks the engine's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI

from moe_backend.vllm_plugin import compat

ENGINE_TIMEOUT_S = 10.0
EXTENSION = "moe_backend.vllm_plugin.status.StatusExtension"


class StatusUnavailable(RuntimeError):
    """The engine gave no answer; the message says why and what to do."""


def engine_of(app: FastAPI) -> Any:
    engine = getattr(app.state, "engine_client", None)
    if engine is None:
        raise StatusUnavailable("this server has no engine (render-only front end)")
    return engine


async def ask(app: FastAPI, method: str) -> list[Any]:
    """What every worker answers to ``method``; never waits longer than ENGINE_TIMEOUT_S."""
    return await _bounded(compat.ask_every_rank(engine_of(app), method), method)


async def sleeping(app: FastAPI) -> bool:
    """Whether the engine gave its memory away or is paused."""
    question = getattr(engine_of(app), "is_sleeping", None)
    return question is not None and bool(await _bounded(question(), "is_sleeping"))


async def _bounded(answer: Awaitable[Any], method: str) -> Any:
    try:
        return await asyncio.wait_for(answer, timeout=ENGINE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise StatusUnavailable(
            f"no answer from the engine in {ENGINE_TIMEOUT_S:.0f} s; it may be busy or stuck"
        ) from None
    except Exception as error:  # whatever the engine raises becomes the reason
        text = f"{type(error).__name__}: {error}".strip()
        raise StatusUnavailable(
            f"the workers do not know {method}; start with --worker-extension-cls {EXTENSION}"
            if method in text
            else text
        ) from error
