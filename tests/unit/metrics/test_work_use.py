"""How ranks spend their own work, from counters of their threads; what is damaged or blocked is not known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from hpcpace.metrics.phase_cores import PARTS, WorkUse, excess_use, work_use
from hpcpace.metrics.phases import Part
from hpcpace.trace.schema import PHASES_ON_CORES

MS = 1_000_000
STEP_MS = 100


def table(*, forward: tuple[int, int, int], num_rows: int = 8, per_second: int = 5) -> dict[str, NDArray[np.int64]]:
    """Return counters of steps of 100 ms; length, running and waiting of forward in milliseconds of a step."""
    steps = np.arange(num_rows) * per_second
    found = {"time_ns": np.arange(num_rows) * 1000 * MS, "read_steps": steps, "read_ns": steps * STEP_MS * MS}
    for phase in PHASES_ON_CORES:
        values = forward if phase.name == "FORWARD" else (0, 0, 0)
        for end, value in zip(("", "_cpu", "_wait"), values, strict=True):
            found[f"{phase.name.lower()}{end}_ns"] = steps * value * MS
    return found


def parts(*forward_ms: float) -> NDArray[np.float64]:
    """Return the parts of ten steps of each rank: forward, and waiting for the others."""
    found = np.zeros((len(forward_ms), 10, len(Part)))
    found[:, :, Part.FORWARD] = np.array(forward_ms)[:, None] * MS
    found[:, :, Part.WAIT] = STEP_MS * MS - found[:, :, Part.FORWARD]
    return found


def use(*tables: Mapping[str, NDArray[np.int64]], own_ms: tuple[float, ...]):
    return work_use(tables, [0] * len(tables), [10**12] * len(tables), parts(*own_ms))


FORWARD = PARTS.index(Part.FORWARD)


def test_own_work_is_running_waiting_for_a_core_and_neither() -> None:
    found = use(table(forward=(60, 20, 30)), table(forward=(20, 20, 0)), own_ms=(60, 20))
    assert found.running_ns[:, FORWARD].tolist() == [20 * MS, 20 * MS]
    assert found.queued_ns[:, FORWARD].tolist() == [30 * MS, 0]
    assert found.idle_ns[:, FORWARD].tolist() == [10 * MS, 0]
    assert found.is_known.tolist() == [True, True]
    split = excess_use(found, np.zeros(2), np.array([True, False]), np.array([False, True]))
    assert split is not None
    assert (split.excess_ns, split.queued_ns, split.idle_ns, split.usual_ns) == (40 * MS, 30 * MS, 10 * MS, 20 * MS)


def test_a_rank_that_sleeps_while_the_others_wait_for_cores_is_late_by_its_sleep() -> None:
    found = use(table(forward=(66, 10, 32)), table(forward=(63, 10, 53)), own_ms=(66, 63))
    split = excess_use(found, np.zeros(2), np.array([True, False]), np.array([False, True]))
    assert split is not None
    assert (split.excess_ns, split.queued_ns, split.beyond_ns) == (3 * MS, -21 * MS, 24 * MS)


def test_steps_that_were_not_read_only_wait_longer() -> None:
    found = use(table(forward=(60, 20, 30)), own_ms=(80,))
    assert (found.running_ns[0, FORWARD], found.queued_ns[0, FORWARD]) == (20 * MS, 50 * MS)


@pytest.mark.parametrize(
    "damage",
    [
        {"read_steps": np.zeros(8, np.int64)},  # an older trace, or a kernel that does not count
        {"forward_cpu_ns": np.arange(8)[::-1].copy()},  # runs backwards
        {"time_ns": np.full(8, 10**15)},  # of another time
    ],
    ids=["old", "backwards", "elsewhere"],
)
def test_without_sound_counters_nothing_is_known(damage: dict[str, NDArray[np.int64]]) -> None:
    found = use(table(forward=(60, 20, 30)) | damage, table(forward=(20, 20, 0)), own_ms=(60, 20))
    assert found.is_known.tolist() == [False, True]
    assert excess_use(found, np.zeros(2), np.array([True, False]), np.array([False, True])) is None


def test_a_phase_that_is_mostly_blocked_in_communication_is_left_out() -> None:
    found = use(table(forward=(60, 20, 0)), own_ms=(20,))
    assert found.is_known.tolist() == [False]


def test_few_seconds_show_no_error() -> None:
    assert np.isinf(use(table(forward=(60, 20, 30), num_rows=3), own_ms=(60,)).error_ns).all()


def test_a_part_that_is_not_known_of_one_side_is_no_work_beyond_waiting() -> None:
    own = np.array([[30.0, 5.0], [46.0, 3.0], [30.0, 5.0]]) * MS
    running = np.array([[9.0, 1.0], [9.0, 0.0], [9.0, 1.0]]) * MS
    found = WorkUse(
        own_ns=own,
        running_ns=running,
        queued_ns=np.array([[21.0, 4.0], [37.0, 0.0], [21.0, 4.0]]) * MS,
        error_ns=np.full(3, 0.1 * MS),
        num_seconds=np.full(3, 8),
        is_part_known=np.array([[True, True], [True, False], [True, True]]),
    )
    slow = np.arange(3) == 1
    splits = [excess_use(found, np.zeros(3), case, ~case) for case in (slow, ~slow)]
    assert [split and (split.excess_ns, split.beyond_ns <= 0, split.usual_ns) for split in splits] == [
        (14 * MS, True, 14 * MS),
        (-14 * MS, True, 12 * MS),
    ]


def test_a_fault_in_a_known_part_is_found_where_most_of_the_work_is_not_known() -> None:
    found = WorkUse(
        own_ns=np.array([[30.0, 1080.0], [511.0, 1028.0]]) * MS,
        running_ns=np.array([[5.0, 0.0], [5.0, 168.0]]) * MS,
        queued_ns=np.array([[25.0, 0.0], [20.0, 797.0]]) * MS,
        error_ns=np.full(2, 30 * MS),
        num_seconds=np.full(2, 37),
        is_part_known=np.array([[True, False], [True, True]]),
    )
    slow = np.arange(2) == 1
    split = excess_use(found, np.zeros(2), slow, ~slow)
    assert split is not None
    assert (split.excess_ns, split.beyond_ns, split.usual_ns) == (429 * MS, 486 * MS, 1085 * MS)


def test_a_rank_that_idles_in_a_phase_in_which_the_others_are_blocked_is_late_by_at_least_the_rest() -> None:
    """As where gradients are reduced inside backward: the others wait there, so it is not known how they spend 2 ms."""
    found = WorkUse(
        own_ns=np.array([[3.0, 2.0], [3.0, 81.0]]) * MS,
        running_ns=np.array([[3.0, 0.0], [3.0, 1.0]]) * MS,
        queued_ns=np.zeros((2, 2)),
        error_ns=np.full(2, 0.1 * MS),
        num_seconds=np.full(2, 8),
        is_part_known=np.array([[True, False], [True, True]]),
    )
    slow = np.arange(2) == 1
    split = excess_use(found, np.zeros(2), slow, ~slow)
    assert split is not None
    assert (split.excess_ns, split.idle_ns, split.unknown_ns, split.beyond_ns) == (79 * MS, 78 * MS, 0, 79 * MS)
