# SPDX-License-Identifier: Apache-2.0
"""Registers one command per module; a module is imported when its command is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import moe_backend

COMMANDS = {
    "serve": "run the vLLM server with our kernels and the status pages",
    "doctor": "versions, device, plugin, and which layer would run where",
    "explain": "which tuned configuration a shape takes, and why",
    "tune": "search kernel configurations on this device",
    "bench": "time our kernels beside their peers",
    "parity": "compare our outputs with the default backend's",
    "loadtest": "time to first token under load, beside the default backend",
    "demo": "the whole story on a small model: serve, load, compare, report",
    "make-checkpoint": "write a seeded FP8 checkpoint that vLLM and transformers read",
}


class LazyGroup(TyperGroup):
    """Imports ``moe_backend.cli.<name>`` on use: its ``app`` (sub-commands) or its ``command``.

    typer carries its own click in some versions, hence no click types here.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"moe_backend.cli.{cmd_name.replace('-', '_')}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            app.command(cmd_name, help=module.command.__doc__, context_settings=settings)(
                module.command
            )
        return get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(moe_backend.__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", callback=_version, is_eager=True
    ),
) -> None:
    """Serve Mixture-of-Experts models fast on Hopper."""


def main() -> None:
    app(prog_name="moe-backend")


if __name__ == "__main__":
    main()
