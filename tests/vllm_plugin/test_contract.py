# SPDX-License-Identifier: Apache-2.0
"""The version matrix: one plugin, one contract, every supported vLLM."""

import ast
import re
from pathlib import Path

import pytest
import torch

import moe_backend.vllm_plugin
from moe_backend.vllm_plugin import compat

from .engines import HERE, Unavailable, run_contract

VERSIONS = ("installed", "0.26.0", "0.33.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_contract(version):
    """Guards against a name, a signature or a habit that another vLLM has moved."""
    if version == "installed" and torch.cuda.is_available():
        pytest.skip("the contract builds layers on a CPU, and this vLLM is built for CUDA")
    try:
        found = run_contract(None if version == "installed" else version)
    except Unavailable as error:
        pytest.fail(str(error), pytrace=False)
    if version != "installed":
        assert found["version"] == version, "another vLLM came first on the path"
    broken = {name: text for name, text in found["checks"].items() if text != "ok"}
    report = "\n".join(f"--- {name}\n{text}" for name, text in broken.items())
    assert not broken, f"vLLM {found['version']} moved something:\n{report}"
    text = "".join(file.read_text() for file in HERE.glob("contract_*.py"))
    wanted = set(re.findall(r"@check\ndef (\w+)", text))
    assert set(found["checks"]) == wanted


def engine_imports(file: Path):
    """Every (module, name) that a plugin file imports from vLLM, lazily or not."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module, alias.name


def test_compat_lists_every_name_the_plugin_takes():
    """A name missing from the list would fail at the first token instead of at the start."""
    folder = Path(moe_backend.vllm_plugin.__file__).parent
    taken = {pair for file in folder.glob("*.py") for pair in engine_imports(file)}
    listed = {(module, name) for module, names in compat.NAMES.items() for name in names}
    assert taken <= listed, f"not in compat.NAMES: {sorted(taken - listed)}"


def test_only_compat_knows_versions():
    folder = Path(moe_backend.vllm_plugin.__file__).parent
    for file in folder.glob("*.py"):
        if file.name != "compat.py":
            code = ast.unparse(_without_docstrings(ast.parse(file.read_text())))
            assert not re.search(r"engine_version\(\)|__version__|\b0\.(26|29|33)\b", code) or (
                file.name == "gateway.py"  # reports the version to people, decides nothing
            ), f"{file.name} decides by version"


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            node.body = body[1:] or [ast.Pass()]
    return tree
