# SPDX-License-Identifier: Apache-2.0
"""``moe-backend serve``: vLLM's own server with the plugin and the gateway switched on."""

from __future__ import annotations

import typer

from moe_backend.cli.console import emit_json, fail, progress_console

# Everything that is not ours goes to vLLM as it was written.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    model: str = typer.Argument(..., help="Folder or name of the model."),
    gateway: bool = typer.Option(
        True, "--gateway/--no-gateway", help="Mount /moe/status and /moe/metrics on the server."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command and stop."),
    json_: bool = typer.Option(False, "--json", help="With --dry-run: the command as JSON."),
) -> None:
    """Run the vLLM server with our kernels and the status pages; any vLLM argument may follow."""
    import os

    arguments = full_arguments(model, context.args, gateway)
    from moe_backend.measure.server import server_command, server_environment

    line = server_command(arguments)
    if dry_run or json_:
        emit_json({"command": line}) if json_ else typer.echo(" ".join(line))
        return
    _check()
    progress_console.print(f"[dim]{' '.join(line)}[/]", highlight=False)
    # The server takes this process's place: signals and the exit code are vLLM's own.
    os.execve(line[0], line, server_environment())


def full_arguments(model: str, rest: list[str], gateway: bool) -> list[str]:
    """The arguments for vLLM; what the user wrote wins over what we would add."""
    from moe_backend.measure.server import GATEWAY_ARGS, PLUGIN_ARGS

    if not any(
        word in ("-q", "--quantization") or word.startswith("--quantization=") for word in rest
    ):
        rest = [*PLUGIN_ARGS, *rest]
    if gateway:
        if any(word.split("=")[0] == "--worker-extension-cls" for word in rest):
            fail(
                "--worker-extension-cls is needed by the gateway and vLLM takes only one; "
                "give --no-gateway, or derive your class from "
                "moe_backend.vllm_plugin.status.StatusExtension and pass --middleware yourself"
            )
        rest = [*rest, *GATEWAY_ARGS]
    return ["--model", model, *rest]


def _check() -> None:
    """Stops with a message, before half a minute of imports, when it cannot work."""
    from importlib.util import find_spec

    from moe_backend import envs

    if find_spec("vllm") is None:
        fail(
            "vLLM is not installed. On a GPU machine: pip install 'moe-backend[cuda]'; "
            "on a CPU: run `make venv` in a checkout of this project."
        )
    try:
        envs.load()
    except envs.SettingsError as error:
        fail(str(error))
