"""How ranks spend their own work, from counters of their threads; what is damaged or blocked is not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from hpcpace.metrics.phase_cores import PARTS, ExcessUse, OtherThreads, Spent, WorkUse, excess_use, work_use
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


def no_threads(num_ranks: int) -> OtherThreads:
    """Return that no thread but the one that trains runs or waits for a core."""
    return OtherThreads(*np.zeros((3, num_ranks)))


def test_own_work_is_running_waiting_for_a_core_and_neither() -> None:
    found = use(table(forward=(60, 20, 30)), table(forward=(20, 20, 0)), own_ms=(60, 20))
    assert found.running_ns[:, FORWARD].tolist() == [20 * MS, 20 * MS]
    assert found.queued_ns[:, FORWARD].tolist() == [30 * MS, 0]
    assert found.idle_ns[:, FORWARD].tolist() == [10 * MS, 0]
    assert found.is_known.tolist() == [True, True]
    split = excess_use(found, no_threads(2), np.array([True, False]), np.array([False, True]))
    assert split is not None
    assert (split.excess_ns, split.queued_ns, split.idle_ns, split.usual_ns) == (40 * MS, 30 * MS, 10 * MS, 20 * MS)


def test_a_rank_that_sleeps_while_the_others_wait_for_cores_is_late_by_its_sleep() -> None:
    found = use(table(forward=(66, 10, 32)), table(forward=(63, 10, 53)), own_ms=(66, 63))
    split = excess_use(found, no_threads(2), np.array([True, False]), np.array([False, True]))
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
    assert excess_use(found, no_threads(2), np.array([True, False]), np.array([False, True])) is None


def test_a_phase_that_is_mostly_blocked_in_communication_is_left_out() -> None:
    found = use(table(forward=(60, 20, 0)), own_ms=(20,))
    assert found.is_known.tolist() == [False]


def test_in_few_seconds_the_error_is_that_of_as_many_steps_and_few_steps_show_none() -> None:
    own = parts(*[60.0]).repeat(4, axis=1)
    own[0, ::2, Part.FORWARD] += 10 * MS
    own[0, 1::2, Part.FORWARD] -= 10 * MS
    for num_rows, error_ns in ((3, 10 * MS / np.sqrt(10)), (2, np.inf)):
        found = work_use([table(forward=(60, 20, 30), num_rows=num_rows)], [0], [10**12], own)
        assert found.error_ns == pytest.approx([error_ns])


def test_the_last_row_may_come_after_the_last_step() -> None:
    rows = table(forward=(60, 20, 30))
    found = work_use([rows], [0], [6_500 * MS], parts(60))
    assert found.num_seconds.tolist() == [7]
    assert work_use([rows], [0], [5_500 * MS], parts(60)).num_seconds.tolist() == [6]


def drawn(length_ms: float, share: float, running: float, seed: int, num_steps: int) -> ExcessUse:
    """Return the excess of a rank that does more in a share of its steps, read in every fourth, over a usual one."""
    random = np.random.default_rng([seed, num_steps])
    extra = (random.random(num_steps) < share) * random.uniform(0, 2 * length_ms / share, num_steps)
    waited = random.exponential(3.0, (2, num_steps))
    own = np.zeros((2, num_steps, len(Part)))
    own[:, :, Part.FORWARD] = (20 + waited + np.array([extra, 0 * extra])) * MS
    tables = []
    for rank in range(2):
        at = np.arange(0, num_steps, 4)
        more = extra[at] * (rank == 0)
        rows = {name: np.zeros(len(at) // 5 + 1, np.int64) for name in table(forward=(0, 0, 0))}
        rows["time_ns"] = np.arange(len(at) // 5 + 1) * 1000 * MS
        values = (20 + waited[rank, at] + more, 20 + running * more, waited[rank, at])
        for name, of_step in zip(("forward_ns", "forward_cpu_ns", "forward_wait_ns"), values, strict=True):
            rows[name][1:] = np.cumsum(of_step * MS)[4::5][: len(at) // 5]
        rows["read_steps"] = np.arange(len(at) // 5 + 1) * 5
        rows["read_ns"] = rows["read_steps"] * STEP_MS * MS
        tables.append(rows)
    split = excess_use(
        work_use(tables, [0, 0], [10**12] * 2, own), no_threads(2), np.array([True, False]), np.array([False, True])
    )
    assert split is not None
    return split


@pytest.mark.parametrize("num_steps", [40, 100, 400])
def test_a_cause_that_chance_may_hold_is_not_named(num_steps: int) -> None:
    problems = []
    for running, right in ((0.0, Spent.IDLE), (0.2, Spent.IDLE), (0.5, Spent.UNKNOWN), (1.0, Spent.RUNNING)):
        for share in (0.2, 0.6, 1.0):
            named = [drawn(8.0, share, running, seed, num_steps).mostly(0.55) for seed in range(100)]
            num_wrong = sum(spent not in (right, Spent.UNKNOWN) for spent in named)
            is_found = right is Spent.UNKNOWN or num_steps < 400 or running == 0.2 or named.count(right) > 90
            if num_wrong > 5 or not is_found:
                problems.append((running, share, num_wrong, named.count(right)))
    assert problems == []


def test_what_other_threads_run_beyond_chance_is_no_waiting() -> None:
    found = use(table(forward=(60, 20, 0)), table(forward=(20, 20, 0)), own_ms=(60, 20))
    slow = np.array([True, False])
    for error_ms, running_ms in ((1.0, 38.0), (19.0, 2.0), (30.0, 0.0)):
        errors = np.array([error_ms, 0.0]) * MS
        threads = OtherThreads(running_ns=np.array([40.0, 0.0]) * MS, queued_ns=np.zeros(2), error_ns=errors)
        split = excess_use(found, threads, slow, ~slow)
        assert split is not None
        assert split.running_ns == pytest.approx(max(running_ms, 0.0) * MS, abs=1 * MS)
        assert split.mostly(0.55) is (Spent.RUNNING if error_ms == 1.0 else Spent.IDLE)


def test_parts_that_are_not_known_may_be_either() -> None:
    split = ExcessUse(
        excess_ns=30.0, queued_ns=0.0, idle_ns=15.0, unknown_ns=14.0, usual_ns=1.0, error_ns=0.1, is_whole=False
    )
    assert split.running_ns == 1.0
    assert split.mostly(0.55) is Spent.UNKNOWN
    assert dataclasses.replace(split, excess_ns=16.0, unknown_ns=0.0).mostly(0.55) is Spent.IDLE


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
    splits = [excess_use(found, no_threads(3), case, ~case) for case in (slow, ~slow)]
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
    split = excess_use(found, no_threads(2), slow, ~slow)
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
    split = excess_use(found, no_threads(2), slow, ~slow)
    assert split is not None
    assert (split.excess_ns, split.idle_ns, split.unknown_ns, split.beyond_ns) == (79 * MS, 78 * MS, 0, 79 * MS)


def test_a_phase_in_which_the_others_are_blocked_shows_who_is_late_but_not_whether_it_computes() -> None:
    """As where forward gathers from all ranks: of the 91 ms of the others any part may be computation."""
    found = WorkUse(
        own_ns=np.array([[20.0, 91.0], [20.0, 170.0]]) * MS,
        running_ns=np.array([[18.0, 0.0], [18.0, 84.0]]) * MS,
        queued_ns=np.array([[2.0, 0.0], [2.0, 0.0]]) * MS,
        error_ns=np.full(2, 7 * MS),
        num_seconds=np.full(2, 11),
        is_part_known=np.array([[True, False], [True, True]]),
    )
    slow = np.arange(2) == 1
    split = excess_use(found, no_threads(2), slow, ~slow)
    assert split is not None
    assert (split.unknown_ns, split.beyond_ns, split.mostly(0.55)) == (0, 79 * MS, Spent.UNKNOWN)
