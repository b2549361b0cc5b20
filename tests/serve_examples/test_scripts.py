# SPDX-License-Identifier: Apache-2.0
"""The serving scripts check their variables, explain themselves, and name options that exist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "serve_examples"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.sh") if p.name != "common.sh")


def run(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    return subprocess.run(
        [str(FOLDER / script), *words], env=environment, capture_output=True, text=True
    )


def command_of(script: str, *words: str, **variables: str) -> list[str]:
    done = run(script, *words, **variables)
    assert done.returncode == 0, done.stderr
    return done.stderr.removeprefix("+ ").split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    done = run(script, "--help")
    assert done.returncode == 0 and script in done.stdout and "DRY_RUN" in done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s != "serve_ray.sh"])
def test_the_model_is_asked_for(script):
    done = run(script)
    assert done.returncode == 2 and "MODEL is not set" in done.stderr


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("serve_tp.sh", {"TP": "two"}),
        ("serve_tp.sh", {"TP": "0"}),
        ("serve_ep.sh", {"DP": "1"}),
        ("serve_ep.sh", {"MOE_BACKEND_EP": "magic"}),
        ("ttft_load.sh", {"INPUT": "-5"}),
        ("parity.sh", {"TP": ""}),
    ],
)
def test_wrong_values_are_named(script, variables):
    done = run(script, MODEL="m", **variables)
    (name, value) = next(iter(variables.items()))
    if value:  # an empty variable is the default, as in any shell script
        assert done.returncode == 2 and f"{name}={value}" in done.stderr
    else:
        assert done.returncode == 0


@pytest.mark.parametrize("words", [[], ["tail"]])
def test_ray_needs_a_role(words):
    done = run("serve_ray.sh", *words)
    assert done.returncode == 2 and "head, worker or serve" in done.stderr


def test_ray_worker_needs_the_head():
    assert "HEAD is not set" in run("serve_ray.sh", "worker").stderr
    assert command_of("serve_ray.sh", "worker", HEAD="10.0.0.1")[-2] == "10.0.0.1:6379"


def test_further_arguments_are_passed_on():
    assert command_of("serve_tp.sh", "--x", "1", MODEL="m", TP="4")[-2:] == ["--x", "1"]


def test_without_a_gpu_the_scripts_say_so():
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run("serve_tp.sh", MODEL="m", DRY_RUN="0", PATH=path)
    assert done.returncode == 2 and "needs 8 Hopper GPU" in done.stderr


@pytest.mark.parametrize(
    ("script", "words"), [("serve_tp.sh", []), ("serve_ep.sh", []), ("serve_ray.sh", ["serve"])]
)
def test_vllm_knows_every_argument(script, words, monkeypatch):
    """A renamed option must not wait for the first user with eight GPUs."""
    pytest.importorskip("vllm")
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from moe_backend.cli.serve import full_arguments

    line = command_of(script, *words, MODEL="m")
    assert line[:3] == ["moe-backend", "serve", "m"]
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(full_arguments("m", line[3:], True))
    assert parsed.quantization == "tma_fp8" and parsed.model == "m"


@pytest.mark.parametrize(
    ("script", "command"), [("ttft_load.sh", "loadtest"), ("parity.sh", "parity")]
)
def test_our_commands_know_every_argument(script, command):
    import typer

    from moe_backend.cli.main import app

    line = command_of(script, MODEL="m")
    assert line[:2] == ["moe-backend", command]
    group = typer.main.get_command(app)
    context = group.make_context("moe-backend", line[1:])
    group.get_command(context, command).make_context(command, line[2:], parent=context)


def test_shellcheck():
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    files = [*FOLDER.glob("*.sh"), *(FOLDER.parent / ".ci").iterdir()]
    done = subprocess.run(
        [tool, *map(str, files)], cwd=FOLDER.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_example_gateway_explains_itself():
    script = str(FOLDER / "gateway.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "/moe/ready" in done.stdout
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == 2
