"""The live view as text, at the widths of real terminals."""

from __future__ import annotations

import io

import pytest
from cases import each_case
from live_run import LiveRun
from rich.console import Console

from hpcpace.report.terminal import Shown
from hpcpace.watch.state import HangState, JobState
from hpcpace.watch.view import Choice, Sort, after_key, key_names, ordered, page

HANG = HangState(
    kind="a rank never called it",
    ranks=(2,),
    is_sure=True,
    headline="hang: all_reduce 30 of group dp waits for rank 2, which never called it",
    why=("ranks 0-1, 3 wait",),
    advice="look at the stack of rank 2",
    found_s=1.0,
)


def text(state: JobState, choice: Choice | None = None, *, width: int = 80, height: int | None = 24, **options) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, emoji=False, markup=False)
    console.print(Shown(page(state, choice or Choice(), width=width, height=height, **options)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("hang", [None, HANG])
def test_the_view_fits_the_terminal(run: LiveRun, width: int, hang: HangState | None) -> None:
    lines = text(run.look(hang=hang), width=width, has_keys=True).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    assert lines[0].startswith("RUNNING" if hang is None else "HANGS")


def test_a_thousand_ranks_fit_too(run: LiveRun) -> None:
    state = run.look()
    many = state.__class__(**{**state.__dict__, "ranks": state.ranks * 256})
    shown = text(many, has_keys=True)
    assert len(shown.splitlines()) <= 24 and "more" in shown


def test_the_whole_view(run: LiveRun) -> None:
    run.look()
    run.steps(10, own_s={2: 0.09})
    run.flush()
    shown = text(run.look(), width=200)
    assert "steps      40 of 1000 | 100 ms a step, 10/s | +0.0 % against its past 100 ms | 1.28k tokens/s" in shown
    assert "done in 1:36 min" in shown
    assert "ranks      4 of 4 live | 0 rows dropped" in shown
    assert "own work +" in shown and "waits for others" in shown


def test_a_hang_comes_before_the_ranks(run: LiveRun) -> None:
    shown = " ".join(text(run.look(hang=HANG)).split())
    assert shown.index("never called it") < shown.index("look at the stack") < shown.index("excess")


def test_silent_ranks_and_missing_ones_are_told(run: LiveRun) -> None:
    run.attempt.trace_file(3).with_suffix(".h5").unlink()
    run.attempt.trace_file(3).with_suffix(".journal").unlink()
    run.now_s += 60
    run.flush(0, 1)
    shown = text(run.look())
    assert "silent: rank 2" in shown and "no file: rank 3" in shown and "silent for 1:00 min" in shown


def test_a_slow_file_system_is_told(run: LiveRun) -> None:
    assert "no look at the files has ended for 9 s" in text(run.look(), age_s=9.0)
    assert "no look" not in text(run.look(), age_s=1.0)


def test_what_files_say_cannot_steer_the_terminal(tmp_path) -> None:
    run = LiveRun(tmp_path, host="n1\x1b[2J", samples_unit="\x1b]0;x\x07", mesh="\x1b[31m", interfaces=("\x1b[1m",))
    run.begin(name="\x1b[2J")
    run.steps(30)
    run.flush()
    assert "\x1b" not in text(run.look(), width=200)
    assert "\x1b" not in text(run.look(), Choice(opened=True), width=200)
    run.close()


def test_one_rank_alone(run: LiveRun) -> None:
    run.open_call(0)
    run.now_s += 1
    run.flush()
    shown = text(run.look(), Choice(sort=Sort.RANK, opened=True))
    assert "rank 0 on n1: live" in shown and "backward" in shown and "open: all_reduce 30" in shown


def test_keys_sort_mark_open_and_quit() -> None:
    choice: Choice | None = Choice()
    for key in key_names(b"s\x1b[B\x1b[Bj\x1b[Akxyz\r"):
        assert choice is not None
        choice = after_key(choice, key, 4)
    assert choice == Choice(sort=Sort.RANK, cursor=1, opened=True)
    assert choice is not None and after_key(choice, "escape", 4) == Choice(sort=Sort.RANK, cursor=1)
    assert after_key(choice, "q", 4) is None


@each_case(("keys", "cursor"), [(b"\x1b[A", 0), (b"\x1b[6~", 3), (b"jjjjjj", 3), (b"j\x1b[5~", 0)])
def test_the_mark_stays_among_the_ranks(keys: bytes, cursor: int) -> None:
    choice: Choice | None = Choice()
    for key in key_names(keys):
        assert choice is not None
        choice = after_key(choice, key, 4)
    assert choice is not None and choice.cursor == cursor


def test_bytes_that_are_no_key_are_left_out() -> None:
    assert key_names(b"\xff\x00zZ1") == [] and key_names(b"\x1b") == ["escape"]


def test_orders(run: LiveRun) -> None:
    run.look()
    run.steps(10, own_s={2: 0.09, 1: 0.02})
    run.flush()
    state = run.look()
    assert ordered(state, Sort.SLOWEST)[0].rank == 2
    assert ordered(state, Sort.WAIT)[0].rank == 1
    assert [one.rank for one in ordered(state, Sort.RANK)] == [0, 1, 2, 3]
