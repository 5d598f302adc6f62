from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MS, data_parallel, known_run, pipeline

from hpcpace.metrics.propagation import delay_origins, last_partner
from hpcpace.trace.schema import ExitKind, Op


def origins(run, *, wait_ns=None, **options):
    wait_ns = run.waits.wait_ns if wait_ns is None else wait_ns
    return delay_origins(run.operations, run.matching, wait_ns, ranks=run.ranks, **options)


def test_waiting_is_put_down_to_the_last_to_arrive():
    truth = np.full((4, 6, 2), 10 * MS)
    truth[2] += 3 * MS
    found = origins(data_parallel(truth))
    assert found.direct_ns.tolist() == [0, 0, 3 * 12 * 3 * MS, 0]
    assert found.propagated_ns.tolist() == [0] * 4
    assert found.waited_ns.tolist() == [36 * MS, 36 * MS, 0, 36 * MS]


def test_a_delay_is_walked_back_through_a_chain_of_messages():
    late, usual = np.full((4, 5), 10 * MS), np.full((4, 5), 10 * MS)
    late[0] += 7 * MS
    more = origins(pipeline(late)).caused_ns - origins(pipeline(usual)).caused_ns
    assert more.sum() == pytest.approx(3 * 5 * 7 * MS)  # stages 1 to 3 each wait 7 ms longer
    assert more[0] >= 3 * 5 * 7 * MS
    assert (more[1:] <= 1000).all()


def test_heirs_pass_on_what_they_waited_and_keep_what_is_theirs():
    def row(op, enter, exit_, peer, seq):
        return (0, 0, seq, op, 8, peer, enter * MS, exit_ * MS, (exit_ - enter) * MS, ExitKind.COMPLETION)

    # Rank 0 sends at 100 ms; rank 1 waited for it since 40 and works for 30 more; rank 2 has waited since 10.
    rows = [
        [row(Op.SEND, 100, 101, 1, 0)],
        [row(Op.RECV, 40, 100, 0, 0), row(Op.SEND, 130, 131, 2, 0)],
        [row(Op.RECV, 10, 130, 1, 0)],
    ]
    found = origins(known_run(rows, np.zeros((3, 1)), np.full((3, 1), 200 * MS)))
    assert found.waited_ns.tolist() == [0, 60 * MS, 120 * MS]
    assert found.direct_ns == pytest.approx([60 * MS, 60 * MS, 0])
    assert found.propagated_ns == pytest.approx([60 * MS, 0, 0])


def test_waits_before_the_last_common_synchronisation_do_not_count():
    truth = np.full((3, 1, 2), 10 * MS)
    truth[0, 0, 0] += 30 * MS
    truth[1, 0, 1] += 5 * MS
    found = origins(data_parallel(truth))
    assert found.caused_ns.tolist() == [60 * MS, 10 * MS, 0]


@each_case("seed", range(8))
def test_origins_sum_to_waits(seed):
    random = np.random.default_rng(seed)
    for run in (
        data_parallel((random.exponential(10, (5, 12, 3)) * MS).astype(np.int64)),
        pipeline((random.exponential(10, (5, 12)) * MS).astype(np.int64), num_microbatches=3),
    ):
        found = origins(run)
        assert found.caused_ns.sum() == pytest.approx(found.waited_ns.sum())
        assert found.waited_ns.sum() == pytest.approx(run.waits.wait_ns.sum())
        assert (found.direct_ns >= 0).all()
        assert (found.propagated_ns >= 0).all()


def test_only_chosen_waits_are_put_down():
    truth = np.full((3, 4, 1), 10 * MS)
    truth[1] += MS
    run = data_parallel(truth)
    found = origins(run, mask=run.operations.step == 2)
    assert found.caused_ns.tolist() == [0, 2 * MS, 0]


def test_the_exposed_part_may_be_what_counts():
    truth = np.full((3, 4, 1), 10 * MS)
    truth[1] += MS
    run = data_parallel(truth)
    assert origins(run, wait_ns=run.waits.wait_ns / 2).caused_ns.tolist() == [0, 4 * MS, 0]


def test_the_last_partner_is_the_root_the_sender_or_the_latest():
    def row(op, enter, exit_, peer=-1, seq=0):
        return (0, 0, seq, op, 8, peer, enter, exit_, exit_ - enter, ExitKind.COMPLETION)

    rows = [
        [row(Op.BROADCAST, 50, 60, 0), row(Op.REDUCE, 70, 95, 0), row(Op.BARRIER, 100, 120)],
        [row(Op.BROADCAST, 10, 60, 0), row(Op.REDUCE, 90, 91, 0), row(Op.BARRIER, 110, 120)],
    ]
    run = known_run(rows, np.zeros((2, 1)), np.full((2, 1), 200))
    assert last_partner(run.operations, run.matching).tolist() == [-1, 4, 5, 0, -1, -1]


@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 0, 1)])
def test_runs_without_waits_have_no_origins(shape):
    found = origins(data_parallel(np.full(shape, MS)))
    assert found.caused_ns.tolist() == [0] * shape[0]
