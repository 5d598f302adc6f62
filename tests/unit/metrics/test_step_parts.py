from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.phases import CoveredTime, Part, innermost, parts_of_steps
from hpcpace.trace.schema import Phase

NONE = np.zeros(0, np.int64)


def parts(steps=((0, 100),), phases=(), operations=()):
    """Return the non-zero parts of the steps as one dict per step."""
    step = np.array(steps, np.int64).reshape(-1, 2)
    phase = np.array(phases, np.int64).reshape(-1, 3)
    operation = np.array(operations, np.int64).reshape(-1, 4)
    total = parts_of_steps(
        (step[:, 0], step[:, 1]),
        (phase[:, 0].astype(np.uint8), phase[:, 1], phase[:, 2]),
        (operation[:, 0], operation[:, 1], operation[:, 2], operation[:, 3]),
    )
    return [{Part(i).name: int(value) for i, value in enumerate(row) if value} for row in total]


@each_case(
    ("phases", "expected"),
    [
        ([], {"OTHER": 100}),
        ([(Phase.FORWARD, 0, 40)], {"FORWARD": 40, "OTHER": 60}),
        ([(Phase.BACKWARD, 0, 60), (Phase.GC, 10, 30)], {"BACKWARD": 40, "GC": 20, "OTHER": 40}),
        ([(Phase.FORWARD, 0, 60), (Phase.FORWARD, 10, 30)], {"FORWARD": 60, "OTHER": 40}),
        ([(Phase.FORWARD, 0, 60), (Phase.BACKWARD, 40, 80)], {"FORWARD": 40, "BACKWARD": 40, "OTHER": 20}),
        ([(Phase.FORWARD, 0, 60), (Phase.BACKWARD, 0, 20)], {"FORWARD": 40, "BACKWARD": 20, "OTHER": 40}),
        ([(Phase.OTHER, 0, 60), (Phase.DATA, 60, 100)], {"OTHER": 60, "DATA": 40}),
        ([(Phase.FORWARD, -50, 150)], {"FORWARD": 100}),
        ([(Phase.FORWARD, 60, 20)], {"OTHER": 100}),
        ([(99, 0, 50)], {"OTHER": 100}),
        ([(Phase.BACKWARD, 0, 80), (Phase.GRAD_SYNC, 50, 80)], {"BACKWARD": 50, "SYNC_TRANSFER": 30, "OTHER": 20}),
    ],
)
def test_the_innermost_phase_gets_the_time(phases, expected):
    assert parts(phases=phases) == [expected]


@each_case(
    ("operation", "expected"),
    [
        # enter, exit, blocked, wait
        ((20, 60, 40, 0), {"FORWARD": 60, "TRANSFER": 40}),
        ((20, 60, 40, 30), {"FORWARD": 60, "WAIT": 30, "TRANSFER": 10}),
        ((20, 60, 15, 30), {"FORWARD": 85, "WAIT": 5, "TRANSFER": 10}),
        ((20, 60, 15, 10), {"FORWARD": 85, "TRANSFER": 15}),
        ((20, 60, 0, 40), {"FORWARD": 100}),
        ((20, 60, 400, 40), {"FORWARD": 60, "WAIT": 40}),
    ],
)
def test_blocked_communication_is_taken_out_of_the_phase(operation, expected):
    assert parts(phases=[(Phase.FORWARD, 0, 100)], operations=[operation]) == [expected]


def test_in_grad_sync_time_is_wait_while_an_operation_waits():
    phases = [(Phase.BACKWARD, 0, 100), (Phase.GRAD_SYNC, 40, 100)]
    operations = [(10, 70, 0, 50), (30, 90, 0, 45)]
    assert parts(phases=phases, operations=operations) == [{"BACKWARD": 40, "SYNC_WAIT": 35, "SYNC_TRANSFER": 25}]


@pytest.mark.parametrize("whole", [Phase.EVAL, Phase.CHECKPOINT])
def test_what_is_done_for_an_evaluation_or_a_checkpoint_is_part_of_it(whole):
    inside = [(Phase.FORWARD, 20, 40), (Phase.GC, 30, 35), (Phase.DATA, 40, 60)]
    around = [(Phase.FORWARD, 0, 20), (Phase.BACKWARD, 60, 80), (Phase.OPTIMIZER, 50, 70)]
    found = parts(phases=[*inside, (whole, 20, 60), (whole, 90, 95)])
    assert found == [{whole.name: 45, "OTHER": 55}]
    found = parts(phases=[*around, (whole, 20, 60)])
    assert found == [{"FORWARD": 20, whole.name: 30, "OPTIMIZER": 10, "BACKWARD": 20, "OTHER": 20}]


def test_a_checkpoint_keeps_its_communication():
    assert parts(phases=[(Phase.CHECKPOINT, 0, 100)], operations=[(0, 50, 50, 50)]) == [{"CHECKPOINT": 100}]


def test_overlapping_blocked_operations_count_once():
    operations = [(0, 60, 60, 0), (20, 80, 60, 0)]
    assert parts(operations=operations) == [{"TRANSFER": 80, "OTHER": 20}]


def test_time_between_steps_belongs_to_no_step():
    found = parts(steps=[(0, 10), (50, 60)], phases=[(Phase.FORWARD, 5, 55)])
    assert found == [{"FORWARD": 5, "OTHER": 5}, {"FORWARD": 5, "OTHER": 5}]


def test_no_steps_have_no_parts():
    assert parts(steps=(), phases=[(Phase.FORWARD, 0, 1)]) == []


@each_case("seed", range(20))
def test_innermost_and_covered_agree_with_looking_at_each_segment(seed):
    random = np.random.default_rng(seed)
    begin = random.integers(0, 60, 40)
    end = begin + random.integers(0, 30, 40)
    edges = np.unique(np.concatenate([begin, end]))
    expected = []
    for low in edges[:-1]:
        inside = [(begin[i], -end[i], i) for i in range(40) if begin[i] <= low < end[i]]
        expected.append(max(inside)[2] if inside else -1)
    found = innermost(begin, end, edges)
    same = [(begin[a], end[a]) == (begin[b], end[b]) for a, b in zip(found, expected, strict=True) if a >= 0]
    assert (found >= 0).tolist() == [value >= 0 for value in expected]
    assert all(same)
    covered_ns = CoveredTime.of(begin, end).inside_ns(edges[:-1], edges[1:])
    assert covered_ns.tolist() == np.where(found >= 0, np.diff(edges), 0).tolist()


def test_parts_add_up_to_the_step_whatever_the_rows_are():
    random = np.random.default_rng(3)
    begin = random.integers(-100, 1100, 300)
    phases = np.stack([random.integers(0, 12, 300), begin, begin + random.integers(-5, 200, 300)], axis=1)
    enter = random.integers(-100, 1100, 200)
    operations = np.stack(
        [enter, enter + random.integers(0, 80, 200), random.integers(0, 200, 200), random.integers(0, 200, 200)], axis=1
    )
    steps = [(i * 100, i * 100 + 100) for i in range(10)]
    assert [sum(step.values()) for step in parts(steps, phases, operations)] == [100] * 10
