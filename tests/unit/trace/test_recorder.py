"""Nothing that fails or hangs behind the recorder reaches the training job, and what it costs is counted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rows import add_one_of_each, header

from hpcpace.core.errors import UsageError
from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import NullRecorder, Recorder
from hpcpace.trace.schema import CHUNK_ROWS, Phase

_MAX_ROWS = 100_000


def _add_phases(recorder: Recorder, num_rows: int) -> None:
    for step in range(num_rows):
        recorder.add_phase(step, 1, step, step + 1, -1)


def _assert_drops_are_counted(recorder: Recorder, path: Path, num_added: int) -> None:
    tables = read_trace(path).tables
    assert len(tables["phases"]) == num_added - recorder.num_dropped
    assert tables["account"]["dropped"].sum() == recorder.num_dropped
    assert tables["account"]["events"].sum() == len(tables["phases"])


def test_rows_beyond_memory_are_dropped_and_counted_while_a_write_hangs(start, path, monkeypatch, warnings):
    write, hangs, goes_on = os.pwrite, threading.Event(), threading.Event()

    def hang(*arguments: object) -> int:
        hangs.set()
        goes_on.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", hang)
    recorder = start(max_rows=_MAX_ROWS)
    assert not recorder.flush(timeout_s=0.0)
    assert hangs.wait(10.0)
    _add_phases(recorder, 3 * _MAX_ROWS)
    # The flush thread has not moved: what was not dropped is in memory, the account's own row included.
    assert 2 * _MAX_ROWS <= recorder.num_dropped <= 2 * _MAX_ROWS + 1
    goes_on.set()
    assert recorder.flush()
    _add_phases(recorder, 10)
    assert recorder.flush()
    _assert_drops_are_counted(recorder, path, 3 * _MAX_ROWS + 10)
    recorder.close()
    assert len(warnings) == 1 and f"{recorder.num_dropped} rows" in warnings[0]


def test_rows_beyond_memory_are_dropped_and_counted_while_writes_fail(start, path):
    path.parent.write_text("a file in the folder's place")
    recorder = start(max_rows=_MAX_ROWS)
    for _ in range(3):
        _add_phases(recorder, _MAX_ROWS // 2)
        recorder.flush()
    # The account's own rows take a few places.
    assert _MAX_ROWS // 2 <= recorder.num_dropped <= _MAX_ROWS // 2 + 10
    path.parent.unlink()
    for _ in range(2):
        recorder.flush()
    _assert_drops_are_counted(recorder, path, 3 * _MAX_ROWS // 2)


def test_closing_gives_up_on_a_disk_that_hangs(start, monkeypatch, warnings):
    goes_on = threading.Event()
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: goes_on.wait() and write(*arguments))
    recorder = start()
    recorder.close(timeout_s=0.01)
    assert len(warnings) == 1 and "hangs" in warnings[0]
    goes_on.set()


def test_open_operations_that_cannot_be_told_cost_no_other_row(start, path, warnings):
    recorder = start()

    def fail() -> list[tuple[int, ...]]:
        raise RuntimeError("changed during iteration")

    recorder.open_collectives = fail
    add_one_of_each(recorder)
    assert recorder.flush() and recorder.flush()
    assert len(read_trace(path).tables["collectives"]) == 1
    assert len(warnings) == 1 and "changed during iteration" in warnings[0]


@pytest.mark.parametrize("row", [(1, 2), (0, 0, 1 << 80, 0, 0, -1, 0, 0, 0, 2), "text"])
def test_open_operations_of_a_wrong_shape_cost_no_other_row(start, path, warnings, row):
    recorder = start()
    recorder.open_collectives = lambda: [row]
    add_one_of_each(recorder)
    assert recorder.flush()
    assert len(read_trace(path).tables["collectives"]) == 1
    assert len(warnings) == 1


@pytest.mark.parametrize("row", [(), (1, 2, 3, 4, 1 << 15), (1, 256, 3, 4, -1), (1.5, 2, 3, 4, -1), ("a", 2, 3, 4, -1)])
def test_a_row_that_does_not_fit_its_columns_is_dropped_and_counted(start, path, warnings, row):
    recorder = start()
    recorder.add_phase(*row)
    recorder.add_phase(*row)
    _add_phases(recorder, 1)
    assert recorder.flush()
    assert recorder.num_dropped == 2
    _assert_drops_are_counted(recorder, path, 3)
    assert len(warnings) == 1 and repr(row) in warnings[0]


def test_a_warning_that_fails_stops_neither_training_nor_recording(path):
    def fail(_: str) -> None:
        raise ValueError("I/O operation on closed file")

    path.parent.write_text("a file in the folder's place")
    with Recorder(path, header(), warn=fail, flush_interval_s=3600.0) as recorder:
        recorder.add_phase()
        _add_phases(recorder, 10)
        assert recorder.flush()
        path.parent.unlink()
    assert len(read_trace(path).tables["phases"]) == 10


def test_rows_of_many_threads_are_all_there(start, path):
    recorder = start(flush_interval_s=0.005)
    num_rows, num_threads = 5000, 4
    threads = [threading.Thread(target=_add_phases, args=(recorder, num_rows)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert np.array_equal(np.bincount(read_trace(path).tables["phases"]["step"]), np.full(num_rows, num_threads))


def test_the_accounts_add_up_to_the_recorders_own_figures(start, path):
    recorder = start()
    for _ in range(3):
        _add_phases(recorder, 1000)
        recorder.flush()
    recorder.close()
    account = read_trace(path).tables["account"]
    assert account["events"].sum() == recorder.num_events == 3000
    assert (account["cost_ns"] >= 0).all() and 0 < account["cost_ns"].sum() <= recorder.cost_ns


def test_a_phase_inside_itself_is_two_rows(start, path):
    now = iter(range(100))
    recorder = start(clock=lambda: next(now))
    recorder.step = 5
    forward = recorder.phase("forward")
    with forward, forward:
        pass
    recorder.close()
    phases = read_trace(path).tables["phases"]
    begins, ends = phases["begin_ns"].tolist(), phases["end_ns"].tolist()
    assert begins[1] < begins[0] < ends[0] < ends[1]
    assert phases["step"].tolist() == [5, 5] and phases["phase"].tolist() == [Phase.FORWARD] * 2


@pytest.mark.parametrize("make", [NullRecorder, None], ids=["off", "on"])
def test_an_unknown_phase_names_the_known_ones(start, make):
    recorder = start() if make is None else make()
    with pytest.raises(UsageError, match=r"'backwards'.*backward"):
        recorder.phase("backwards")


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("end", ["worker", "exit"])
def test_a_forked_child_neither_flushes_nor_damages_the_parents_files(path, end, is_killed):
    program = Path(__file__).with_name("fork_program.py")
    arguments = [str(path), end, *(["killed"] if is_killed else [])]
    # Python 3.12 warns of each fork in a process that has threads.
    python = [sys.executable, "-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run([*python, program, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    trace = read_trace(path)
    assert (trace.problems, trace.closed_cleanly) == ((), not is_killed)
    num_rows = (2 if is_killed else 3) * (CHUNK_ROWS + 10)
    assert np.array_equal(trace.tables["phases"]["step"], np.arange(num_rows))


def test_a_bound_that_would_drop_for_ever_is_refused(path):
    with pytest.raises(UsageError, match=r"max_rows is 5000: use \d+ or more"):
        Recorder(path, header(), warn=print, max_rows=5000)


def test_a_recorder_that_was_never_started_flushes_nothing_and_closes_whole(path, warnings):
    recorder = Recorder(path, header(), warn=warnings.append)
    _add_phases(recorder, 3)
    assert not recorder.flush()
    recorder.close()
    recorder.close()
    assert len(read_trace(path).tables["phases"]) == 3
    assert warnings == []
