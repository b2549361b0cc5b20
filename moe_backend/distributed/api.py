# SPDX-License-Identifier: Apache-2.0
"""The face of expert parallelism: an agreed exchange, dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_backend import envs
from moe_backend.distributed import collective
from moe_backend.distributed.agreement import agree
from moe_backend.distributed.backend import open_backend
from moe_backend.distributed.config import DTYPES, EPConfig
from moe_backend.distributed.errors import EPError
from moe_backend.distributed.handle import EPHandle, ExpertRows
from moe_backend.distributed.placement import divide, place_experts
from moe_backend.distributed.watch import Watch
from moe_backend.types import Routing


class ExpertParallel:
    """One rank's end of an agreed exchange. Making, moving experts and every dispatch and combine
    are collective: all ranks do them in the same order; ranks without tokens take part with none.

    Args:
        config: sizes, equal on all ranks.
        group: defaults to the world.
        backend: "gloo", "nccl" or "symm".
        expert_map: ``[num_experts]`` local row of each expert on this rank, −1 elsewhere; by
            default rank r holds the r-th equal share.
        timeout_s: bound on every wait, MOE_BACKEND_EP_TIMEOUT_S by default.
        programs: with symm, the programs that move rows; they use at most as many SMs.

    Raises:
        EPMismatch: on every rank, naming what differs or which rank refuses and why.
        ValueError: this group cannot use the backend.
    """

    def __init__(
        self,
        config: EPConfig,
        group: dist.ProcessGroup | None = None,
        *,
        backend: str = "symm",
        expert_map: torch.Tensor | None = None,
        timeout_s: float | None = None,
        programs: int | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError("group: call torch.distributed.init_process_group first")
        timeout_s = envs.load().ep_timeout_s if timeout_s is None else timeout_s
        self._control = control_transport(backend, group, timeout_s)
        self.config, self.backend_name = config, backend
        self.rank, self.world_size = group.rank(), group.size()
        agree(
            self._control,
            "agreement on an exchange",
            config.agreed(),
            problem=divide(config.num_experts, self.world_size),
            labels={"dtype": DTYPES, "wire": ("native", "fp8")},
        )
        self._control.reserve(config.num_experts + self.world_size)
        self.num_local_experts = config.num_experts // self.world_size
        self.place = place_experts(self._control, config.num_experts, expert_map)
        self._watch: Watch | None = None
        self._engine = None
        if backend == "symm":
            from moe_backend.distributed.symm import DEFAULT_PROGRAMS, SymmExchange

            self._engine = SymmExchange(
                config, self._control, self.place, programs or DEFAULT_PROGRAMS
            )

    @property
    def capacity_rows(self) -> int:
        """Rows, padding included, that this rank can receive in one dispatch."""
        return self.config.rows(self.world_size)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that buffers of this exchange take on this rank."""
        from moe_backend.distributed.footprint import footprint

        return footprint(self.config, self.world_size, self.backend_name)

    def update_expert_map(self, expert_map: torch.Tensor) -> None:
        """After experts have moved between ranks. Collective."""
        place = place_experts(self._control, self.config.num_experts, expert_map)
        self.place.copy_(place)
        if self._engine is not None:
            self._engine.move_experts(place)

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[ExpertRows, EPHandle]:
        """See :func:`dispatch`."""
        problem, x = self._input_problem(x, routing), x.contiguous()
        state: object
        if self._engine is not None:
            rows, state = self._engine.dispatch(x, routing, problem)
        else:
            place = self.place.to(x.device)
            rows, state = collective.dispatch(
                self._control, self.config, place, x, routing, problem
            )
        return rows, EPHandle(self, state, x.shape[0])

    def combine(self, rows: torch.Tensor, handle: EPHandle) -> torch.Tensor:
        """See :func:`combine`."""
        state = handle._take(self)
        if self._engine is not None:
            return self._engine.combine(rows, state)
        return collective.combine(state, rows, self._rows_problem(rows, state.received.num_rows))

    def check(self) -> None:
        """Raises what an earlier call found wrong; with symm, errors seen by the device."""
        (self._engine or self._control).check()

    def watch(self, on_error: Callable[[EPError], None], period_s: float = 1.0) -> None:
        """Has ``on_error`` called, in another thread, once ``check`` finds an error: for servers,
        where replayed graphs run none of this code and health must go bad all the same."""
        self._watch = Watch(self.check, on_error, period_s)

    def destroy(self) -> None:
        """Gives buffers back. Call it on all ranks once their work is done."""
        if self._watch is not None:
            self._watch.stop()
        if self._engine is not None:
            self._engine.destroy()
        self._control.destroy()

    def _input_problem(self, x: torch.Tensor, routing: Routing) -> str:
        config, shape = self.config, tuple(x.shape)
        if x.dim() != 2 or shape[1] != config.hidden:
            return f"x: expected [num_tokens, {config.hidden}], found shape {shape}"
        if x.dtype is not config.dtype:
            return f"x: expected {config.dtype}, found {x.dtype}"
        if shape[0] > config.max_tokens:
            return f"x: expected at most max_tokens={config.max_tokens} tokens, found {shape[0]}"
        ids = tuple(routing.topk_ids.shape)
        if ids != (shape[0], config.top_k) or routing.num_experts != config.num_experts:
            return (
                f"routing: expected ids [{shape[0]}, {config.top_k}] of {config.num_experts} "
                f"experts, found {list(ids)} of {routing.num_experts}"
            )
        if config.wire == "fp8" and torch.is_grad_enabled() and x.requires_grad:
            return "x: requires a gradient, which e4m3 rows cannot carry; use wire='native'"
        return ""

    def _rows_problem(self, rows: torch.Tensor, num_rows: int) -> str:
        want = (num_rows, self.config.hidden)
        if tuple(rows.shape) != want or rows.dtype is not self.config.dtype:
            return (
                f"rows: expected {self.config.dtype} of shape {want}, found {rows.dtype} of shape "
                f"{tuple(rows.shape)}"
            )
        return ""


def control_transport(backend: str, group: dist.ProcessGroup, timeout_s: float):
    """What carries agreements; for symm, whichever host transport the group has."""
    if backend != "symm":
        return open_backend(backend, group, timeout_s=timeout_s)
    try:
        return open_backend("gloo", group, timeout_s=timeout_s)
    except ValueError:
        return open_backend("nccl", group, timeout_s=timeout_s)


def dispatch(x: torch.Tensor, routing: Routing, ep: ExpertParallel) -> tuple[ExpertRows, EPHandle]:
    """Sends every token to the ranks of its experts, once per rank.

    Args:
        x: ``[num_tokens, hidden]``; any number of tokens up to ``max_tokens``, also none.
        routing: global expert ids; −1 and ids out of range are absent.
        ep: the agreed exchange.

    Returns:
        The rows this rank's experts received, ready for the grouped GEMM, and the way back.

    Raises:
        EPMismatch, EPOverflow: on every rank, before a token has moved.
        EPTimeout: naming the rank that did not answer, and the phase.
    """
    return ep.dispatch(x, routing)


def combine(rows: torch.Tensor, handle: EPHandle) -> torch.Tensor:
    """Brings the experts' results back: ``[num_tokens, hidden]``, weighted and summed.

    Args:
        rows: ``[num_rows, hidden]`` in the order of the dispatched rows, in the tokens' dtype.
        handle: of the dispatch; used up.
    """
    return handle._owner.combine(rows, handle)
