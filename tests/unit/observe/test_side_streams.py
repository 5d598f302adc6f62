"""Operations on streams of a framework hold the stream that computes only where that waits for them."""

from __future__ import annotations

import pytest
from cases import each_case
from test_device_times import ERROR_NS, MS, Observed

from hpcpace.observe.device.times import SideStreams
from hpcpace.trace.schema import ExitKind


class Framework(Observed):
    """A rank whose framework gathers on a stream of its own, as FSDP2 does."""

    def __init__(self):
        super().__init__(current_stream=True)
        self.side = self.rank.new_stream()
        self.streams = SideStreams(self.times, id)
        self.marks.now()

    def gather(self, transfer_ns, *, is_async=False):
        """Issue a blocking operation on the framework's stream, and return an event behind it."""
        with self.rank.stream(self.side):
            work = self.all_reduce(transfer_ns, is_blocking=True, is_async=is_async)
            if is_async:
                self.wait(work)
            return self.record(self.side)

    def record(self, stream):
        event = self.rank.new_event()
        event.record(stream)
        self.streams.recorded(stream, event)
        return event

    def wait_event(self, stream, event):
        self.streams.wait(stream, event, type(stream).wait_event)


@each_case("is_async", [False, True], ids=["on the current stream", "with a work"])
@each_case(("work_ns", "blocked_ns"), [(3 * MS, 5 * MS), (20 * MS, 0)], ids=["exposed", "hidden"])
def test_the_wait_of_the_computing_stream_counts(work_ns, blocked_ns, is_async):
    one = Framework()
    event = one.gather(8 * MS, is_async=is_async)
    one.rank.launch(work_ns)
    one.wait_event(one.rank.default_stream, event)
    one.pass_time()
    ((*_, enter_ns, exit_ns, found_ns, kind, _),) = one.rows
    assert exit_ns - enter_ns == pytest.approx(8 * MS, abs=ERROR_NS)
    assert found_ns == pytest.approx(blocked_ns, abs=ERROR_NS)
    assert kind == ExitKind.COMPLETION


def test_an_operation_that_nobody_waits_for_blocks_nobody():
    one = Framework()
    one.gather(8 * MS)
    one.rank.launch(3 * MS)
    one.pass_time()
    assert one.rows[0][8] == 0


def test_a_wait_through_a_third_stream_is_found():
    one = Framework()
    third = one.rank.new_stream()
    one.wait_event(third, one.gather(8 * MS))
    one.wait_event(one.rank.default_stream, one.record(third))
    one.pass_time()
    assert one.rows[0][8] == pytest.approx(8 * MS, abs=ERROR_NS)


def test_one_wait_for_several_operations_counts_once():
    one = Framework()
    one.gather(8 * MS)
    event = one.gather(2 * MS)
    one.wait_event(one.rank.default_stream, event)
    one.wait_event(one.rank.default_stream, one.record(one.side))
    one.pass_time()
    assert [row[8] for row in one.rows] == pytest.approx([0, 10 * MS], abs=ERROR_NS)


def test_a_wait_after_the_end_makes_no_marks():
    one = Framework()
    event = one.gather(8 * MS)
    one.pass_time()
    assert len(one.rows) == 1
    num_free = len(one.clock._free)
    one.wait_event(one.rank.default_stream, event)
    assert len(one.clock._free) == num_free


def test_a_program_that_computes_on_a_side_stream_is_held_there():
    one = Framework()
    with one.rank.stream(one.side):
        one.marks.now()
        one.rank.launch(2 * MS)
        one.all_reduce(8 * MS, is_blocking=True, is_async=False)
    one.pass_time()
    assert one.rows[0][8] == pytest.approx(8 * MS, abs=ERROR_NS)
