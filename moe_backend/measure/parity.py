# SPDX-License-Identifier: Apache-2.0
"""Does the plugin compute what the default backend computes? Two engine runs and a verdict.

The default engine generates and is scored on its own text while its expert blocks are recorded;
the plugin's engine generates, is scored on the *same* text (so that one early difference does not
change all that follows) and gets the recorded activations replayed into its own layers. On CUDA
the default is the engine's own FP8 backend on the same checkpoint; without CUDA, where vLLM has
none, it is the same weights dequantised to bf16.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_backend import envs
from moe_backend.measure import model_config, parity_judge, tensor_store
from moe_backend.measure.parity_capture import EXTENSION
from moe_backend.measure.parity_runs import OnProgress, ParityError, run_engine

PROMPTS = (
    "the router gives each token to the best expert and the server",
    "who was there before the first request came in and what did they write?",
    "Count: one two three",
    "my old man used to say that a small model is still a model",
    "write an answer for the people who come after us",
    "0 1 1 2 3 5 8 13 21 34",
    "memory is slow, kernels are fast; ",
    "because the day was long and the way was good, we",
)


@dataclass(frozen=True)
class Request:
    """What to compare. ``engine`` holds further arguments of ``vllm.LLM`` for both sides."""

    model: str
    prompts: Sequence[str] = PROMPTS
    num_tokens: int = 32
    num_captured: int = 256  # tokens per layer
    reference: str | None = None  # the default's model, where it is not the same checkpoint
    tp: int = 1
    max_model_len: int = 1024
    eager: bool | None = None  # None: on a CPU, where compiling takes longer than the run
    engine: dict[str, Any] = field(default_factory=dict)
    fault: bool = False
    timeout: float = 1800.0
    bounds: parity_judge.Bounds | None = None  # None: those derived in parity_judge


def run_parity(
    request: Request,
    *,
    output: Path | None = None,
    on_progress: OnProgress = lambda words, share: None,
) -> dict[str, Any]:
    """Runs both engines and returns the report; ``report["passed"]`` is the verdict.

    Args:
        request: what to compare.
        output: folder for parity.json, parity.png and the engines' logs.
        on_progress: called several times a second.

    Raises:
        ModelError: the model cannot be read or is not one that parity understands.
        ParityError: an engine failed or took too long; the message quotes its log.
    """
    started = time.monotonic()
    model = model_config.read_model(request.model)
    _check_model(model)
    envs.load()  # a wrong variable is said here, not in an engine's log
    folder = model_config.find_folder(request.model, weights=True)
    store = tensor_store.TensorStore(folder)
    default_model = _default_model(request, folder, on_progress)
    with _work_folder(output) as work:
        jobs = _jobs(request, str(folder), default_model)
        default = run_engine("default", jobs[0], work, request.timeout, on_progress)
        jobs[1]["source"] = str(work / "default")
        ours = run_engine("plugin", jobs[1], work, request.timeout, on_progress)
        layers = _judge(model, store, default[1], ours[1], on_progress)
        report = _report(request, default, ours, layers) | {
            "default_model": default_model,
            "seconds": time.monotonic() - started,
        }
        if output is not None:
            _write_output(report, output)
    return report


def _check_model(model: model_config.MoEModel) -> None:
    from moe_backend import support

    model.routing()
    if not model.moe_layers:
        raise model_config.ModelError(f"{model.name}: has no expert layers, nothing to compare")
    answer = support.supports_checkpoint(model.quantization)
    if not answer.ok:
        raise model_config.ModelError(f"{model.name}: {answer.reason}")


def _default_model(request: Request, folder: Path, on_progress: OnProgress) -> str:
    import torch

    if request.reference:
        return str(model_config.find_folder(request.reference, weights=True))
    if torch.cuda.is_available():
        return str(folder)

    def told(done: int, total: int) -> None:
        on_progress("dequantising the model for the default engine", done / total)

    return str(tensor_store.dequantised_copy(folder, envs.load().cache_dir, told))


def _jobs(request: Request, model: str, default_model: str) -> tuple[dict[str, Any], dict]:
    import torch

    eager = not torch.cuda.is_available() if request.eager is None else request.eager
    engine = {
        "max_model_len": request.max_model_len,
        "max_num_seqs": 1,
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": False,
        "tensor_parallel_size": request.tp,
        "worker_extension_cls": EXTENSION,
        **request.engine,
    }
    common = {
        "prompts": list(request.prompts),
        "num_tokens": request.num_tokens,
        "num_captured": request.num_captured,
    }
    # The default is always eager: its blocks are recorded by hooks, which a compiled model skips.
    default = {"engine": engine | {"model": default_model, "enforce_eager": True}, **common}
    plugin = engine | {"model": model, "enforce_eager": eager, "quantization": "tma_fp8"}
    return default, {"engine": plugin, "fault": request.fault, **common}


@contextlib.contextmanager
def _work_folder(output: Path | None) -> Iterator[Path]:
    """Where the engines write; kept with its logs when something goes wrong."""
    work = Path(tempfile.mkdtemp(prefix="moe-parity-"))
    try:
        yield work
    except ParityError:
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for side in ("default", "plugin"):
            shutil.copy(work / side / "engine.log", output / f"{side}.log")
    shutil.rmtree(work, ignore_errors=True)


def _parts(activations: dict[str, Any], layer: int) -> dict[str, Any]:
    prefix = f"{layer}."
    return {n.removeprefix(prefix): t for n, t in activations.items() if n.startswith(prefix)}


def _judge(
    model: model_config.MoEModel,
    store: tensor_store.TensorStore,
    default: dict[str, Any],
    ours: dict[str, Any],
    on_progress: OnProgress,
) -> list[parity_judge.LayerParity]:
    spec, has_bias = model.routing()
    numbers = sorted({int(name.split(".")[0]) for name in default})
    layers = []
    for done, number in enumerate(numbers):
        on_progress(f"judging layer {number}", done / len(numbers))
        weights, bias = tensor_store.load_experts(store, number)
        if has_bias != (bias is not None):
            raise ParityError(f"layer {number}: the selection bias is not as configured")
        if model.num_shared_experts and f"{number}.shared" not in default:
            raise ParityError(f"layer {number}: the shared experts could not be recorded apart")
        facts = parity_judge.LayerFacts(number, weights, spec, bias, model.activation)
        layers.append(
            parity_judge.judge_layer(facts, _parts(default, number), _parts(ours, number))
        )
    return layers


def _report(
    request: Request, default: tuple, ours: tuple, layers: list[parity_judge.LayerParity]
) -> dict[str, Any]:
    status = ours[0]["status"]
    elsewhere = sorted({s["layer"] for s in status if s["backend"] != "moe_backend"})
    if elsewhere or not status:
        names = ", ".join(elsewhere) or "every layer"
        raise ParityError(f"nothing to compare: {names} ran on the engine's own backend")
    tokens = parity_judge.compare_tokens(default[0], ours[0])
    checks = parity_judge.verdict(
        layers, tokens, request.bounds or parity_judge.bounds_for(request.tp)
    )
    return {
        "model": request.model,
        "num_prompts": len(request.prompts),
        "num_tokens": request.num_tokens,
        "fault": ours[0].get("fault"),
        "backend": status[0]["reason"],
        "routing": status[0]["routing"],
    } | parity_judge.as_json(layers, tokens, checks)


def _write_output(report: dict[str, Any], output: Path) -> None:
    from moe_backend.measure.parity_plot import write_plot

    output.mkdir(parents=True, exist_ok=True)
    (output / "parity.json").write_text(json.dumps(report, indent=2) + "\n")
    write_plot(report, output / "parity.png")
