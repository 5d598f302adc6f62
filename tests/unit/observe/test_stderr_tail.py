"""The last lines of a failed rank's stderr are read back from a regular file, and from nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hpcpace
from hpcpace.core.environment import process_redaction
from hpcpace.observe import ends
from hpcpace.observe.ends import StderrTail
from hpcpace.trace.reader import read_trace
from hpcpace.trace.tables import error_text, last_word

_TOKEN = "hf_" + "a1" * 12
_KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow\n" * 900 + "-----END RSA PRIVATE KEY-----\nlast"


@pytest.fixture
def stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Let a file to which this process only writes, and that has a line already, be its stderr."""
    path = tmp_path / "stderr.txt"
    path.write_text("of an earlier program\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    monkeypatch.setattr(ends, "_STDERR", descriptor)
    yield descriptor
    os.close(descriptor)


def test_what_was_written_since_the_beginning_is_returned_without_what_must_not_be_kept(stderr: int) -> None:
    wrong = []
    for written, expected in (
        (b"", ""),
        (b"CUDA error: device-side assert triggered\nabort", "CUDA error: device-side assert triggered\nabort"),
        (b"\x1b[31mred\x1b[0m\r\n\n  10%|#\r 100%|##\nhpcpace: rank 3: warning: x\n\n", "red\n 100%|##"),
        (f"token {_TOKEN} refused\n".encode(), "token [redacted] refused"),
        (_KEY.encode(), "last"),
        (b"x" * 5000, ""),
        (b"first\n" + b"y" * 4000 + b"\nz\n", "y" * 1998 + "\nz"),
        (b"\xc3(\n", "\N{REPLACEMENT CHARACTER}("),
    ):
        tail = StderrTail()
        os.write(stderr, written)
        if (found := tail.last_lines(process_redaction())) != expected:
            wrong.append((written[:40], found))
    assert wrong == []


def _pipe() -> int:
    return os.pipe()[1]


@pytest.mark.parametrize("opened", [_pipe, lambda: os.open("/dev/null", os.O_WRONLY), lambda: 987])
def test_what_is_no_file_cannot_be_read_back(monkeypatch: pytest.MonkeyPatch, opened: Callable[[], int]) -> None:
    monkeypatch.setattr(ends, "_STDERR", opened())
    tail = StderrTail()
    assert (tail.name, tail.last_lines(process_redaction())) == ("", "")


def test_a_file_that_was_cut_or_replaced_says_nothing(stderr: int, tmp_path: Path) -> None:
    tail = StderrTail()
    os.ftruncate(stderr, 0)
    os.write(stderr, b"new")
    assert tail.last_lines(process_redaction()) == ""
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.write(other, b"x" * 100)
    os.dup2(other, stderr)
    os.close(other)
    assert tail.last_lines(process_redaction()) == "" and StderrTail().name != tail.name


@pytest.mark.parametrize(("code", "is_on", "expected"), [(3, "true", ("assert",)), (0, "true", ()), (3, "false", ())])
def test_a_rank_that_fails_has_it_in_its_trace(
    stderr: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    is_on: str,
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setenv("HPCPACE_TRACE_ERROR_TEXT", is_on)
    with pytest.raises(SystemExit), hpcpace.session(run_dir=tmp_path / "run") as session:
        session.step()
        os.write(stderr, b"assert\n")
        sys.exit(code)
    trace = read_trace(tmp_path / "run" / "attempt-0" / "trace" / "rank-00000.h5")
    row = last_word(trace)
    assert row is not None and error_text(trace, row).stderr == expected
