"""Rows with marks on a device wait for its times in memory, but not for ever, and no host time is lost for them."""

from __future__ import annotations

import pytest

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import DEVICE_TABLES, Phase

S = 1_000_000_000


class Marks:
    """The device's times of marks, as far as a test has set them; every other one is not passed yet."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def __call__(self, host_ns: int) -> int | None:
        return self.known.get(host_ns)


@pytest.fixture
def marks():
    return Marks()


@pytest.fixture
def recorder(start, marks):
    clock = {"now_ns": 10 * S}
    recorder = start(device_tables=DEVICE_TABLES, clock=lambda: clock["now_ns"])
    recorder.device_ns = marks
    recorder.test_clock = clock
    return recorder


def _phases(path):
    rows = read_trace(path).tables["phases"]
    names = ("step", "begin_ns", "end_ns", "device_begin_ns", "device_end_ns")
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


def test_a_row_is_written_once_its_device_times_are_known(recorder, marks, path):
    recorder.add_phase(3, Phase.FORWARD, 9 * S, 10 * S - 1, -1)
    assert recorder.flush() and _phases(path) == []
    marks.known = {9 * S: 10 * S + 256, 10 * S - 1: 11 * S}
    assert recorder.flush()
    assert _phases(path) == [(3, 9 * S, 10 * S - 1, 10 * S + 256, 11 * S)]


def test_later_rows_wait_for_it_and_other_tables_do_not(recorder, marks, path):
    marks.known = {1: 2_048, 2: 4_096}
    recorder.add_phase(0, Phase.FORWARD, 1, 10 * S, -1)
    recorder.add_phase(0, Phase.BACKWARD, 1, 2, -1)
    recorder.add_step(0, 1, 2, 1, 0)
    assert recorder.flush()
    assert _phases(path) == [] and len(read_trace(path).tables["steps"]) == 1
    marks.known[10 * S] = 10 * S
    assert recorder.flush()
    assert [row[2] for row in _phases(path)] == [10 * S, 2]


def test_a_row_is_written_without_them_after_a_minute(recorder, path):
    recorder.add_phase(0, Phase.FORWARD, 9 * S, 10 * S, -1)
    recorder.test_clock["now_ns"] = 70 * S - 1
    assert recorder.flush() and _phases(path) == []
    recorder.test_clock["now_ns"] = 70 * S
    assert recorder.flush()
    assert _phases(path) == [(0, 9 * S, 10 * S, 0, 0)]


def test_what_is_known_of_such_a_row_is_kept(recorder, marks, path):
    marks.known = {9 * S: 9 * S + 1_024}
    recorder.add_phase(0, Phase.FORWARD, 9 * S, 10 * S, -1)
    recorder.test_clock["now_ns"] = 70 * S
    assert recorder.flush()
    assert _phases(path) == [(0, 9 * S, 10 * S, 9 * S + 1_024, 0)]


def test_closing_writes_all_rows(recorder, path):
    recorder.add_phase(0, Phase.FORWARD, 9 * S, 10 * S, -1)
    recorder.close()
    assert _phases(path) == [(0, 9 * S, 10 * S, 0, 0)]


def test_a_rescue_waits_for_nothing(recorder, path):
    recorder.add_phase(0, Phase.FORWARD, 9 * S, 10 * S, -1)
    recorder.awaits_device = False
    assert recorder.flush()
    assert _phases(path) == [(0, 9 * S, 10 * S, 0, 0)]


def test_marks_of_the_host_alone_are_unknown_on_the_device(recorder, marks, path):
    marks.known = {9 * S: 0, 10 * S: 0}
    recorder.add_phase(0, Phase.GC, 9 * S, 10 * S, -1)
    assert recorder.flush()
    assert _phases(path) == [(0, 9 * S, 10 * S, 0, 0)]


def test_rows_keep_their_marks_when_their_steps_get_other_numbers(recorder, marks, path):
    marks.known = {9 * S: 9 * S + 512, 10 * S: 10 * S + 512}
    recorder.hold_steps_after(0)
    recorder.add_phase(1, Phase.FORWARD, 9 * S, 10 * S, -1)
    assert recorder.flush() and _phases(path) == []
    recorder.settle_steps({1: 0})
    assert recorder.flush()
    assert _phases(path) == [(0, 9 * S, 10 * S, 9 * S + 512, 10 * S + 512)]


def test_an_end_before_its_begin_on_the_device_is_an_end_at_it(recorder, marks, path):
    """Two streams, or two anchors, can put them into the wrong order by some microseconds."""
    marks.known = {9 * S: 9 * S + 2_048, 10 * S: 9 * S + 1_024}
    recorder.add_phase(0, Phase.DATA, 9 * S, 10 * S, -1)
    assert recorder.flush()
    assert _phases(path)[0][3:] == (9 * S + 2_048, 9 * S + 2_048)


def test_regions_make_marks(start, path):
    taken = iter(range(0, 10_000, 1_000))
    recorder = start(device_tables=DEVICE_TABLES, clock=lambda: 10 * S, mark=lambda: next(taken))
    recorder.device_ns = lambda host_ns: host_ns + 10_240
    with recorder.phase("forward"):
        pass
    assert recorder.flush()
    assert _phases(path) == [(-1, 0, 1_000, 10_240, 11_264)]


def test_a_rank_without_a_device_waits_for_nothing(start, path):
    recorder = start()
    recorder.add_phase(0, Phase.FORWARD, 9 * S, 10 * S, -1)
    assert recorder.flush()
    assert list(read_trace(path).tables["phases"]) == ["step", "phase", "begin_ns", "end_ns", "microbatch"]
