"""What SIGTERM does to a process with a termination trap, each time in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from cases import each_case

START = """
import faulthandler, multiprocessing, os, signal, sys, threading
from hpcpace.observe.ends import TerminationTrap
rescued = threading.Event()
def rescue():
    os.write(1, b"rescued\\n")
    rescued.set()
def term(): os.kill(os.getpid(), signal.SIGTERM)
def own(number, frame): os.write(1, b"own\\n")
trap = TerminationTrap(rescue)
"""


def run(program: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


@each_case(
    "blocked",
    [
        "signal.pause()",
        # Blocked in C, where no Python handler ever runs.
        "import ctypes; ctypes.CDLL(None).pause(); ctypes.CDLL(None).pause()",
        # An event loop of the job's has taken the descriptor.
        "signal.set_wakeup_fd(-1); threading.Event().wait()",
        # Slurm sends it twice at the time limit.
        "threading.Timer(0, term).start(); threading.Event().wait()",
    ],
    ids=["in Python", "in C", "without the descriptor", "twice"],
)
def test_rescues_and_ends_by_the_signal(blocked: str) -> None:
    assert run(f"trap.install()\nthreading.Timer(0, term).start()\n{blocked}") == (-signal.SIGTERM, ["rescued"])


def test_ends_by_the_signal_also_where_the_rescue_fails() -> None:
    program = "trap = TerminationTrap(lambda: 1 / 0)\ntrap.install()\nterm()\nthreading.Event().wait()"
    assert run(program) == (-signal.SIGTERM, [])


@pytest.mark.parametrize(
    "handle",
    ["signal.signal(signal.SIGTERM, own)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"],
    ids=["handled", "ignored"],
)
def test_leaves_a_handler_alone_that_was_there_before(handle: str) -> None:
    status, output = run(f"{handle}\nassert not trap.install()\nterm()")
    assert (status, output) == (0, ["own"] if "own" in handle else [])


def test_leaves_a_handler_in_c_alone() -> None:
    assert run("faulthandler.register(signal.SIGTERM, file=sys.stdout)\nassert not trap.install()") == (0, [])


def test_a_handler_set_later_decides_and_may_call_ours() -> None:
    program = """
trap.install()
ours = signal.getsignal(signal.SIGTERM)
def chained(number, frame):
    own(number, frame)
    ours(number, frame)
signal.signal(signal.SIGTERM, chained)
term()
rescued.wait()
trap.remove()
assert signal.getsignal(signal.SIGTERM) is chained
term()
"""
    status, output = run(program)
    assert status == 0
    assert output.count("own") == 2 and "rescued" in output


def test_removed_it_leaves_the_default_action() -> None:
    program = "trap.install()\ntrap.remove()\nassert signal.set_wakeup_fd(-1) == -1\nterm()"
    assert run(program) == (-signal.SIGTERM, [])


def test_a_forked_child_ends_as_if_there_were_no_trap() -> None:
    program = """
trap.install()
child = multiprocessing.get_context("fork").Process(target=signal.pause)
child.start()
child.terminate()
child.join()
print(child.exitcode)
trap.remove()
"""
    assert run(program) == (0, ["-15"])


def test_is_not_set_outside_the_main_thread() -> None:
    program = "t = threading.Thread(target=lambda: print(trap.install()))\nt.start()\nt.join()"
    assert run(program) == (0, ["False"])
