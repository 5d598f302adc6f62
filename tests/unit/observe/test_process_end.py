"""A program that ends finds sys.exit and its own hook as they are without us, and how it ends is known."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from hpcpace.observe.launch.follower import ProcessEnd

ENDS: tuple[tuple[Any, ...], ...] = (
    *((), (None,), (0,), (False,), (3,), (True,), (-1,), ("text",), ("",), ((1, 2),), ([],)),
    *((SystemExit(3),), (ValueError("x"),)),
)
IS_FINE = ((), (None,), (0,), (False,))


class NoTruth:
    """What has no truth value, as arrays."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


@pytest.fixture
def ended() -> list[BaseException | None]:
    return []


@pytest.fixture
def process_end(ended: list[BaseException | None]) -> Iterator[ProcessEnd]:
    end = ProcessEnd(ended.append)
    yield end
    end.forget()


def exit_by(arguments: tuple[Any, ...]) -> tuple[type[BaseException], Any, Any, list[str]]:
    """Return what sys.exit raises: kind, arguments, code, and the functions in its traceback."""
    try:
        sys.exit(*arguments)
    except BaseException as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        error.__traceback__ = None  # the same error is raised again
        return type(error), error.args, getattr(error, "code", None), functions
    raise AssertionError


@pytest.mark.parametrize("arguments", [*ENDS, (NoTruth(),), (1, 2)])
def test_exit_raises_what_it_raises_without_us(process_end: ProcessEnd, arguments: tuple[Any, ...]) -> None:
    plain = exit_by(arguments)
    process_end.watch()
    watched = exit_by(arguments)
    assert (watched[0], watched[2:]) == (plain[0], plain[2:])
    assert watched[1] == plain[1] or plain[0] is TypeError


@pytest.mark.parametrize("arguments", ENDS)
def test_whether_an_exit_is_a_failure_is_known(
    process_end: ProcessEnd, ended: list[BaseException | None], arguments: tuple[Any, ...]
) -> None:
    process_end.watch()
    exit_by(arguments)
    process_end._at_exit()
    assert (ended == [None]) == (arguments in IS_FINE)


def test_a_hook_that_raises_has_the_traceback_that_it_has_without_us(
    process_end: ProcessEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(*_: object) -> None:
        raise LookupError("of the hook")

    monkeypatch.setattr(sys, "excepthook", hook)
    process_end.watch()
    with pytest.raises(LookupError) as raised:
        sys.excepthook(ValueError, ValueError("of the script"), None)
    assert [frame.name for frame in raised.traceback][1:] == ["hook"]


def test_everything_is_as_before_once_it_is_forgotten(process_end: ProcessEnd) -> None:
    import os

    before = (sys.exit, sys.excepthook, os._exit, os.execv, os.execve)
    process_end.watch()
    with suppress(SystemExit):
        sys.exit(3)
    process_end.forget()
    assert (sys.exit, sys.excepthook, os._exit, os.execv, os.execve) == before
