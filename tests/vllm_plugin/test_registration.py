# SPDX-License-Identifier: Apache-2.0
"""register() runs in every vLLM process of everybody who has the package installed."""

import base64
import pickle
import subprocess
import sys
import textwrap

import pytest

from moe_backend.vllm_plugin import METHOD, compat

from .engines import environment

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def python(code: str, **variables: str) -> str:
    """Standard output of a fresh interpreter; its error output when it fails."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def test_registration_is_light_and_idempotent():
    """It runs even in `vllm bench serve`: no kernels, no FP8 modules, no CUDA context."""
    out = python("""
        import sys, torch
        from moe_backend.vllm_plugin import register
        register(); register()
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as names
        heavy = [m for m in ("moe_backend.pipeline", "moe_backend.kernels", "pydantic_settings",
                             "vllm.model_executor.layers.quantization.fp8",
                             "vllm.model_executor.layers.fused_moe") if m in sys.modules]
        print(names.count("tma_fp8"), heavy, torch.cuda.is_initialized())
    """)
    assert out == "1 [] False"


def test_import_alone_needs_no_vllm():
    out = python("""
        import sys
        sys.modules["vllm"] = None
        import moe_backend.vllm_plugin
        from moe_backend.vllm_plugin import checks, status
        print("imported")
    """)
    assert out == "imported"


def test_vllm_finds_the_plugin_by_its_entry_point():
    code = """
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as names
        print("tma_fp8" in names)
    """
    assert python(code) == "True"
    assert python(code, VLLM_PLUGINS="") == "False"


def test_workers_unpickle_before_registration():
    """Workers get the configuration before they load plugins; here they never do."""
    from moe_backend.vllm_plugin.entry import TmaFp8Entry

    config = TmaFp8Entry.from_config({**BLOCKS, "modules_to_not_convert": ["lm_head"]})
    blob = base64.b64encode(pickle.dumps(config)).decode()
    out = python(
        f"""
        import base64, pickle
        found = pickle.loads(base64.b64decode({blob!r}))
        print(found.get_name(), found.weight_block_size, found.ignored_layers)
        """,
        VLLM_PLUGINS="",
    )
    assert out == "tma_fp8 [128, 128] ['lm_head']"


def test_failure_inside_register_leaves_an_explanation():
    """An exception would break vLLM for every model; the name must explain itself instead."""
    out = python("""
        import sys
        sys.modules["moe_backend.vllm_plugin.entry"] = None  # any import error
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.model_executor.layers.quantization import get_quantization_config
        found = get_quantization_config("tma_fp8")
        assert found.override_quantization_method({"quant_method": "fp8"}, None) is None
        assert found.override_quantization_method({"quant_method": "fp8"}, "tma_fp8") == "tma_fp8"
        get_quantization_config("fp8")
        for choose in (lambda: found.from_config({}), found):
            try:
                choose()
            except ValueError as error:
                print(error)
    """)
    assert "--quantization tma_fp8 is unavailable" in out
    assert "ModuleNotFoundError" in out and "moe-backend doctor" in out


@pytest.mark.parametrize("version, word", [("0.25.1", "too old"), ("0.9", "too old")])
def test_old_vllm_is_refused_when_chosen(monkeypatch, version, word):
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    with pytest.raises(ValueError, match=f"vLLM {version}.*{word}.*0.26.*start without"):
        compat.check()


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "0.33.1.dev5", "dev"])
def test_unknown_newer_vllm_warns_and_goes_on(monkeypatch, version):
    said = []
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    monkeypatch.setattr(compat, "logger", lambda: Recorder(said))
    compat.check()
    assert bool(said) == (version != "0.33.1.dev5")
    assert all("unknown to the plugin" in text for text in said)


class Recorder:
    def __init__(self, said):
        self.said = said

    def warning(self, text, *values):
        self.said.append(text % values)


def test_missing_name_is_named_when_chosen(monkeypatch):
    """Not an AttributeError at the first token."""
    names = {**compat.NAMES, "vllm.envs": ("VLLM_MOVED_AWAY",), "vllm.gone": ("anything",)}
    monkeypatch.setattr(compat, "NAMES", names)
    with pytest.raises(ValueError, match=r"lacks .*vllm.envs.VLLM_MOVED_AWAY.*vllm.gone"):
        compat.check()


def test_method_name_is_the_entry_point():
    from importlib.metadata import entry_points

    found = entry_points(group="vllm.general_plugins", name=METHOD)
    assert [e.value for e in found] == ["moe_backend.vllm_plugin:register"]
