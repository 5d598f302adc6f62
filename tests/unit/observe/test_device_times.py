"""Operations and marks on a device, observed on a simulated one whose truth is known."""

from __future__ import annotations

import pytest
import simulated_device
from cases import each_case
from simulated_device import HostCosts, SimulatedGroup, SimulatedRank, SimulatedWork

from hpcpace.observe.device.clock import DeviceClock, DeviceMarks
from hpcpace.observe.device.times import DeviceTimes
from hpcpace.trace.schema import ExitKind, Op

FREE = HostCosts(launch_ns=0, record_ns=0, synchronize_ns=0)
MS = 1_000_000
# Events have a resolution of 500 ns, and the host's time of an anchor is known no better.
ERROR_NS = 1_000


class Observed:
    """A rank with the observing code on its device."""

    def __init__(self, **changes):
        most_events, has_streams = changes.pop("most_events", 1_000), changes.pop("current_stream", False)
        self.rank = SimulatedRank(**{"costs": FREE, **changes})
        self.warnings = []
        self.clock = DeviceClock(
            self.rank.new_event,
            current_device=lambda: None if self.rank.is_capturing else 0,
            current_stream=lambda _: id(self.rank.current_stream) if has_streams else 0,
            clock=self.rank.clock,
            warn=self.warnings.append,
            most_events=most_events,
        )
        self.rows = []
        self.marks = DeviceMarks(self.clock)
        self.times = DeviceTimes(self.clock, lambda *row: self.rows.append(row))
        self.group = SimulatedGroup(1)
        self.num_issued = 0
        self.clock.anchor()
        self.rank.compute(1_000 * MS)
        self.clock.anchor()  # the second one tells how fast the device's clock is
        self.marks.resolve()

    def all_reduce(self, transfer_ns, *, is_blocking=False, is_async=True, address=0):
        begin = self.times.begin()
        enter_ns = self.rank.now_ns
        work = self.group.all_reduce(self.rank, transfer_ns, on_current_stream=not is_async)
        row = (0, 0, self.num_issued, Op.ALL_REDUCE, 4096, -1, enter_ns, 0, 0, ExitKind.COMPLETION)
        self.num_issued += 1
        followed = work if is_async else None
        self.times.follow(row, begin, followed, is_blocking=is_blocking, address=address)
        return work

    def wait(self, work):
        operation = self.times.waits_for(work)
        return work.wait() if operation is None else self.times.blocked(operation, work.wait)

    def pass_time(self, duration_ns=100 * MS):
        self.rank.compute(duration_ns)
        self.marks.resolve()
        self.times.resolve()


def test_an_operation_begins_and_ends_on_the_device():
    one = Observed()
    start_ns = one.rank.now_ns
    one.rank.launch(10 * MS)
    one.all_reduce(3 * MS)
    one.pass_time()
    ((*_, enter_ns, exit_ns, blocked_ns, kind, enqueue_ns),) = one.rows
    assert enter_ns == pytest.approx(start_ns + 10 * MS, abs=ERROR_NS)
    assert exit_ns == pytest.approx(start_ns + 13 * MS, abs=ERROR_NS)
    assert (blocked_ns, kind, enqueue_ns) == (0, ExitKind.COMPLETION, start_ns)


def test_an_operation_that_the_device_has_not_passed_stays_open():
    one = Observed()
    one.rank.launch(10 * MS)
    one.all_reduce(3 * MS)
    one.pass_time(11 * MS)
    assert one.rows == [] and one.times.has_pending
    assert [row[9] for row in one.times.open_rows()] == [ExitKind.NEVER]


@each_case(("work_ns", "blocked_ns"), [(1 * MS, 7 * MS), (8 * MS, 0), (20 * MS, 0)], ids=["early", "just", "late"])
def test_a_stream_is_held_from_its_wait_until_the_end_of_the_operation(work_ns, blocked_ns):
    one = Observed()
    work = one.all_reduce(8 * MS)
    one.rank.launch(work_ns)
    one.wait(work)
    one.pass_time()
    assert one.rows[0][8] == pytest.approx(blocked_ns, abs=ERROR_NS)


def test_a_call_that_blocks_holds_its_stream_from_the_call_on():
    one = Observed()
    one.rank.launch(2 * MS)
    work = one.all_reduce(8 * MS, is_blocking=True)
    one.wait(work)
    one.pass_time()
    assert one.rows[0][8] == pytest.approx(8 * MS, abs=ERROR_NS)


def test_a_call_without_work_ran_on_the_stream_of_its_caller():
    one = Observed()
    one.rank.launch(2 * MS)
    one.all_reduce(8 * MS, is_blocking=True, is_async=False)
    one.pass_time()
    ((*_, enter_ns, exit_ns, blocked_ns, kind, _),) = one.rows
    assert exit_ns - enter_ns == blocked_ns == pytest.approx(8 * MS, abs=ERROR_NS)
    assert kind == ExitKind.COMPLETION


