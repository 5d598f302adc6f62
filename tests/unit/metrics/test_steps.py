from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.steps import common_steps, step_times, throughput, used_steps
from hpcpace.trace.schema import TABLES, StepFlag


def steps(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array(list(rows), TABLES["steps"].dtype)


def test_only_steps_that_all_ranks_have_are_common():
    panel = common_steps([steps((0, 0, 5, 1, 0), (1, 5, 9, 1, 0)), steps((1, 6, 9, 2, 0), (2, 9, 12, 2, 0))])
    assert panel.step.tolist() == [1]
    assert panel.begin_ns.tolist() == [[5], [6]]
    assert panel.samples.tolist() == [3]
    assert panel.num_seen == 3


def test_the_first_of_two_rows_of_one_step_counts():
    panel = common_steps([steps((0, 0, 5, 1, 0), (0, 50, 55, 9, 0))])
    assert panel.end_ns.tolist() == [[5]]


def test_a_step_that_ends_before_it_begins_is_left_out():
    assert len(common_steps([steps((0, 10, 5, 1, 0))])) == 0


def test_no_rank_has_no_steps():
    assert len(common_steps([])) == 0


def test_a_flag_of_one_rank_marks_the_step():
    panel = common_steps([steps((0, 0, 5, 1, StepFlag.EVAL)), steps((0, 0, 5, 1, StepFlag.GC))])
    assert panel.flags.tolist() == [StepFlag.EVAL | StepFlag.GC]


def test_step_times_add_up_to_wall_time():
    begin = np.array([[0, 10, 21], [2, 12, 20]])
    end = np.array([[10, 21, 30], [12, 20, 33]])
    times = step_times(np.array([0, 1, 2]), begin, end)
    assert times.tolist() == [10, 9, 12]
    assert times.sum() == 33 - 2


def test_after_a_gap_the_latest_begin_stands_for_the_end_before():
    times = step_times(np.array([0, 5]), np.array([[0, 100]]), np.array([[10, 107]]))
    assert times.tolist() == [10, 7]


@each_case(
    ("options", "expected"),
    [
        ({"include_warmup": False}, [1, 2, 3]),
        ({"include_warmup": True}, [0, 1, 2, 3]),
        ({"include_warmup": True, "first": 2}, [2, 3]),
        ({"include_warmup": False, "stop": 2}, [1]),
        ({"include_warmup": True, "first": 9}, []),
    ],
)
def test_the_selection_of_steps(options, expected):
    rows = [(i, 10 * i, 10 * i + 10, 1, StepFlag.WARMUP if i == 0 else 0) for i in range(4)]
    panel = common_steps([steps(*rows)])
    assert panel.select(used_steps(panel, **options)).step.tolist() == expected


def test_throughput_is_samples_over_wall_time():
    result = throughput(np.array([1_000_000_000, 3_000_000_000]), np.array([10, 30]))
    assert result.samples_per_s == 10.0
    assert result.p50_ns == 2e9
    assert result.cv == pytest.approx(np.sqrt(2) / 2)


def test_without_samples_there_is_no_throughput():
    assert throughput(np.array([5]), np.array([0])).samples_per_s is None
