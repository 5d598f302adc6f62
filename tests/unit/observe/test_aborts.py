"""What a rank has in memory is saved before its process aborts, and the abort stays one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from cases import each_case

from hpcpace.observe import ends

PROGRAM = """
import ctypes, faulthandler, os, sys, threading
from pathlib import Path
from hpcpace.observe import ends
from hpcpace.observe.ends import AbortTrap

ends._ABORT_TIMEOUT_MS = 60_000  # a loaded machine
abort, saved = ctypes.CDLL(None).abort, Path(sys.argv[1])  # a call through CDLL is made without the GIL
trap = AbortTrap(lambda: saved.write_text("saved"))
{before}
assert trap.install()
{after}
"""
IN_OTHER_THREAD = "threading.Thread(target=abort).start(); threading.Event().wait()"


def run(tmp_path: Path, *, before: str = "", after: str) -> tuple[int, str, bool]:
    """Return exit code, stderr, and whether the rescue ran."""
    saved = tmp_path / "saved"
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program, saved], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, saved.exists()


def test_the_handler_is_built() -> None:
    assert ends._abort_library() is not None, "it is not built: python setup.py build_ext --inplace"


@each_case(
    ("after", "is_saved"),
    [
        (IN_OTHER_THREAD, True),  # as gloo and NCCL abort
        ("abort()", True),
        (f"threading.Thread(target=abort).start(); {IN_OTHER_THREAD}", True),  # two at once
        ("os.kill(os.getpid(), 6); threading.Event().wait()", False),  # the main thread may have the GIL then
        ("os.abort()", False),  # whoever aborts has the GIL, which the rescue needs
        (f"trap.remove(); {IN_OTHER_THREAD}", False),
    ],
)
def test_memory_is_saved_before_an_abort(tmp_path: Path, after: str, is_saved: bool) -> None:
    code, _, was_saved = run(tmp_path, after=after)
    assert code == -signal.SIGABRT
    assert was_saved or not is_saved
    assert not was_saved or "remove" not in after


def test_a_rescue_that_fails_does_not_hold_up_the_abort(tmp_path: Path) -> None:
    code, _, was_saved = run(tmp_path, before="trap = AbortTrap(lambda: 1 / 0)", after=IN_OTHER_THREAD)
    assert (code, was_saved) == (-signal.SIGABRT, False)


@each_case("place", ["before", "after"])
def test_a_handler_of_the_job_gets_the_signal_as_well(tmp_path: Path, place: str) -> None:
    enable = "faulthandler.enable()"
    before, after = (enable, "") if place == "before" else ("", f"{enable}; ")
    code, stderr, was_saved = run(tmp_path, before=before, after=after + IN_OTHER_THREAD)
    assert code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in stderr
    assert was_saved


def test_a_fork_that_aborts_saves_nothing(tmp_path: Path) -> None:
    code, _, was_saved = run(tmp_path, after="os.fork() or abort(); print(os.wait()[1], file=sys.stderr); os._exit(0)")
    assert (code, was_saved) == (0, False)