def test_a_wait_can_name_the_tensor():
    one = Observed()
    work = one.all_reduce(8 * MS, address=4711)
    operation = one.times.waits_for_address(4711)
    one.times.blocked(operation, work.wait)
    assert one.times.waits_for_address(4711) is None
    one.pass_time()
    assert one.rows[0][8] == pytest.approx(8 * MS, abs=ERROR_NS)


def test_operations_of_two_streams_are_recorded_as_they_end():
    one = Observed()
    one.all_reduce(50 * MS)
    with one.rank.stream(one.rank.new_stream()):
        one.group = SimulatedGroup(1)
        one.all_reduce(1 * MS)
    one.pass_time(10 * MS)
    assert [row[2] for row in one.rows] == [1]
    one.pass_time()
    assert [row[2] for row in one.rows] == [1, 0]


def test_operations_that_are_issued_as_one_end_with_the_wait_for_all_of_them():
    one = Observed()
    start_ns = one.rank.now_ns
    one.times.start_coalescing()
    for _ in range(3):
        one.times.follow((0, 0, _, Op.SEND, 8, 1, one.rank.now_ns, 0, 0, 0), one.times.begin(), None)
    work = one.group.all_reduce(one.rank, 5 * MS)
    one.times.end_coalescing(work)
    assert len(one.times.open_rows()) == 3
    one.wait(work)
    one.pass_time()
    assert [row[2] for row in one.rows] == [0, 1, 2]
    assert {row[9] for row in one.rows} == {ExitKind.WAIT}
    assert [row[7] for row in one.rows] == pytest.approx([start_ns + 5 * MS] * 3, abs=ERROR_NS)
    assert [row[8] for row in one.rows] == pytest.approx([0, 0, 5 * MS], abs=ERROR_NS)


def test_an_operation_without_a_future_ends_with_the_wait_for_it():
    one = Observed()

    class WithoutFuture(SimulatedWork):
        def get_future(self):
            raise RuntimeError("Work::getFuture not implemented.")

    begin, start_ns = one.times.begin(), one.rank.now_ns
    work = one.group.all_reduce(one.rank, 5 * MS)
    work = WithoutFuture(one.rank, work.part)
    one.times.follow((0, 0, 0, Op.ALL_REDUCE, 8, -1, start_ns, 0, 0, 0), begin, work)
    one.wait(work)
    one.pass_time()
    ((*_, exit_ns, blocked_ns, kind, _),) = one.rows
    assert (exit_ns - start_ns, blocked_ns) == pytest.approx((5 * MS, 5 * MS), abs=ERROR_NS)
    assert kind == ExitKind.WAIT


def test_a_batch_that_nobody_waits_for_is_recorded_as_never_completed():
    one = Observed()
    one.times.start_coalescing()
    one.times.follow((3, 0, 0, Op.SEND, 8, 1, one.rank.now_ns, 0, 0, 0), one.times.begin(), None)
    one.times.end_coalescing(one.group.all_reduce(one.rank, 5 * MS))
    one.times.resolve(12)
    assert one.rows == []
    one.times.resolve(13)
    assert [row[9] for row in one.rows] == [ExitKind.NEVER] and not one.times.has_pending


def test_captured_operations_are_counted_and_the_capture_is_not_broken():
    one = Observed()
    one.rank.launch(MS)
    one.all_reduce(MS)
    one.rank.is_capturing = True
    assert one.times.cannot_follow()
    assert one.marks.now() >= one.rank.now_ns
    one.pass_time()
    assert one.rows == [] and one.times.num_captured == 1
    one.rank.is_capturing = False
    one.pass_time()
    assert len(one.rows) == 1 and one.warnings == []


def test_a_mark_is_passed_when_the_device_has_done_what_came_before_it():
    one = Observed()
    one.rank.launch(30 * MS)
    mark_ns = one.marks.now()
    assert one.marks.device_ns(mark_ns) is None
    one.pass_time()
    assert one.marks.device_ns(mark_ns) - mark_ns == pytest.approx(30 * MS, abs=ERROR_NS)
    assert one.marks.device_ns(mark_ns + 1) == 0


def test_two_marks_at_one_time_of_the_host_are_told_apart():
    one = Observed()
    first_ns = one.marks.now()
    one.rank.launch(5 * MS)
    second_ns = one.marks.now()
    one.pass_time()
    assert second_ns == first_ns + 1
    assert one.marks.device_ns(second_ns) - one.marks.device_ns(first_ns) == pytest.approx(5 * MS, abs=ERROR_NS)


