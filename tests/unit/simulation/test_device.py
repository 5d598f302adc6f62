"""The simulated device: what it does follows from what it was given, in plain arithmetic."""

from __future__ import annotations

import pytest
from cases import each_case
from simulated_device import DeviceClock, HostCosts, SimulatedGroup, SimulatedRank, run

from hpcpace.core.errors import UsageError

FREE = HostCosts(launch_ns=0, record_ns=0, synchronize_ns=0)
START_NS = 1_000_000_000


def rank(**changes):
    return SimulatedRank(costs=FREE, **changes)


def spans(simulated):
    return [(work.begin_ns - START_NS, work.end_ns - START_NS) for work in simulated.done]


def test_the_host_runs_ahead_and_kernels_follow_each_other():
    one = rank()
    one.launch(3_000)
    one.launch(2_000)
    assert one.now_ns == START_NS
    assert spans(one) == [(0, 3_000), (3_000, 5_000)]


def test_a_stream_is_idle_until_the_host_issues_more():
    one = rank()
    one.launch(1_000)
    one.compute(10_000)
    one.new_event().record()
    one.compute(5_000)
    kernel = one.launch(1_000)
    assert (kernel.begin_ns - START_NS, kernel.idle_ns) == (15_000, 14_000)


def test_launching_costs_the_host_time():
    one = SimulatedRank(costs=HostCosts(launch_ns=4_000))
    one.launch(1_000)
    one.launch(1_000)
    assert spans(one) == [(4_000, 5_000), (8_000, 9_000)]


def test_streams_run_at_the_same_time_and_wait_for_each_other_where_they_are_told_to():
    one = rank()
    side = one.new_stream()
    one.launch(5_000)
    with one.stream(side):
        one.launch(8_000)
    one.default_stream.wait_stream(side)
    one.launch(1_000)
    assert spans(one) == [(0, 5_000), (0, 8_000), (5_000, 8_000), (8_000, 9_000)]
    assert one.done[2].held_ns == 3_000


def test_an_event_is_passed_when_the_device_has_done_what_came_before_it():
    one = rank()
    one.launch(5_000)
    event = one.new_event()
    assert event.query()
    event.record()
    one.compute(4_999)
    assert not event.query()
    one.compute(1)
    assert event.query()


def test_synchronising_brings_the_host_to_the_mark():
    one = rank()
    one.launch(5_000)
    event = one.new_event()
    event.record()
    event.synchronize()
    assert one.now_ns == START_NS + 5_000


@each_case(
    ("clock", "expected_ms"),
    [
        (DeviceClock(resolution_ns=1), 2_000.0),
        (DeviceClock(rate_ppm=50.0, resolution_ns=1), 2_000.1),
        (DeviceClock(rate_ppm=50.0, drift_ppm_per_s=1.0, offset_ns=-(1 << 50), resolution_ns=1), 2_000.104),
    ],
)
def test_elapsed_time_is_that_of_the_device_in_float32(clock, expected_ms):
    one = rank(device_clock=clock)
    begin, end = one.new_event(), one.new_event()
    begin.record()
    one.launch(2_000_000_000)
    end.record()
    end.synchronize()
    found = begin.elapsed_time(end)
    assert found == pytest.approx(expected_ms, abs=2**-13)
    assert found * 2**13 == round(found * 2**13)  # 24 bits of 2,000


def test_asking_for_times_that_are_not_there_yet_is_an_error_as_in_cuda():
    one = rank()
    begin, end = one.new_event(), one.new_event()
    with pytest.raises(UsageError, match="before the device has passed both"):
        begin.elapsed_time(end)


@each_case("call", ["record", "query", "synchronize"])
def test_an_event_breaks_the_capture_of_a_graph(call):
    one = rank()
    event = one.new_event()
    event.record()
    one.is_capturing = True
    with pytest.raises(UsageError, match="capture is broken"):
        getattr(event, call)()


def test_a_collective_begins_when_the_last_rank_is_there():
    group, ranks = SimulatedGroup(3), [rank() for _ in range(3)]

    def program(one, kernel_ns):
        one.launch(kernel_ns)
        group.all_reduce(one, 500).wait()
        one.launch(100)
        yield

    run({one: program(one, kernel_ns) for one, kernel_ns in zip(ranks, (2_000, 7_000, 1_000), strict=True)})
    for one, kernel_ns in zip(ranks, (2_000, 7_000, 1_000), strict=True):
        kernel, _, collective, wait, after = one.done
        assert collective.begin_ns == kernel.end_ns == START_NS + kernel_ns
        assert collective.held_ns == 7_000 - kernel_ns
        assert collective.end_ns == wait.end_ns == after.begin_ns == START_NS + 7_500
        assert wait.held_ns == 7_500 - kernel_ns


def test_collectives_of_two_groups_overlap_and_those_of_one_follow_each_other():
    first, second, ranks = SimulatedGroup(2), SimulatedGroup(2), [rank(), rank()]

    def program(one):
        works = [
            group.all_reduce(one, 1_000, label=name) for group, name in ((first, "a"), (second, "b"), (first, "c"))
        ]
        for work in works:
            work.wait()
        yield from one.synchronize()

    run({one: program(one) for one in ranks})
    ends = {work.label: work.end_ns - START_NS for work in ranks[0].done if work.label in "abc"}
    assert ends == {"a": 1_000, "b": 1_000, "c": 2_000}
    assert ranks[0].now_ns == ranks[1].now_ns == START_NS + 2_000


def test_a_full_queue_holds_the_host():
    one = rank(queue_size=2)

    def program():
        for _ in range(10):
            one.launch(1_000)
            yield from one.wait_for_room()

    run({one: program()})
    assert one.now_ns == START_NS + 8_000


def test_ranks_that_wait_for_what_nobody_issues_are_named():
    group, ranks = SimulatedGroup(2), [rank(), rank()]

    def program(one):
        if one is ranks[0]:
            group.all_reduce(one, 1_000).wait()
        yield from one.synchronize()

    with pytest.raises(UsageError, match=r"ranks \[0\] wait for collectives that others never issue"):
        run({one: program(one) for one in ranks})


def test_many_steps_take_no_memory_for_what_is_over():
    one = rank()

    def program():
        for _ in range(20_000):
            one.launch(10)
            yield
        yield from one.synchronize()

    run({one: program()})
    assert one.now_ns == START_NS + 200_000
