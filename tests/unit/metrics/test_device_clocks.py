"""How far the clocks of hosts are ahead, by collectives that end together and by messages there and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from known_runs import MS, known_run

from hpcpace.metrics.arrivals import clock_offsets_ns
from hpcpace.metrics.operations import ProcessGroup
from hpcpace.trace.schema import ExitKind, Op

NUM_STEPS, AHEAD_MS = 30, 3


def offsets_ms(rows_of_step, *, num_ranks, is_on_device=True):
    """Return how far the clock of each rank's host seems to be ahead, milliseconds; ranks have a host each."""
    begin = np.tile(np.arange(NUM_STEPS) * 100 * MS, (num_ranks, 1))
    rows = [[row for step in range(NUM_STEPS) for row in of_rank(step)] for of_rank in rows_of_step]
    run = known_run(rows, begin, begin + 100 * MS)
    groups = tuple(
        ProcessGroup(name=of.name, ranks=of.ranks, is_on_device=is_on_device) for of in run.operations.groups
    )
    operations = replace(run.operations, groups=groups)
    return (clock_offsets_ns(operations, run.matching, operations.rank) / MS).tolist()


def row(step, seq, op, peer, enter_ms, exit_ms, kind=ExitKind.COMPLETION):
    enter_ns, exit_ns = (int((step * 100 + of_ms) * MS) for of_ms in (enter_ms, exit_ms))
    return (step, 0, seq, op, 8, peer, enter_ns, exit_ns, 0, kind)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_clock_is_ahead_by_as_much_as_collectives_of_devices_seem_to_end_later(is_on_device):
    """On the host, a collective ends when a thread gets to it."""
    ranks = [
        lambda step, ahead=ahead, late=late: [row(step, step, Op.ALL_REDUCE, -1, 10 + late + ahead, 30 + ahead)]
        for ahead, late in ((0, 0), (AHEAD_MS, 12), (0, 3))
    ]
    expected = [0, AHEAD_MS, 0] if is_on_device else [0, 0, 0]
    assert offsets_ms(ranks, num_ranks=3, is_on_device=is_on_device) == pytest.approx(expected)


@pytest.mark.parametrize("is_receiver_late", [False, True])
def test_a_clock_is_ahead_by_half_of_what_messages_take_longer_to_it_than_back(is_receiver_late):
    """Where receivers were waiting: what a late one takes says when it came."""

    def of_rank(rank):
        ahead = rank * AHEAD_MS

        def of_step(step):
            waits_ms = 10 if step % 3 else 0
            there = (20, 21) if rank == 0 else (20 - waits_ms, 22)
            back = (60 - waits_ms, 62) if rank == 0 else (40 if is_receiver_late else 60, 61)
            if is_receiver_late and rank == 0:
                back = (60, 62)
            places = [(there, Op.SEND if rank == 0 else Op.RECV), (back, Op.RECV if rank == 0 else Op.SEND)]
            return [row(step, step, op, 1 - rank, first + ahead, last + ahead) for (first, last), op in places]

        return of_step

    expected = [0, 0 if is_receiver_late else AHEAD_MS]
    assert offsets_ms([of_rank(0), of_rank(1)], num_ranks=2) == pytest.approx(expected)
