"""What a long command says of its progress where stderr is no terminal, and on one."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from hpcpace.cli.options import shown_progress


def test_a_log_has_a_line_every_half_minute(capsys):
    now_s = iter(range(0, 1000, 10))
    with shown_progress(clock_s=lambda: float(next(now_s))) as stage:
        tell = stage("reading traces")
        for done in range(1, 7):
            tell(done, 6)
    assert capsys.readouterr().err.splitlines() == [
        "hpcpace: reading traces: 3 of 6",
        "hpcpace: reading traces: 6 of 6",
    ]


def test_a_short_command_writes_no_line(capsys):
    with shown_progress(clock_s=lambda: 0.0) as stage:
        stage("measuring")(1, 1)
    assert capsys.readouterr().err == ""


def test_a_bar_that_must_not_disturb_is_drawn_when_told_and_by_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    before = threading.active_count()
    with shown_progress(redraws_alone=False) as stage:
        tell = stage("noise")
        tell(1, 4)
        assert threading.active_count() == before
        assert "noise" in screen.getvalue() and "25%" in screen.getvalue()
