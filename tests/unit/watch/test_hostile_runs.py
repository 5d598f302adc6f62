"""A run that is watched may be anybody's, and change while it is: every look ends, and what it shows is printable."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_run import DTYPES, LiveRun
from rich.console import Console

from hpcpace.core.exposition import exposition
from hpcpace.report.terminal import Shown
from hpcpace.watch.export import families
from hpcpace.watch.state import JobState
from hpcpace.watch.view import Choice, page

WHOLE = ("steps", "phases", "collectives", "account", "network", "clock", "pacing")


def shown(state: JobState) -> str:
    """Return all that a look is turned into."""
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(Shown(page(state, Choice(), width=120, height=40)))
    texts = [capture.get(), exposition(families(state)), json.dumps(state.to_json(), ensure_ascii=False)]
    assert all(letter.isprintable() or letter == "\n" for text in texts[:2] for letter in text)
    assert len("".join(texts)) < 100_000
    return capture.get()


@pytest.mark.parametrize("place", [("train", "steps"), ("trace", "flush_interval_s"), ("trace", "trace_dir")])
@pytest.mark.parametrize(
    "value", [1e308, 10**400, 1 << 64, -1, 0, None, [], {}, "9" * 10_000, "\x1b[31m", True, 1e-300, float("inf")]
)
def test_what_run_json_says_is_taken_or_left_out(run: LiveRun, place: tuple[str, str], value: Any) -> None:
    content = json.loads(run.attempt.run_json.read_text())
    content["config"].setdefault(place[0], {})[place[1]] = value
    run.attempt.run_json.write_text(json.dumps(content))
    shown(run.look())
    run.steps(3)
    run.flush()
    shown(run.look())


@pytest.mark.parametrize("table", WHOLE)
@pytest.mark.parametrize("is_least", [True, False])
def test_rows_with_the_extremes_of_their_types_are_shown(run: LiveRun, table: str, is_least: bool) -> None:
    run.look()
    rows = np.zeros(3, DTYPES[table])
    for name in rows.dtype.names or ():
        if rows.dtype[name].kind in "iu":
            limits = np.iinfo(rows.dtype[name])
            rows[name] = limits.min if is_least else limits.max
    for writer in run.writers.values():
        writer.add(table, rows)
        if table == "collectives":
            writer.set_open(rows)
    run.flush()
    shown(run.look())
    run.steps(3)
    run.flush()
    shown(run.look())


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def to_nothing(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("change", [to_fifo, to_link, to_folder, to_huge, to_nothing])
@pytest.mark.parametrize("name", ["run.json", "trace/rank-00001.journal", "trace/rank-00001.h5"])
def test_files_that_become_something_else_are_left_out(run: LiveRun, change: Callable[[Path], None], name: str) -> None:
    run.look()
    path = run.attempt.path / name
    change(path)
    if path.suffix == ".journal" and path.is_file():
        run.touch(1)
    for _ in range(3):
        state = run.look()
        shown(state)
    assert state.num_live >= 3
