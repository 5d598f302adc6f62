"""What a script does with signals, hooks, exits and functions of torch is as without a session, whenever it does it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("handlers_program.py")
Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize(("way", "code"), only_nightly([("signal", -signal.SIGTERM)], [("exit", 3), ("exception", 1)]))
def test_a_script_behaves_as_without_a_session(python: Run, tmp_path: Path, way: str, code: int) -> None:
    plain = python(PROGRAM, way)
    trace = ("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--")
    # The script keeps and puts back the handlers that a session sets for these.
    own_signals = {"HPCPACE_TRACE_TRACE_DIR": str(tmp_path / "local"), "HPCPACE_TRACE_SWITCH_SIGNAL": "USR2"}
    traced = python(*trace, PROGRAM, way, **own_signals)
    (last_line,) = [line for line in traced.stderr.splitlines() if line.startswith("hpcpace: ")]
    assert last_line.startswith("hpcpace: recorded 1 rank, 4 steps")
    assert traced.returncode == plain.returncode == code
    assert _found(traced) == _found(plain)
    assert _rest(traced) == _rest(plain)
    assert traced.stderr.replace(f"{last_line}\n", "") == plain.stderr


def _found(done: CompletedProcess[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(done.stdout.splitlines()[0])
    before = found.pop("handlers before")
    # While a session has them, they are its own.
    assert before in (["0", "note", "0", "note"], ["_tell", "note", "_arrived", "note"])
    return found


def _rest(done: CompletedProcess[str]) -> list[str]:
    return done.stdout.splitlines()[1:]
