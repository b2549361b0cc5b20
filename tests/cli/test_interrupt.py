# SPDX-License-Identifier: Apache-2.0
"""Signals end a command with a message and 128 + signal; what is ignored stays ignored."""

import os
import signal

import pytest
import typer

from moe_backend.cli.interrupt import ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_in_order(number, capsys):
    before, left = signal.getsignal(number), []
    signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as caught, ending("all is stopped"):
            try:
                os.kill(os.getpid(), number)
            finally:
                left.append(True)
        assert signal.getsignal(number) is signal.SIG_DFL, "the handler was not given back"
    finally:
        signal.signal(number, before)
    assert caught.value.exit_code == 128 + number and left
    assert "all is stopped" in capsys.readouterr().err


def test_under_nohup_a_closed_terminal_is_not_heard():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending("nothing"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
