"""How the program of a rank ends is in its trace: an exception and what it says, an exit code, or a signal."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

import hpcpace
from hpcpace.observe.ends import end_by, end_by_signal, error_text
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ErrorCode, ErrorPart, EventKind
from hpcpace.trace.tables import ErrorText, last_word
from hpcpace.trace.tables import error_text as read_error_text


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


_TOKEN = "hf_" + "a1" * 12


def _text_of(run_dir: Path) -> ErrorText:
    trace = read_trace(run_dir / "attempt-0" / "trace" / "rank-00000.h5")
    row = last_word(trace)
    assert row is not None
    return read_error_text(trace, row)


def _fail(run_dir: Path, error: BaseException, **settings: Any) -> ErrorText:
    with pytest.raises(type(error)), hpcpace.session(run_dir=run_dir, **settings):
        _raise(error)
    return _text_of(run_dir)


def _caused() -> BaseException:
    error = RuntimeError("no batch")
    error.__cause__ = KeyError("shard 3")
    return error


def _raised(error: BaseException) -> dict[int, str]:
    """Return what is recorded of an error that was raised, by part."""
    with pytest.raises(type(error)):
        _raise(error)
    found: dict[int, bytes] = {}
    for kind, part, piece in error_text(error):
        assert kind == EventKind.ERROR_TEXT and len(piece) <= 240
        found[part] = found.get(part, b"") + piece
    return {part: text.decode(errors="replace") for part, text in found.items()}


def test_what_an_error_says_has_no_secrets_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery-7")
    cases: list[tuple[BaseException, str]] = [
        (ValueError("bad batch 7 in shard 3\nsecond line"), "bad batch 7 in shard 3\nsecond line"),
        (ValueError(f"401 for {_TOKEN}, correct-horse-battery-7"), "401 for [redacted], [redacted]"),
        (ValueError("caf\u00e9 \U0001f3d6 \ud800 \0 end" * 30), "caf\u00e9 \U0001f3d6 ? \\0 end" * 30),
        (ValueError(f"{'x' * 5000} {_TOKEN} {'y' * 5000}"), f"{'x' * 500} [...] {'y' * 1500}"),
        (ValueError(f"{'x' * 490} {_TOKEN} {'y' * 5000}"), f"{'x' * 490} [redacted [...] {'y' * 1500}"),
        (_caused(), "no batch\ncaused by KeyError: 'shard 3'"),
        (DataError(), ""),
        (SystemExit("cannot read the data"), "cannot read the data"),
        (SystemExit(3), ""),
        (KeyboardInterrupt(), ""),
    ]
    wrong = []
    for error, expected in cases:
        parts = _raised(error)
        functions = [frame.rpartition(" in ")[2] for frame in parts.get(ErrorPart.FRAMES, "").splitlines()]
        places = [] if isinstance(error, SystemExit) else ["_raised", "_raise"]
        if parts.get(ErrorPart.MESSAGE, "") != expected or functions != places:
            wrong.append((parts, expected))
    assert wrong == []


def _bytes_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_trace_of_a_failed_session_has_it(tmp_path: Path) -> None:
    text = _fail(tmp_path / "run", ValueError(f"401 for {_TOKEN}"))
    assert (text.message, text.frames[-1].rpartition(" in ")[2]) == ("401 for [redacted]", "_raise")
    assert _TOKEN.encode() not in _bytes_below(tmp_path)


def test_the_place_of_an_error_is_in_the_jobs_own_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expecting"), hpcpace.session(run_dir=tmp_path):
        json.loads("{", parse_int=int)
    text = _text_of(tmp_path)
    assert text.place.startswith(f"{__file__}:") and text.frames[-1].startswith(json.decoder.__file__)
    assert re.fullmatch(r" at test_ends_recorded\.py:\d+: Expecting property name .*", text.sentence)


def test_a_site_can_leave_the_text_of_errors_out(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[trace]\nerror_text = false\n")
    text = _fail(tmp_path / "run", ValueError("patient 17"), config_file=settings)
    assert text == ErrorText() and b"patient 17" not in _bytes_below(tmp_path / "run")


def test_a_deep_recursion_has_its_last_calls() -> None:
    def fall(depth: int) -> int:
        return fall(depth + 1)

    with pytest.raises(RecursionError) as found:
        fall(0)
    frames = b"".join(piece for _, part, piece in error_text(found.value) if part == ErrorPart.FRAMES)
    assert frames.count(b" in fall") == 12
