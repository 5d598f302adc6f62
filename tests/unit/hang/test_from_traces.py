"""What traces show of a job that hangs, as of any time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from cases import each_case
from written_job import SECOND, WrittenJob, ns

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.hang import from_traces
from hpcpace.hang.from_traces import hang_in, read_records, with_answers
from hpcpace.hang.notices import Notice, NoticedCount, ThreadStack
from hpcpace.hang.views import Channel, Doing, HangKind
from hpcpace.trace.schema import ErrorPart, EventKind, Op, Phase

WORLD = Channel(0)


def hung_job(missing: int = 2) -> WrittenJob:
    """Return four ranks of which all but one stand in the all_reduce of step 20, from second 2 to 60."""
    job = WrittenJob()
    job.all_steps(20)
    for rank in job.ranks:
        if rank.rank != missing:
            rank.call(Op.ALL_REDUCE, 2.0, step=20)
    return job


def test_who_has_entered_how_many_operations_and_stands_in_one(tmp_path: Path) -> None:
    view = read_records(hung_job().write(tmp_path / "run")).view()
    assert {rank: one.entered[WORLD] for rank, one in view.ranks.items()} == {0: 21, 1: 21, 2: 20, 3: 21}
    last = {rank: one.calls[-1] for rank, one in view.ranks.items()}
    assert {rank: (call.seq, call.is_open) for rank, call in last.items()} == {
        0: (20, True), 1: (20, True), 2: (19, False), 3: (20, True)
    }  # fmt: skip
    assert (last[0].op, last[0].size_bytes, last[0].step, last[0].entered_ns) == ("all_reduce", 4096, 20, ns(2.0))
    assert (view.now_ns, view.usual_step_ns) == (ns(60), SECOND // 10)
    assert all(one.is_complete and one.is_gone is False and one.seen_ns == ns(60) for one in view.ranks.values())


@each_case("offset_s", [-3.0, 0.5, 1e6])
def test_times_are_on_one_clock(tmp_path: Path, offset_s: float) -> None:
    job = hung_job()
    job.ranks[1].host, job.ranks[1].offset_s = "elsewhere", offset_s
    job.ranks[1].rows.clear()
    job.ranks[1].open_rows.clear()
    job.ranks[1].call(Op.ALL_REDUCE, 2.0, step=20)
    view = read_records(job.write(tmp_path / "run")).view()
    call = view.ranks[1].calls[-1]
    assert call.entered_ns == pytest.approx(ns(2.0), abs=1000)
    assert view.ranks[1].seen_ns == pytest.approx(ns(60), abs=1000)


def test_a_rank_without_a_file_is_there_without_a_record(tmp_path: Path) -> None:
    job = hung_job()
    job.missing = (2,)
    view = read_records(job.write(tmp_path / "run"), hosts={2: "n0"}).view()
    assert (view.ranks[2].is_recorded, view.ranks[2].host, view.ranks[2].entered) == (False, "n0", {})
    assert view.groups[0].members == (0, 1, 2, 3)


@each_case(
    ("kind", "code", "text", "end"),
    [
        (EventKind.EXIT, 7, b"", "exit code 7"),
        (EventKind.EXCEPTION, 0, b"ValueError", "ValueError"),
        (EventKind.SIGNAL, 15, b"", ""),  # it closed its trace after the signal, and so survived it
    ],
)
def test_how_a_rank_ended(tmp_path: Path, kind: EventKind, code: int, text: bytes, end: str) -> None:
    job = hung_job()
    job.ranks[2].ends(2.5, kind, code, text, step=20)
    view = read_records(job.write(tmp_path / "run")).view()
    gone = view.ranks[2]
    assert (gone.is_gone, gone.end, gone.doing, gone.doing_since_ns) == (True, end, Doing.ENDED, ns(2.5))


def test_a_rank_without_a_sign_of_life_may_have_gone(tmp_path: Path) -> None:
    job = hung_job()
    job.ranks[2].seen_s = 3.0
    view = read_records(job.write(tmp_path / "run")).view()
    assert (view.ranks[2].is_gone, view.ranks[2].seen_ns) == (None, ns(3.0))


def test_messages_have_a_channel_for_each_direction(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=2)
    job.ranks[0].call(Op.SEND, 1.0, 1.1, peer=1)
    job.ranks[1].call(Op.RECV, 1.0, 1.1, peer=0)
    job.ranks[1].call(Op.SEND, 2.0, 2.1, peer=0)
    job.ranks[0].call(Op.RECV, 2.0, 2.1, peer=1)
    job.ranks[1].call(Op.RECV, 3.0, peer=0)
    view = read_records(job.write(tmp_path / "run")).view()
    there, back = Channel(0, 0, 1), Channel(0, 1, 0)
    assert view.ranks[0].entered == {there: 1, back: 1}
    assert view.ranks[1].entered == {there: 2, back: 1}


def test_groups_of_one_name_and_members_are_one_whatever_their_number(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4, groups={1: ("pair", (0, 1)), 2: ("pair", (2, 3))})
    job.ranks[0].call(Op.ALL_REDUCE, 1.0, group=1)
    job.ranks[3].call(Op.BARRIER, 1.0, group=2)
    view = read_records(job.write(tmp_path / "run")).view()
    assert [(group.name, group.members) for group in view.groups] == [
        ("pair", (0, 1)), ("pair", (2, 3)), ("world", (0, 1, 2, 3))
    ]  # fmt: skip
    assert [set(view.ranks[rank].entered) for rank in (0, 3)] == [{Channel(0)}, {Channel(1)}]


def test_a_barrier_that_was_called_long_ago_is_found_behind_many_operations(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=2, groups={1: ("rare", (0, 1))})
    for rank in job.ranks:
        rank.call(Op.BARRIER, 0.1, 0.2, group=1)
        for number in range(20_000):
            rank.call(Op.ALL_REDUCE, 1.0 + number * 1e-3, 1.0 + number * 1e-3 + 1e-4)
    job.ranks[0].call(Op.BARRIER, 30.0, group=1)
    view = read_records(job.write(tmp_path / "run")).view()
    assert view.ranks[1].entered == {Channel(0): 1, Channel(1): 20_000}
    assert view.ranks[0].entered == {Channel(0): 2, Channel(1): 20_000}


def test_a_failed_operation_is_open_and_one_that_was_never_issued_was_not_entered(tmp_path: Path) -> None:
    job = hung_job(missing=2)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.open_rows.clear()
            rank.sequences[0] -= 1
            rank.call(Op.ALL_REDUCE, 2.0, 32.0, step=20, has_failed=True)
    job.ranks[2].call(Op.ALL_REDUCE, 2.0, 2.001, step=20, has_failed=True)
    view = read_records(job.write(tmp_path / "run")).view()
    assert [one.entered[WORLD] for one in view.ranks.values()] == [21, 21, 20, 21]
    assert [one.calls[-1].is_open for one in view.ranks.values()] == [True, True, False, True]


def test_what_ended_a_hang_does_not_hide_it(tmp_path: Path) -> None:
    """Rank 2 is stopped inside, and finishes the operation when the others have been killed and it is woken up."""
    job = hung_job(missing=2)
    for rank in job.ranks:
        rank.seen_s = 40.0
    job.ranks[2].call(Op.ALL_REDUCE, 2.0, 41.0, step=20)
    job.ranks[2].seen_s = 42.0
    records = read_records(job.write(tmp_path / "run"))
    assert records.moments_ns() == [ns(40.0)]
    assert records.view(ns(40.0)).ranks[2].calls[-1].is_open
    assert not records.view().ranks[2].calls[-1].is_open


@each_case("order_s", [-0.01, 0.01])
@each_case("wakes_s", [None, 39.5])
def test_a_rank_that_was_stopped_shows_no_sign_of_life_whoever_is_ended_first(
    tmp_path: Path, order_s: float, wakes_s: float | None
) -> None:
    """A queue that cancels a job wakes its ranks up, and signals them host by host, in any order."""
    job = hung_job(missing=2)
    for rank in job.ranks:
        rank.ends(40.0 if rank.rank != 2 else 40.0 + order_s, EventKind.SIGNAL, 15, step=20)
        rank.is_closed = False
    job.ranks[2].flush_until_s, job.ranks[2].wakes_s = 3.0, wakes_s
    found = hang_in(read_records(job.write(tmp_path / "run")), hang_s=5.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits, found.job.ranks[2].end) == (HangKind.GONE, (2,), "")
    assert found.job.now_ns - (found.job.ranks[2].seen_ns or 0) > 36 * SECOND


def test_a_rank_that_was_ended_long_before_the_others_has_ended(tmp_path: Path) -> None:
    job = hung_job(missing=2)
    for rank in job.ranks:
        rank.ends(40.0 if rank.rank != 2 else 30.0, EventKind.SIGNAL, 15, step=20)
        rank.is_closed = False
    found = hang_in(read_records(job.write(tmp_path / "run")), hang_s=5.0)
    assert found is not None
    assert (found.hang.culprits, found.job.ranks[2].end) == ((2,), "SIGTERM")


@each_case(("last", "text"), [("interrupted", b"KeyboardInterrupt"), ("lost", b"RuntimeError")])
def test_a_hang_that_a_user_interrupts_is_that_of_before(tmp_path: Path, last: str, text: bytes) -> None:
    """Rank 2 notices Ctrl-C at once; the others stand in an operation until it fails because rank 2 has gone."""
    job = hung_job(missing=2)
    for rank in job.ranks:
        if rank.rank == 2:
            rank.ends(30.0, EventKind.EXCEPTION, text=b"KeyboardInterrupt", step=20)
            for part, where in ((ErrorPart.FRAMES, b"/a/train.py:9 in <module>\n/a/train.py:5 in prepare"),):
                rank.rows.append(("event", (rank.ns(30.0), 20, EventKind.ERROR_TEXT, part, where)))
        else:
            rank.open_rows.clear()
            rank.sequences[0] -= 1
            rank.call(Op.ALL_REDUCE, 2.0, 35.0, step=20, has_failed=True)
            rank.ends(35.0, EventKind.EXCEPTION, text=text, step=20)
    found = hang_in(read_records(job.write(tmp_path / "run")), hang_s=5.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits) == (HangKind.OWN_WORK, (2,)), last
    view = found.job.ranks[2]
    assert (view.end, view.stack[-1:]) == ("", ("/a/train.py:5 in prepare",))


def test_a_rank_interrupted_alone_is_what_the_others_wait_for(tmp_path: Path) -> None:
    job = hung_job(missing=2)
    job.ranks[2].ends(2.5, EventKind.EXCEPTION, text=b"KeyboardInterrupt", step=20)
    found = hang_in(read_records(job.write(tmp_path / "run")), hang_s=5.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits) == (HangKind.GONE, (2,))
    assert found.job.ranks[2].end == "KeyboardInterrupt"


def test_a_hang_is_looked_at_before_its_operations_run_out_of_time(tmp_path: Path) -> None:
    job = hung_job(missing=2)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.open_rows.clear()
            rank.sequences[0] -= 1
            rank.call(Op.ALL_REDUCE, 2.0, 32.0 + rank.rank, step=20, has_failed=True)
    job.ranks[2].call(Op.ALL_REDUCE, 50.0, step=20)
    records = read_records(job.write(tmp_path / "run"))
    at_ns = records.moments_ns()[0]
    assert ns(31.9) < at_ns < ns(32.0)
    assert records.view(at_ns).ranks[2].entered[WORLD] == 20


@each_case(
    ("past", "now", "doing"),
    [
        ((), (), Doing.LOADING),
        ((), (Phase.DATA,), Doing.COMPUTING),
        ((Phase.CHECKPOINT,), (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), Doing.SAVING),
        ((Phase.EVAL,), (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), Doing.EVALUATING),
    ],
)
def test_what_a_rank_does_follows_from_its_earlier_steps(
    tmp_path: Path, past: tuple[Phase, ...], now: tuple[Phase, ...], doing: Doing
) -> None:
    job = WrittenJob(num_ranks=1)
    usual = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    for step in range(20):
        phases = [*usual, *(past if step % 5 == 0 else ())]
        job.ranks[0].step(step, step * 0.1, [(phase, 0.01) for phase in phases])
    job.ranks[0].step(20, 2.0, [(phase, 0.01) for phase in now], is_over=False)
    assert read_records(job.write(tmp_path / "run")).view().ranks[0].doing is doing


def test_a_rank_that_has_finished_nothing_starts(tmp_path: Path) -> None:
    view = read_records(WrittenJob(num_ranks=2).write(tmp_path / "run")).view()
    assert {one.doing for one in view.ranks.values()} == {Doing.STARTING}
    assert view.usual_step_ns is None


def test_garbage_collection_at_any_place_of_a_step_changes_nothing_about_what_comes_next(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=1)
    for step in range(20):
        phases = [Phase.DATA, *([Phase.GC] if step % 3 == 0 else []), Phase.FORWARD, Phase.BACKWARD]
        job.ranks[0].step(step, step * 0.1, [(phase, 0.01) for phase in phases])
    job.ranks[0].step(20, 2.0, [(phase, 0.01) for phase in (Phase.DATA, Phase.FORWARD, Phase.GC)], is_over=False)
    assert read_records(job.write(tmp_path / "run")).view().ranks[0].doing is Doing.COMPUTING


def broken_job(
    end: tuple[EventKind, int] = (EventKind.SIGNAL, 6),
    op: Op = Op.BARRIER,
    *,
    called_s: tuple[float, float] = (2.0, 2.0),
) -> WrittenJob:
    """Return a job of which rank 2 calls another operation than the others, which ends it, and with it the job.

    Args:
        end: how rank 2 ends, at second 2.4.
        op: what it calls.
        called_s: when ranks 0 and 1 call.
    """
    job = WrittenJob(num_ranks=3)
    job.all_steps(20)
    for rank, at_s in zip(job.ranks, called_s, strict=False):
        rank.call(Op.ALL_REDUCE, at_s, 2.5, step=20, has_failed=True)
        rank.ends(2.6, EventKind.EXCEPTION, 0, b"RuntimeError", step=20)
    job.ranks[2].call(op, 2.0, step=20)
    job.ranks[2].ends(2.4, *end, step=20)
    job.ranks[2].is_closed = False
    job.ranks[2].rows.append(
        ("event", (job.ranks[2].ns(2.4), 20, EventKind.ERROR_TEXT, ErrorPart.PLACE, b"/x/train.py:12 in save"))
    )
    return job


@each_case("called_s", [(2.0, 2.0), (2.0, 2.45)])  # the other rank calls only after the abort
def test_what_gloo_aborts_a_rank_for_is_named_however_short_it_lasted(
    tmp_path: Path, called_s: tuple[float, float]
) -> None:
    found = hang_in(read_records(broken_job(called_s=called_s).write(tmp_path / "run")), hang_s=5.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits, found.hang.waiting) == (HangKind.MISMATCH, (2,), (0, 1))
    assert found.job.ranks[2].calls[-1].where == "train.py:12 in save"


@each_case(
    "job",
    [
        broken_job(end=(EventKind.SIGNAL, 15)),  # others end a rank that another has ended first
        broken_job(op=Op.ALL_REDUCE),  # it aborts for another reason
    ],
)
def test_other_ends_within_an_operation_are_no_mismatch(tmp_path: Path, job: WrittenJob) -> None:
    assert hang_in(read_records(job.write(tmp_path / "run")), hang_s=5.0) is None


@each_case(
    ("num_entered", "stack"),
    [(20, ("/x/train.py:12 in load",)), (21, ())],  # with 21, it has gone on since
)
def test_a_rank_that_answers_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_entered: int, stack: tuple[str, ...]
) -> None:
    records = read_records(hung_job(missing=2).write(tmp_path / "run"))
    found = hang_in(records, hang_s=5.0)
    assert found is not None
    asked: list[int] = []

    def ask(attempt: Attempt, ranks: Iterable[int]) -> dict[int, Notice]:
        asked.extend(ranks)
        return {2: answer}

    answer = Notice(
        rank=2,
        host="n2",
        pid=1,
        host_key="k",
        time_ns=ns(70.0),
        unix_ns=0,
        first_time_ns=ns(70.0),
        num_looks=1,
        step=20,
        step_age_ns=68 * SECOND,
        limit_ns=SECOND,
        usual_step_ns=SECOND,
        is_first_step=False,
        doing=Doing.LOADING,
        doing_since_ns=ns(3.0),
        entered=(NoticedCount(group="world", source=-1, destination=-1, num_entered=num_entered),),
        stacks=(ThreadStack(name="MainThread", is_training=True, frames=("/x/train.py:12 in load",)),),
    )
    monkeypatch.setattr(from_traces, "ask_ranks", ask)
    view = with_answers(found, records, RunDirectory(tmp_path / "run").attempts()[-1]).job.ranks[2]
    assert (asked, view.stack) == ([2, 0], stack)
    assert (view.doing, view.is_guess) == ((Doing.LOADING, False) if stack else (Doing.LOADING, True))
