# SPDX-License-Identifier: Apache-2.0
"""`moe-backend tune`: search kernel configurations and write the file that serving reads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import typer

from moe_backend.cli.bench import need_gpu, numbers
from moe_backend.cli.console import console, emit_json, fail, progress_console


def _model_config(model: str) -> dict:
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        config = json.loads(path.read_text())
    except OSError:
        fail(f"--model: {model!r} is neither a folder with a config.json nor such a file")
    except ValueError as error:
        fail(f"--model: {path} is not JSON ({error})")
    return config.get("text_config", config)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return done.stdout.strip()


def command(
    model: str = typer.Option(..., help="Checkpoint folder, its config.json, or a layer's name."),
    tp: int = typer.Option(1, min=1, help="Tensor-parallel size."),
    ep: int = typer.Option(1, min=1, help="Expert-parallel size; experts stay whole."),
    tokens: str = typer.Option(
        "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192,16384", help="Numbers of tokens."
    ),
    load: str = typer.Option("uniform", help="Expert load: uniform, zipf or trace:FILE."),
    output: Path | None = typer.Option(
        None, help="Folder of the file. [default: MOE_BACKEND_CONFIG_DIR, else here]"
    ),
    force: bool = typer.Option(False, help="Measure sizes again that the file holds."),
    as_json: bool = typer.Option(False, "--json", help="Print the choices as JSON."),
) -> None:
    """Search kernel configurations on this GPU; can be interrupted and goes on where it stopped."""
    from moe_backend import envs
    from moe_backend.measure import bench_experts, tuner
    from moe_backend.support import supports_shape
    from moe_backend.tuning import schema

    counts = numbers(tokens, "tokens")
    popularity = None
    try:
        if model in bench_experts.SHAPES:
            shape = bench_experts.SHAPES[model]
        else:
            shape = tuner.shape_of_model(_model_config(model), tp, ep)
        if load.startswith("trace:"):
            trace = Path(load.removeprefix("trace:"))
            popularity = tuner.popularity_of_trace(trace, shape.num_experts)
        elif load not in bench_experts.LOADS:
            fail(f"--load: expected uniform, zipf or trace:FILE, found {load!r}")
    except (ValueError, OSError) as error:
        fail(str(error))
    if not (support := supports_shape(shape)).ok:
        fail(support.reason)
    need_gpu()
    import torch

    folder = output or envs.load().config_dir or Path.cwd()
    path = folder / schema.file_name(torch.cuda.get_device_name())
    rows = []
    try:
        with progress_console.status(f"{shape}") as status:
            for found in tuner.tune(
                shape, counts, load, path, popularity=popularity, force=force,
                commit=_commit(), say=status.update,
            ):  # fmt: skip
                rows.append({"tokens": found.tokens, "us": found.us, "config": str(found.config)})
                progress_console.print(
                    f"{found.tokens} tokens: {found.us:.1f} µs of {found.tried} tried, "
                    f"{len(found.failed)} failed",
                    highlight=False,
                )
    except KeyboardInterrupt:
        fail(f"interrupted; {len(rows)} sizes are saved in {path}, run again to go on", code=130)
    except (schema.ConfigFileError, RuntimeError) as error:
        fail(str(error))
    if as_json:
        emit_json({"file": path, "entries": rows})
    else:
        console.print(f"{len(rows)} entries written to {path}")
