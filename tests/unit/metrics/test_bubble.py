from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MESSAGE_NS, MS, data_parallel, known_run, pipeline

from hpcpace.metrics.critical_path import covered_by_waits, ideal_bubble, microbatches, pipeline_bubble
from hpcpace.metrics.segments import local_work
from hpcpace.trace.schema import ExitKind, Op


def waited(run):
    """Return how long each rank was blocked waiting for messages in each step."""
    done, found = run.operations, []
    for index, rank in enumerate(run.ranks):
        own = np.flatnonzero((done.rank == rank) & np.isin(done.op, (Op.SEND, Op.RECV)))
        times = (done.enter_ns[own], done.exit_ns[own], done.blocked_ns[own], run.waits.wait_ns[own])
        found.append(covered_by_waits(times, (run.steps.begin_ns[index], run.steps.end_ns[index])))
    return np.array(found)


@each_case(("stages", "micro", "share"), [(1, 4, 0.0), (2, 1, 0.5), (4, 1, 0.75), (4, 12, 0.2)])
def test_the_ideal_bubble_is_that_of_the_schedule(stages, micro, share):
    assert ideal_bubble(stages, micro) == pytest.approx(share)


@pytest.mark.parametrize(("stages", "micro"), [(0, 1), (2, 0)])
def test_a_schedule_without_stages_or_microbatches_is_refused(stages, micro):
    with pytest.raises(ValueError, match="must be at least 1"):
        ideal_bubble(stages, micro)


def test_a_stage_waits_for_the_ones_before_it():
    found = waited(pipeline(np.full((3, 4), 10 * MS)))
    assert found[0].tolist() == [0] * 4
    assert found[1] == pytest.approx(np.full(4, 10 * MS))
    assert found[2] == pytest.approx(np.full(4, 20 * MS + MESSAGE_NS))


def test_waits_for_collectives_are_no_bubble():
    truth = np.full((2, 4, 1), 10 * MS)
    truth[0] += 10 * MS
    assert not waited(data_parallel(truth)).any()


def test_waits_that_overlap_count_once():
    def row(op, enter, exit_, peer, seq):
        return (0, 0, seq, op, 8, peer, enter, exit_, exit_ - enter, ExitKind.COMPLETION)

    rows = [
        [row(Op.SEND, 100, 101, 1, 0), row(Op.SEND, 150, 151, 1, 1)],
        [row(Op.RECV, 20, 110, 0, 0), row(Op.RECV, 30, 160, 0, 1)],
    ]
    run = known_run(rows, np.zeros((2, 1)), np.full((2, 1), 200))
    assert waited(run).tolist() == [[0], [130]]


def test_the_share_is_compared_with_the_schedule():
    found = pipeline_bubble(np.array([[0.0, 0.0], [40.0, 60.0]]), np.array([100.0, 100.0]), np.arange(2))
    assert found.tolist() == [0, 0.5]
    assert found.mean() == pytest.approx(ideal_bubble(2, 3))


def test_microbatches_are_the_messages_to_one_peer_in_a_step():
    run = pipeline(np.full((3, 4), 10 * MS), num_microbatches=6)
    work = local_work(run.operations, run.steps, ranks=run.ranks, role=np.arange(3))
    assert microbatches(run.operations, work) == 6
    run = data_parallel(np.full((3, 4, 1), 10 * MS))
    work = local_work(run.operations, run.steps, ranks=run.ranks, role=np.arange(3))
    assert microbatches(run.operations, work) is None


@each_case(("step_ns", "stage"), [(np.array([10.0]), [0, 0]), (np.zeros(0), [0, 1]), (np.zeros(1), [0, 1])])
def test_no_pipeline_or_no_time_has_no_bubble(step_ns, stage):
    assert pipeline_bubble(np.zeros((2, len(step_ns))), step_ns, np.array(stage)) is None
