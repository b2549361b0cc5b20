# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, from the top floor down, and heavy packages stay optional."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = [  # top first; a module may import its own floor and those below
    {"cli", "serve_examples"},
    {"measure", "vllm_plugin"},
    {"pipeline", "functional", "balance"},
    {"ops", "ops_training", "ops_permute", "execution", "tuning", "distributed", "tuned_configs"},
    {"reference", "reference_training", "support"},
    {"kernels", "types", "envs"},
]
LEVEL = {name: len(FLOORS) - i for i, names in enumerate(FLOORS) for name in names}


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, inside functions too."""
    package = module_name(path).split(".")[: -1 if path.name != "__init__.py" else None]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("kernels", "tuned_configs"):
        parts.insert(0, "moe_backend")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def place(name: str) -> str | None:
    """The part of the house a dotted name belongs to."""
    parts = name.split(".")
    if parts[0] == "serve_examples":
        return "serve_examples"
    return parts[1] if parts[0] == "moe_backend" and len(parts) > 1 else None


def sources():
    for folder in ("moe_backend", "kernels", "tuned_configs", "serve_examples"):
        yield from (ROOT / folder).rglob("*.py")


def test_every_module_has_a_floor():
    places = {place(module_name(path)) for path in sources()} - {None}
    assert places <= set(LEVEL), f"give a floor to {places - set(LEVEL)}"


def test_imports_go_down():
    wrong = []
    for path in sources():
        here = place(module_name(path))
        for name in imports(path):
            there = place(name)
            if here and there in LEVEL and LEVEL[there] > LEVEL[here]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_kernels_import_torch_triton_and_siblings_only():
    allowed = {"torch", "triton", "__future__", *sys.stdlib_module_names}
    wrong = []
    for path in (ROOT / "kernels").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            if top not in allowed and not name.startswith("moe_backend.kernels"):
                wrong.append(f"{path.name} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_without_vllm_and_triton():
    code = """
import sys
for name in ("vllm", "triton"):
    sys.modules[name] = None
import moe_backend
for name in moe_backend.__all__:
    getattr(moe_backend, name)
import moe_backend.vllm_plugin, moe_backend.cli.main, moe_backend.envs
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests")
