from __future__ import annotations

import numpy as np
from cases import each_case
from known_runs import MS, known_run

from hpcpace.metrics.phases import EXPOSED_WAIT, CoveredTime, parts_of_steps
from hpcpace.metrics.waits import HeldUp, exposed_waits_ns
from hpcpace.trace.schema import ExitKind, Op, Phase

NOTHING = np.zeros(0, np.int64)


def run_of(rows):
    """Return a run of one rank: rows are step, enter, exit and blocked in ms."""
    made = [
        (step, 0, seq, Op.ALL_REDUCE, 4096, -1, enter * MS, leave * MS, blocked * MS, ExitKind.WAIT)
        for seq, (step, enter, leave, blocked) in enumerate(rows)
    ]
    return known_run([made], np.zeros((1, 1)), np.full((1, 1), 100 * MS)).operations


def held_up(grad_sync=(), away=()):
    def stretches(intervals):
        begin, end = np.array(sorted(intervals), np.int64).reshape(-1, 2).T * MS
        return CoveredTime.of(begin, end)

    return HeldUp(away=stretches(away), inside=stretches([*grad_sync, *away]))


def exposed_ms(rows, waits_ms, held):
    return (exposed_waits_ns(run_of(rows), np.array(waits_ms) * MS, [held]) // MS).tolist()


@each_case(
    ("blocked", "wait", "exposed"),
    [(10, 4, 4), (10, 10, 10), (3, 4, 0), (3, 8, 1), (0, 8, 0)],
    ids=["blocking", "late to the end", "over before it blocks", "partly", "never blocks"],
)
def test_the_caller_is_blocked_at_the_end_of_an_operation(blocked, wait, exposed):
    assert exposed_ms([(0, 0, 10, blocked)], [wait], None) == [exposed]


def test_a_wait_for_gradients_inside_torch_is_exposed():
    assert exposed_ms([(0, 0, 20, 0)], [10], held_up(grad_sync=[(4, 30)])) == [6]


def test_of_several_waits_inside_torch_time_counts_for_the_first_entered():
    rows, waits = [(0, 2, 20, 0), (0, 0, 15, 0), (0, 3, 30, 0)], [10, 10, 5]
    assert exposed_ms(rows, waits, held_up(grad_sync=[(4, 30)])) == [2, 6, 0]


def test_waits_of_another_step_take_nothing():
    rows, waits = [(0, 0, 50, 0), (1, 5, 20, 0)], [45, 10]
    assert exposed_ms(rows, waits, held_up(grad_sync=[(6, 16)])) == [10, 9]


def test_communication_of_an_evaluation_is_a_part_of_it():
    assert exposed_ms([(0, 0, 10, 10)], [8], held_up(away=[(2, 5)])) == [5]


@each_case("seed", range(20))
def test_waits_add_up_to_the_exposed_wait_of_the_step(seed):
    random = np.random.default_rng(seed)
    enter = np.sort(random.integers(0, 50, 8))
    leave = enter + random.integers(1, 30, 8)
    waits = random.integers(0, leave - enter + 1)
    bounds = np.sort(random.choice(90, 6, replace=False)).reshape(3, 2)
    held = held_up(grad_sync=bounds[:2].tolist(), away=bounds[2:].tolist())
    phases = np.array([Phase.GRAD_SYNC, Phase.GRAD_SYNC, Phase.EVAL], np.uint8)
    begin, end = bounds.T * MS
    parts = parts_of_steps(
        (np.zeros(1, np.int64), np.full(1, 100 * MS)),
        (phases, begin, end),
        (enter * MS, leave * MS, np.zeros(8, np.int64), waits * MS),
    )
    rows = [(0, int(a), int(b), 0) for a, b in zip(enter, leave, strict=True)]
    assert sum(exposed_ms(rows, waits, held)) * MS == parts[0, list(EXPOSED_WAIT)].sum()


def test_nothing_is_exposed_of_nothing():
    assert exposed_waits_ns(run_of([]), NOTHING, []).tolist() == []
