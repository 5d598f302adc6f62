"""The command `hpcpace` and the scripts of analysis/, run in this process, and a browser for what they write."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.chromium import INSTALL, Browser, find_chromium
from hpcpace.cli import main

Call = Callable[..., tuple[int, str, str]]
FOLDER = Path(__file__).parents[2] / "analysis"


@cache
def _command(name: str) -> Any:
    return runpy.run_path(str(FOLDER / f"{name}.py"))["command"]


@pytest.fixture
def hpcpace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command and return its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcpace", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a script and return its exit code, stdout and stderr."""
    from library.files import run_script

    def call(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            run_script(_command(name))
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a headless Chromium."""
    program = find_chromium()
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(f"no Chromium: {INSTALL}")
        pytest.skip(f"no Chromium: {INSTALL}")
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
