"""Which runs hang, by their traces, and who is named: each kind, and what looks like one for a while."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from written_job import WrittenJob

from hpcpace.core.rundir import Attempt
from hpcpace.hang.from_traces import hang_in, read_records
from hpcpace.hang.views import Hang, HangKind
from hpcpace.trace.schema import EventKind, Op, Phase

HANG_S = 5.0
BEFORE = ((Phase.DATA, 0.01), (Phase.FORWARD, 0.04))


def found_in(attempt: Attempt, hang_s: float = HANG_S) -> Hang | None:
    found = hang_in(read_records(attempt), hang_s=hang_s)
    return None if found is None else found.hang


def named(hang: Hang | None) -> tuple[HangKind, tuple[int, ...]]:
    assert hang is not None
    return hang.kind, hang.culprits


def waiting_job(missing: int = 2, num_ranks: int = 4) -> WrittenJob:
    """Return a job of which all ranks but one stand in the all_reduce of step 20, from second 2 to 60."""
    job = WrittenJob(num_ranks=num_ranks)
    job.all_steps(20)
    for rank in job.ranks:
        if rank.rank != missing:
            rank.step(20, 2.0, BEFORE, is_over=False)
            rank.call(Op.ALL_REDUCE, 2.05, step=20)
    return job


@each_case("phases", [(), BEFORE[:1], BEFORE])
def test_a_rank_stuck_in_its_own_work(tmp_path: Path, phases: tuple[tuple[Phase, float], ...]) -> None:
    job = waiting_job()
    job.ranks[2].step(20, 2.0, phases, is_over=False)
    hang = found_in(job.write(tmp_path / "run"))
    assert named(hang) == (HangKind.OWN_WORK, (2,))
    assert hang is not None and hang.waiting == (0, 1, 3)


@each_case("seen_s", [2.1, 3.0, 20.0])
def test_a_rank_that_is_stopped_or_whose_host_is_gone(tmp_path: Path, seen_s: float) -> None:
    job = waiting_job()
    job.ranks[2].seen_s = seen_s
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.GONE, (2,))


@pytest.mark.parametrize("kind", [EventKind.EXIT, EventKind.EXCEPTION])
def test_a_rank_that_ended(tmp_path: Path, kind: EventKind) -> None:
    job = waiting_job()
    job.ranks[2].ends(2.5, kind, 7, b"ValueError", step=20)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.GONE, (2,))


def test_a_rank_that_called_another_operation(tmp_path: Path) -> None:
    job = waiting_job()
    job.ranks[2].call(Op.BROADCAST, 2.05, step=20, peer=0)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.MISMATCH, (2,))


def test_a_rank_that_called_it_with_another_size(tmp_path: Path) -> None:
    job = waiting_job()
    job.ranks[2].call(Op.ALL_REDUCE, 2.05, step=20, size=8192)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.MISMATCH, (2,))


def test_a_rank_that_called_the_operations_of_two_groups_in_another_order(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4, groups={1: ("twin", (0, 1, 2, 3))})
    job.all_steps(20)
    for rank in job.ranks:
        rank.call(Op.ALL_REDUCE, 2.05, step=20, group=1 if rank.rank == 2 else 0)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.DISORDER, (2,))


def test_a_network_on_which_nothing_moves_names_nobody(tmp_path: Path) -> None:
    assert named(found_in(waiting_job(missing=-1).write(tmp_path / "run"))) == (HangKind.NETWORK, ())


@pytest.mark.parametrize("late_s", [58.0, 59.9])
def test_an_operation_that_the_last_rank_has_just_entered_is_no_network_on_which_nothing_moves(
    tmp_path: Path, late_s: float
) -> None:
    job = waiting_job()
    job.ranks[2].call(Op.ALL_REDUCE, late_s, step=20)
    assert found_in(job.write(tmp_path / "run")) is None


def test_the_root_of_a_chain_of_stages_is_named(tmp_path: Path) -> None:
    """Stage 2 of a pipeline computes without end; stage 3 waits for it, and 1 and 0 for what comes back."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    job.ranks[3].call(Op.RECV, 2.0, step=20, peer=2)
    job.ranks[2].call(Op.RECV, 2.0, 2.02, step=20, peer=1)
    job.ranks[1].call(Op.SEND, 2.01, 2.02, step=20, peer=2)
    job.ranks[1].call(Op.RECV, 2.03, step=20, peer=2)
    job.ranks[0].call(Op.RECV, 2.02, step=20, peer=1)
    hang = found_in(job.write(tmp_path / "run"))
    assert named(hang) == (HangKind.OWN_WORK, (2,))
    assert hang is not None and hang.waiting == (0, 1, 3)


