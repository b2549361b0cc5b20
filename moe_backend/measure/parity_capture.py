# SPDX-License-Identifier: Apache-2.0
"""What the parity check does inside vLLM's workers: capture the expert blocks, replay into them.

A worker extension, so it works in one process and across tensor-parallel ranks alike. A block is
any module with a ``gate`` and ``experts``. Its output holds the shared experts too, so theirs is
captured beside it and taken off later.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from moe_backend.vllm_plugin.status import StatusExtension

EXTENSION = "moe_backend.measure.parity_capture.ParityExtension"
PARTS = ("x", "logits", "shared", "out")
FAULT_FACTOR = 1.5


def layer_number(name: str) -> int:
    found = re.findall(r"layers\.(\d+)", name)
    return int(found[-1]) if found else -1


def blocks_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Number of the layer → its expert block."""
    found = {}
    for name, module in model.named_modules():
        if getattr(module, "gate", None) is not None and hasattr(module, "experts"):
            found[layer_number(name)] = module
    return found


def gate_of(block: torch.nn.Module) -> torch.nn.Module:
    return block.gate  # type: ignore[return-value]


def shared_of(block: torch.nn.Module) -> torch.nn.Module | None:
    return getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


class Recorder:
    """Hooks on one block; the first ``limit`` tokens that pass are kept."""

    def __init__(self, block: torch.nn.Module, limit: int) -> None:
        self.limit = limit
        self.rows: dict[str, list[torch.Tensor]] = {part: [] for part in PARTS}
        shared = shared_of(block)
        self.handles = [
            block.register_forward_pre_hook(lambda _, args: self._keep("x", args[0])),
            gate_of(block).register_forward_hook(
                lambda _, __, out: self._keep("logits", first(out))
            ),
            block.register_forward_hook(lambda _, __, out: self._keep("out", first(out))),
        ]
        if shared is not None:
            self.handles.append(
                shared.register_forward_hook(lambda _, __, out: self._keep("shared", first(out)))
            )

    def _keep(self, part: str, value: torch.Tensor) -> None:
        room = self.limit - sum(rows.shape[0] for rows in self.rows[part])
        if room > 0:
            self.rows[part].append(value.detach().view(-1, value.shape[-1])[:room].clone())

    def close(self) -> dict[str, torch.Tensor]:
        for handle in self.handles:
            handle.remove()
        return {p: torch.cat(rows).cpu().contiguous() for p, rows in self.rows.items() if rows}


class ParityExtension(StatusExtension):
    """Mixed into vLLM's worker; called through ``LLM.collective_rpc``."""

    model_runner: Any
    vllm_config: Any

    def _parity_blocks(self) -> dict[int, torch.nn.Module]:
        runner = self.model_runner
        return blocks_of(runner.get_model() if hasattr(runner, "get_model") else runner.model)

    def parity_start(self, limit: int) -> int:
        """Captures from now on; returns the number of blocks."""
        blocks = self._parity_blocks()
        self._parity = {n: Recorder(block, limit) for n, block in blocks.items()}
        return len(blocks)

    def parity_save(self, path: str) -> None:
        """Ends the capture; rank 0 writes ``<layer>.<part>``."""
        taken = {n: recorder.close() for n, recorder in self._parity.items()}
        self._parity = {}
        self._parity_write(path, taken)

    def _parity_write(self, path: str, taken: dict[int, dict[str, torch.Tensor]]) -> None:
        """Rank 0 writes. All ranks call: under TP each holds a part of the shared experts' sum."""
        from safetensors.torch import save_file

        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            from vllm.distributed import tensor_model_parallel_all_reduce as reduced

            device = next(self.model_runner.model.parameters()).device
            for _, parts in sorted(taken.items()):
                if "shared" in parts:
                    parts["shared"] = reduced(parts["shared"].to(device).float()).cpu()
        if getattr(self, "rank", 0) == 0:
            flat = {f"{n}.{part}": t for n, parts in taken.items() for part, t in parts.items()}
            save_file(flat, path)

    def parity_replay(self, source: str, target: str) -> None:
        """Sends captured inputs and logits through this engine's own blocks."""
        from safetensors import safe_open

        taken = {}
        with safe_open(source, "pt") as captured:
            for number, block in self._parity_blocks().items():
                x, logits = (captured.get_tensor(f"{number}.{part}") for part in ("x", "logits"))
                taken[number] = self._parity_run(block, x, logits)
        self._parity_write(target, taken)

    @torch.inference_mode()
    def _parity_run(
        self, block: torch.nn.Module, x: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import get_forward_context, set_forward_context

        device = next(block.parameters()).device
        x, logits = x.to(device), logits.to(device)

        def same_logits(_: Any, __: Any, out: Any) -> Any:
            return (logits, *out[1:]) if isinstance(out, tuple) else logits

        handle = gate_of(block).register_forward_hook(same_logits)
        recorder = Recorder(block, x.shape[0])
        config = self.vllm_config
        try:
            with (
                set_current_vllm_config(config),
                set_forward_context(None, config, num_tokens=x.shape[0]),
            ):
                # Older engines look a layer up by counting calls; here blocks run one by one.
                get_forward_context().all_moe_layers = None
                block(x)
        finally:
            handle.remove()
            parts = recorder.close()
        return parts

    def parity_fault(self) -> str:
        """Multiplies one block scale of one expert of the last block: parity must notice."""
        number, block = max(self._parity_blocks().items())
        for name, parameter in block.named_parameters():
            if name.endswith("w2_weight_scale_inv"):
                expert = parameter.shape[0] // 2
                parameter.data[expert, 0, 0] *= FAULT_FACTOR
                return f"layer {number}, {name}[{expert}, 0, 0] × {FAULT_FACTOR}"
        raise ValueError("no w2_weight_scale_inv in the last block: is the plugin active?")
