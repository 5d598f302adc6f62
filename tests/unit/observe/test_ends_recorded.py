"""How the program of a rank ends is in its trace: an exception by its type alone, an exit code, or a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

import hpcpace
from hpcpace.observe.ends import end_by, end_by_signal
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ErrorCode, EventKind


class DataError(Exception):
    """An error of a job."""

    def __str__(self) -> str:
        raise ValueError


@each_case(
    ("error", "expected"),
    [
        (KeyError("secret"), (EventKind.EXCEPTION, ErrorCode.OTHER, b"KeyError")),
        (DataError(), (EventKind.EXCEPTION, ErrorCode.OTHER, b"DataError")),
        (TimeoutError(), (EventKind.EXCEPTION, ErrorCode.TIMEOUT, b"TimeoutError")),
        (RuntimeError("Timed out waiting 2000ms for recv"), (EventKind.EXCEPTION, ErrorCode.TIMEOUT, b"RuntimeError")),
        (
            RuntimeError("Connection closed by peer [::1]:1"),
            (EventKind.EXCEPTION, ErrorCode.DISCONNECTED, b"RuntimeError"),
        ),
        (SystemExit(), (EventKind.EXIT, 0, b"")),
        (SystemExit(3), (EventKind.EXIT, 3, b"")),
        (SystemExit(-1), (EventKind.EXIT, 255, b"")),
        (SystemExit("gone"), (EventKind.EXIT, 1, b"")),
        (GeneratorExit(), None),
    ],
)
def test_an_exception_is_recorded_by_its_type_and_an_exit_by_its_code(error: BaseException, expected: Any) -> None:
    assert end_by(error) == expected


def test_a_long_name_is_cut_to_its_column() -> None:
    end = end_by(type("E" * 500, (Exception,), {})())
    assert end is not None
    assert end[2] == b"E" * 240


def test_a_signal_is_recorded_by_its_number() -> None:
    assert end_by_signal(signal.SIGTERM) == (EventKind.SIGNAL, 15, b"")


def _events(run_dir: Path) -> list[tuple[int, int, int, bytes]]:
    events = read_trace(run_dir / "attempt-0" / "trace" / "rank-00000.h5").tables["events"]
    rows = zip(*(events[name].tolist() for name in ("step", "kind", "code", "text")), strict=True)
    return [row for row in rows if row[1] in (EventKind.EXCEPTION, EventKind.EXIT, EventKind.SIGNAL)]


def _raise(error: BaseException) -> None:
    raise error


def _leave_in_order() -> None:
    try:
        raise KeyError
    except KeyError:  # which is over when the session ends
        pass


@each_case(
    ("end", "expected"),
    [
        (lambda: _raise(KeyError("secret")), [(1, EventKind.EXCEPTION, 0, b"KeyError")]),
        (lambda: sys.exit(3), [(1, EventKind.EXIT, 3, b"")]),
        (_leave_in_order, []),
    ],
)
def test_the_end_of_a_session_is_in_its_trace(tmp_path: Path, end: Callable[[], None], expected: Any) -> None:
    try:
        with hpcpace.session(run_dir=tmp_path / "run") as session:
            session.step()
            end()
    except (KeyError, SystemExit):
        pass
    assert _events(tmp_path / "run") == expected


def test_a_session_that_is_left_while_an_error_passes_has_its_end(tmp_path: Path) -> None:
    session = hpcpace.session(run_dir=tmp_path / "run")
    session.__enter__()
    with pytest.raises(KeyError):
        try:
            raise KeyError("secret")
        finally:
            session.__exit__(None, None, None)
    assert _events(tmp_path / "run") == [(0, EventKind.EXCEPTION, 0, b"KeyError")]


def test_an_error_from_before_a_session_is_not_its_end(tmp_path: Path) -> None:
    try:
        raise KeyError
    except KeyError:
        with hpcpace.session(run_dir=tmp_path / "run"):
            pass
    assert _events(tmp_path / "run") == []