@each_case("missing", [(2,), (1,), (1, 2)])
def test_with_a_rank_missing_nobody_innocent_is_named(tmp_path: Path, missing: tuple[int, ...]) -> None:
    job = waiting_job(missing=2)
    job.missing = missing
    hang = found_in(job.write(tmp_path / "run"))
    assert hang is not None
    if 2 in missing:
        assert (hang.culprits, hang.kind) == ((), HangKind.UNKNOWN)
        assert not hang.could_be or 2 in hang.could_be
    else:
        assert hang.culprits in ((2,), ())


def test_of_a_rank_that_dropped_rows_it_is_not_said_that_it_never_came(tmp_path: Path) -> None:
    records = read_records(waiting_job().write(tmp_path / "run"))
    lost = [replace(rank, is_complete=rank.rank != 2) for rank in records.ranks]
    found = hang_in(replace(records, ranks=lost), hang_s=HANG_S)
    assert found is not None and found.hang.culprits == ()


@pytest.mark.parametrize("offset_s", [-30.0, 30.0])
def test_clocks_that_differ_change_no_verdict(tmp_path: Path, offset_s: float) -> None:
    job = WrittenJob(num_ranks=4, per_host=2)
    for rank in job.ranks[2:]:
        rank.offset_s = offset_s
    job.all_steps(20)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 2.05, step=20)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.OWN_WORK, (2,))


def test_a_rank_that_is_stopped_inside_is_named_though_it_wakes_up_at_the_end(tmp_path: Path) -> None:
    """The signal that ends a job wakes it up: it finishes the operation in which the others were killed."""
    job = waiting_job(missing=3, num_ranks=16)
    job.ranks[3].flush_until_s = 3.0
    job.ranks[3].call(Op.ALL_REDUCE, 2.05, 61.0, step=20)
    job.ranks[3].seen_s = 62.0
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.GONE, (3,))


def test_an_operation_that_all_finished_but_a_rank_killed_in_it_is_no_hang(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    job.ranks[0].call(Op.ALL_REDUCE, 2.05, step=20)
    job.ranks[0].seen_s = 2.9
    for rank in job.ranks[1:]:
        rank.call(Op.ALL_REDUCE, 2.05, 2.95, step=20)
    assert found_in(job.write(tmp_path / "run")) is None


@pytest.mark.parametrize("late_s", [None, 40.0])
def test_an_operation_that_ran_out_of_time_is_a_hang_of_the_rank_that_never_came_or_came_late(
    tmp_path: Path, late_s: float | None
) -> None:
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 2.05, 32.05, step=20, has_failed=True)
            rank.ends(32.1, EventKind.EXCEPTION, 1, b"RuntimeError", step=20)
    if late_s is not None:
        job.ranks[2].call(Op.ALL_REDUCE, late_s, late_s + 0.01, step=20, has_failed=True)
    assert named(found_in(job.write(tmp_path / "run")))[1] == (2,)


@each_case(("num_steps", "age_s", "is_hang"), [(20, 5.5, True), (20, 4.0, False), (0, 58.0, False)])
def test_a_hang_needs_time_and_more_of_it_in_the_first_step(
    tmp_path: Path, num_steps: int, age_s: float, is_hang: bool
) -> None:
    job = WrittenJob(num_ranks=4)
    job.all_steps(num_steps)
    for rank in job.ranks:
        rank.seen_s = 60.0
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 60.0 - age_s, step=num_steps)
    assert (found_in(job.write(tmp_path / "run")) is not None) is is_hang


