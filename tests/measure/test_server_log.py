# SPDX-License-Identifier: Apache-2.0
"""The quoted cause is the first real failure, not one of the echoes after it."""

from moe_backend.measure.server_log import causes, describe_failure, plain, stage_of

WORKER = "(Worker pid=6365) ERROR 11-20 18:46:07 [multiproc_executor.py:944] "
ENGINE = "(EngineCore pid=6340) "
FRONT = "(APIServer pid=6209) "


def test_the_workers_error_comes_before_what_the_front_end_says():
    lines = [
        WORKER + "WorkerProc failed to start.",
        WORKER + "Traceback (most recent call last):",
        WORKER + '  File "x.py", line 1, in load',
        WORKER + "KeyError: 'layers.1.mlp.gate.e_score_correction_bias'",
        ENGINE + "Exception: WorkerProc initialization failed due to an exception.",
        FRONT + "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert causes(lines) == ["KeyError: 'layers.1.mlp.gate.e_score_correction_bias'"]


def test_a_plugin_that_does_not_load_is_not_the_cause():
    lines = [
        "ERROR 11-20 18:49:31 [__init__.py:72] Failed to load plugin other",
        "ERROR 11-20 18:49:31 [__init__.py:72] Traceback (most recent call last):",
        "ERROR 11-20 18:49:31 [__init__.py:72] AttributeError: module has no attribute 'register'",
        FRONT + "ValueError: the real one",
    ]
    assert causes(lines) == ["ValueError: the real one"]


def test_all_lines_of_a_message_are_quoted():
    lines = [
        FRONT + "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        FRONT + "  Value error, tma_fp8: this checkpoint is not block-scaled FP8",
        "",
        "unrelated",
    ]
    assert len(causes(lines)) == 2 and "not block-scaled" in causes(lines)[1]


def test_a_wrong_argument_is_quoted():
    line = "api_server.py: error: unrecognized arguments: --no-such"
    assert causes(["usage: api_server.py [-h]", line]) == [line]


def test_without_a_cause_the_last_lines_are_quoted(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "".join(f"(Worker pid=1) INFO 01-01 00:00:00 [a.py:1] line {i}\n" for i in range(30))
    )
    assert describe_failure(log).splitlines()[-1] == "line 29"
    log.write_text("")
    assert describe_failure(log) == "the log is empty"
    assert "could not be read" in describe_failure(tmp_path / "none")


def test_prefix_and_colours_go():
    assert plain("\x1b[1;36m(Worker_TP0 pid=6)\x1b[0m ERROR 11-20 18:46:07 [a.py:9] oh") == "oh"
    assert plain("nothing to strip") == "nothing to strip"


def test_stages_advance():
    text = "Resolved architecture: X\nStarting to load model\n"
    assert stage_of("") == "starting Python"
    assert stage_of(text) == "loading weights"
    assert stage_of(text + "Starting vLLM server on") == "opening the port"
