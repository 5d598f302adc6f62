"""A script that puts a handler of ours back, after we have removed it, has the default action of the signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_START = """
import os, signal, sys
from hpcpace.observe.ends import TerminationTrap
from hpcpace.observe.switching import OrderSignal

def own(number, frame):
    os.write(1, b"own\\n")

def end(number):
    os.kill(os.getpid(), number)
    os.write(1, b"still here\\n")
"""
_OURS = {
    signal.SIGTERM: "ours = TerminationTrap(lambda: None)\ninstall, remove = ours.install, ours.remove",
    signal.SIGUSR2: "ours = OrderSignal('USR2', lambda: None, warn=print)\ninstall, remove = ours.start, ours.stop",
}


def run(number: signal.Signals, program: str) -> tuple[int, list[str]]:
    text = f"{_START}\n{_OURS[number]}\nnumber = signal.{number.name}\ninstall()\n{program}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("number", _OURS)
def test_a_signal_ends_a_script_that_has_put_our_handler_back(number: signal.Signals) -> None:
    program = "before = signal.signal(number, own)\nremove()\nsignal.signal(number, before)\nend(number)"
    assert run(number, program) == (-number, [])


@pytest.mark.parametrize("number", _OURS)
def test_a_handler_that_calls_ours_ends_nothing(number: signal.Signals) -> None:
    program = (
        "before = signal.getsignal(number)\nsignal.signal(number, lambda *given: (own(*given), before(*given)))\n"
        "remove()\nend(number)"
    )
    assert run(number, program) == (0, ["own", "still here"])


def test_a_termination_while_a_trace_comes_home_ends_the_rank_afterwards() -> None:
    program = (
        "remove()\nfrom hpcpace.observe.ends import termination_held\n"
        "with termination_held():\n    end(number)\nos.write(1, b'after it\\n')"
    )
    assert run(signal.SIGTERM, program) == (-signal.SIGTERM, ["still here"])