@each_case(("phase", "lasts_s", "is_hang"), [
    (Phase.CHECKPOINT, 9.0, False), (Phase.CHECKPOINT, 30.0, True), (Phase.EVAL, 9.0, False), (Phase.EVAL, 30.0, True)
])  # fmt: skip
def test_a_checkpoint_or_an_evaluation_may_last_five_times_its_usual_length(
    tmp_path: Path, phase: Phase, lasts_s: float, is_hang: bool
) -> None:
    """Every fifth step has one of 2 s on rank 0, for which the others wait."""
    job, at_s = WrittenJob(num_ranks=4), 0.0
    for step in range(20):
        long_s = 2.0 if step % 5 == 0 else 0.0
        job.ranks[0].step(step, at_s, [(Phase.DATA, 0.01), *([(phase, long_s)] if long_s else [])])
        for rank in job.ranks:
            enter_s = at_s + (long_s if rank.rank == 0 else 0.0) + 0.08
            rank.call(Op.ALL_REDUCE, enter_s, at_s + long_s + 0.09, step=step)
            if rank.rank:
                rank.step(step, at_s, [(Phase.DATA, 0.01), (Phase.FORWARD, long_s + 0.09)])
        at_s += long_s + 0.1
    job.ranks[0].step(20, at_s, [(Phase.DATA, 0.01)], is_over=False)
    for rank in job.ranks:
        rank.seen_s = at_s + lasts_s
        if rank.rank:
            rank.step(20, at_s, [(Phase.DATA, 0.01)], is_over=False)
            rank.call(Op.ALL_REDUCE, at_s + 0.09, step=20)
    hang = found_in(job.write(tmp_path / "run"))
    if is_hang:
        assert named(hang) == (HangKind.OWN_WORK, (0,))
    else:
        assert hang is None


def test_a_slow_step_of_twenty_times_the_usual_is_no_hang(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    for rank in job.ranks:
        rank.seen_s = 4.0
        if rank.rank:
            rank.call(Op.ALL_REDUCE, 2.08, step=20)
    assert found_in(job.write(tmp_path / "run"), hang_s=0.1) is None


def test_a_trace_of_another_run_among_them_is_a_rank_without_a_record(tmp_path: Path) -> None:
    job = waiting_job()
    job.ranks[1].run_id = "another"
    hang = found_in(job.write(tmp_path / "run"))
    assert hang is not None and set(hang.culprits) <= {2}


def test_ranks_beyond_the_world_are_not_named(tmp_path: Path) -> None:
    job = waiting_job(num_ranks=6, missing=5)
    job.world_size = 5
    hang = found_in(job.write(tmp_path / "run"))
    assert hang is None or max((*hang.culprits, *hang.could_be), default=0) < 5


@pytest.mark.parametrize("has_come", [True, False])
def test_a_stage_that_is_stopped_is_named_whatever_it_was_in_when_last_seen(tmp_path: Path, has_come: bool) -> None:
    """Stage 2 was last seen waiting for stage 1, which has sent since, or waits for stage 2 itself."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    job.ranks[2].call(Op.RECV, 2.0, step=20, peer=1)
    job.ranks[2].seen_s = 2.3
    if has_come:
        job.ranks[1].call(Op.SEND, 2.3, 2.31, step=20, peer=2)
    job.ranks[1].call(Op.RECV, 2.32, step=20, peer=2)
    job.ranks[0].call(Op.RECV, 2.1, step=20, peer=1)
    job.ranks[3].call(Op.RECV, 2.1, step=20, peer=2)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.GONE, (2,))


def test_a_rank_that_left_out_an_operation_before_is_not_said_to_be_at_work(tmp_path: Path) -> None:
    """It swallowed an error in step 20, and so took the operation of step 21 for the one in which the others were."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    for rank in job.ranks:
        has_skipped = rank.rank == 2
        rank.call(Op.ALL_REDUCE, 2.08, 2.1, step=21 if has_skipped else 20)
        rank.step(21 if has_skipped else 20, 2.0, [(Phase.DATA, 0.01), (Phase.FORWARD, 0.1)])
        if not has_skipped:
            rank.call(Op.ALL_REDUCE, 2.2, step=21)
    assert named(found_in(job.write(tmp_path / "run"))) == (HangKind.NEVER_CALLED, (2,))


def test_of_a_rank_that_records_only_its_steps_nothing_is_said_to_be_missing(tmp_path: Path) -> None:
    job = waiting_job()
    job.ranks[2].rows.append(("event", (job.ranks[2].ns(1.95), 20, EventKind.SWITCH, 0, b"a file in the run")))
    hang = found_in(job.write(tmp_path / "run"))
    assert hang is not None and (hang.kind, hang.culprits) == (HangKind.UNKNOWN, ())
