"""Calls in a process with limited memory."""

from __future__ import annotations

import os
import signal

import pytest

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports.input_files import call_bounded

MIB = 1 << 20


def _refuse() -> None:
    raise TraceError("not this one")


def test_a_result_comes_back_from_another_process() -> None:
    assert call_bounded(lambda: (os.getppid(), "x" * MIB), max_bytes=256 * MIB) == (os.getpid(), "x" * MIB)


def test_what_takes_more_memory_than_it_may_is_refused() -> None:
    assert call_bounded(lambda: len(bytearray(64 * MIB)), max_bytes=256 * MIB) == 64 * MIB
    with pytest.raises(MemoryError):
        call_bounded(lambda: len(bytearray(512 * MIB)), max_bytes=256 * MIB)


def test_a_process_that_dies_is_a_lack_of_memory(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemoryError):
        call_bounded(lambda: os.kill(os.getpid(), signal.SIGKILL), max_bytes=MIB)
    assert capfd.readouterr().err == ""


def test_an_error_is_raised_where_the_call_was() -> None:
    with pytest.raises(TraceError, match="not this one"):
        call_bounded(_refuse, max_bytes=64 * MIB)