def test_marks_without_an_event_are_unknown_and_counted_and_events_are_used_again():
    one = Observed(most_events=20)
    marks = [one.marks.now() for _ in range(15)]
    assert [one.marks.device_ns(mark) for mark in marks] == [None] * 10 + [0] * 5
    assert (one.marks.num_unknown, one.clock.num_refused) == (5, 5)
    assert one.times.begin() is not None  # operations have events of their own
    for _ in range(100):
        one.pass_time(MS)
        one.marks.now()
    assert one.marks.num_unknown == 5


@each_case("rate_ppm", [-200.0, 0.0, 40.0])
def test_marks_are_mapped_by_the_anchors_on_both_sides(rate_ppm):
    one = Observed(device_clock=simulated_device.DeviceClock(rate_ppm=rate_ppm, drift_ppm_per_s=0.001))
    marks = []
    for _ in range(300):
        one.rank.compute(100 * MS)
        if one.clock.is_due:
            one.clock.anchor(one.marks.resolve)
        marks.append(one.marks.now())
    one.clock.anchor(one.marks.resolve)
    errors_ns = [one.marks.device_ns(mark) - mark for mark in marks]
    # Float32 milliseconds have a grain of 2 us after 30 s.
    assert max(map(abs, errors_ns)) < 5_000


def test_anchors_are_due_more_rarely_up_to_every_30_seconds():
    rank, due_s = SimulatedRank(costs=FREE), []
    clock = DeviceClock(rank.new_event, clock=rank.clock)
    clock.anchor()
    for second in range(100):
        if clock.is_due:
            due_s.append(second)
            clock.anchor()
        rank.compute(1_000 * MS)
    assert due_s == [1, 5, 21, 51, 81]


def test_marks_are_not_read_before_it_shows_how_fast_the_clock_is():
    rank = SimulatedRank(costs=FREE, device_clock=simulated_device.DeviceClock(rate_ppm=100.0))
    clock = DeviceClock(rank.new_event, clock=rank.clock)
    marks = DeviceMarks(clock)
    clock.anchor()
    rank.compute(900 * MS)
    mark_ns = marks.now()
    rank.compute(100 * MS)
    marks.resolve()
    assert marks.device_ns(mark_ns) is None
    clock.anchor(marks.resolve)
    assert marks.device_ns(mark_ns) == pytest.approx(mark_ns, abs=ERROR_NS)


def test_marks_of_a_long_first_step_are_read_without_that():
    rank = SimulatedRank(costs=FREE)
    clock = DeviceClock(rank.new_event, clock=rank.clock)
    marks = DeviceMarks(clock)
    mark_ns = marks.now()
    rank.compute(2_000 * MS)
    marks.resolve()
    assert marks.device_ns(mark_ns) == pytest.approx(mark_ns, abs=ERROR_NS)


def test_the_first_mark_waits_for_the_device_to_have_an_anchor():
    rank = SimulatedRank(costs=FREE)
    marks = DeviceMarks(DeviceClock(rank.new_event, clock=rank.clock))
    rank.launch(30 * MS)
    start_ns = marks.now()
    rank.compute(2_000 * MS)
    marks.resolve()
    assert marks.device_ns(start_ns) == pytest.approx(start_ns + 30 * MS, abs=ERROR_NS)
    assert rank.now_ns >= start_ns + 30 * MS


def test_marks_on_another_device_are_unknown_until_the_next_anchor():
    one = Observed()
    one.marks.now()
    one.clock._current_device = lambda: 1
    mark_ns = one.marks.now()
    assert one.marks.device_ns(mark_ns) == 0 and one.clock.is_due
    one.clock.anchor(one.marks.resolve)
    mark_ns = one.marks.now()
    one.pass_time(2_000 * MS)
    assert one.marks.device_ns(mark_ns) == pytest.approx(mark_ns, abs=ERROR_NS)


def test_a_device_that_cannot_even_be_asked_for_is_told_and_reaches_nobody():
    one = Observed()

    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    one.clock._current_device = broken
    assert one.times.cannot_follow() and one.times.num_refused == 1
    one.pass_time()
    assert one.warnings == [
        "times on the device end here: CUDA error: device-side assert triggered; training continues"
    ]


def test_a_broken_device_is_told_once_and_reaches_nobody():
    one = Observed()
    one.marks.now()
    one.rank.is_capturing = True
    one.clock._current_device = lambda: 0  # so that the simulated device refuses what it is asked
    marks = [one.marks.now() for _ in range(3)]
    one.pass_time()
    assert [one.marks.device_ns(mark) for mark in marks] == [0, 0, 0]
    assert one.warnings == [
        "times on the device end here: a graph is being captured: the capture is broken; training continues"
    ]
    assert one.times.cannot_follow() and one.times.num_refused == 1
