"""What ended a run is told first: who came first on the common clock, how, in which step, and who waited then."""

from __future__ import annotations

from dataclasses import replace

from cases import each_case

from experiments.synthetic_run import MS, Ending, SyntheticRun
from hpcpace.diagnosis.analyze import analyze_traces, examine
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import EndKind
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import ErrorCode, ErrorPart, EventKind

CLOCKS = {"offsets_ns": {1: 3_600_000 * MS, 2: -4_000 * MS}, "hosts": ("n0", "n1", "n2", "n3")}


def raised(rank, after_ns, *, code=ErrorCode.OTHER, text=b"RuntimeError", failed_ns=None):
    return Ending(rank=rank, after_ns=after_ns, kind=EventKind.EXCEPTION, code=code, text=text, failed_ns=failed_ns)


def lost(rank, after_ns, failed_ns):
    return raised(rank, after_ns, code=ErrorCode.DISCONNECTED, failed_ns=failed_ns)


def timed_out(rank, after_ns, failed_ns):
    return raised(rank, after_ns, code=ErrorCode.TIMEOUT, failed_ns=failed_ns)


def signalled(rank, after_ns):
    return Ending(rank=rank, after_ns=after_ns, kind=EventKind.SIGNAL, code=15)


def interrupted(rank, after_ns, failed_ns=None):
    return raised(rank, after_ns, text=b"KeyboardInterrupt", failed_ns=failed_ns)


def exited(rank, after_ns, code, failed_ns=None):
    return Ending(rank=rank, after_ns=after_ns, kind=EventKind.EXIT, code=code, failed_ns=failed_ns)


def killed(rank, after_ns):
    return Ending(rank=rank, after_ns=after_ns)


TEN_NS = 1_795_946_400 * 10**9
"""2026-11-29 10:00:00 UTC."""
VICTIMS = (lost(0, 700 * MS, 690 * MS), lost(2, 710 * MS, 700 * MS), signalled(3, 900 * MS))
WAITED = "; ranks 0, 2 then waited in all_reduce"


def summary_of(tmp_path, *endings, **options):
    run = SyntheticRun(endings=endings, **options).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    return analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary


@each_case(
    ("first", "headline"),
    [
        (raised(1, 5 * MS, text=b"ValueError"), "rank 1 raised ValueError in step 40"),
        (exited(1, 5 * MS, 3), "rank 1 exited with code 3 in step 40"),
        (exited(1, 5 * MS, 0), "rank 1 exited with code 0 in step 40"),
        (signalled(1, 5 * MS), "rank 1 was ended by SIGTERM in step 40"),
        (killed(1, 5 * MS), "rank 1 ended without a word in step 40: killed, crashed, or os._exit"),
    ],
)
def test_the_rank_that_ended_first_heads_the_report(tmp_path, first, headline):
    summary = summary_of(tmp_path, first, *VICTIMS)
    assert summary.verdict.headline == headline + WAITED
    assert (summary.verdict.mode, [culprit.id for culprit in summary.verdict.culprits[:1]]) == ("ended early", ["1"])
    assert (summary.end.ranks, summary.end.step, summary.end.waiting) == ((1,), 40, (0, 2))
    assert [end.rank for end in summary.end.ends] == [1, 0, 2, 3]


def said(rank, after_ns, message, place=b"/home/u/train.py:41 in main", frames=b"/home/u/train.py:9 in <module>"):
    parts = ((ErrorPart.MESSAGE, message), (ErrorPart.PLACE, place), (ErrorPart.FRAMES, frames + b"\n" + place))
    return [
        Ending(rank=rank, after_ns=after_ns, kind=EventKind.ERROR_TEXT, code=part, text=text[first : first + 240])
        for part, text in parts
        for first in range(0, len(text), 240)
    ]


@each_case(
    ("message", "headline"),
    [
        (b"bad batch 7", "rank 1 raised ValueError in step 40 at train.py:41: bad batch 7"),
        (b"\x1b[2Jcl\xffear" + b"x" * 900, "rank 1 raised ValueError in step 40 at train.py:41: \\x1b[2Jcl"),
        (b"", "rank 1 raised ValueError in step 40 at train.py:41"),
    ],
)
def test_what_an_error_said_is_told_with_its_place(tmp_path, message, headline):
    texts = said(1, 5 * MS, message)
    summary = summary_of(tmp_path, raised(1, 5 * MS, text=b"ValueError"), *texts, *VICTIMS)
    assert summary.verdict.headline.startswith(headline) and summary.verdict.headline.endswith(WAITED)
    assert len(summary.verdict.headline) < 300
    assert summary.end.ends[0].error.message == message.decode(errors="replace")
    assert summary.verdict.why[-1] == "the error of rank 1 came through train.py:9 in <module>, train.py:41 in main"


def test_a_long_message_is_told_with_its_last_line(tmp_path):
    texts = said(1, 5 * MS, b"Caught ValueError in DataLoader worker process 0.\nOriginal ...\nValueError: bad\n")
    summary = summary_of(tmp_path, raised(1, 5 * MS, text=b"ValueError"), *texts, *VICTIMS)
    assert "the message of rank 1 ends: ValueError: bad" in summary.verdict.why


def noted(rank, after_ns, part, text):
    return Ending(rank=rank, after_ns=after_ns, kind=EventKind.ERROR_TEXT, code=part, text=text)


def test_the_last_lines_of_stderr_are_told_with_who_may_have_written_them(tmp_path):
    lines = b"first\nCUDA error: \x1b[2Jassert\nsecond last\nlast"
    for number, (name, first) in enumerate(
        ((b"other", "last on stderr of rank 1: "), (b"same", "last on stderr of rank 1, in a file of 2 ranks: "))
    ):
        folder = tmp_path / str(number)
        files = [noted(rank, -900 * MS, ErrorPart.STDERR_FILE, text) for rank, text in ((0, b"same"), (1, name))]
        texts = [noted(1, 5 * MS, ErrorPart.STDERR, lines)]
        summary = summary_of(folder, raised(1, 5 * MS, text=b"ValueError"), *texts, *files, *VICTIMS)
        assert summary.verdict.why[-3:] == (f"{first}CUDA error: \\x1b[2Jassert", "then: second last", "then: last")
        error = summary.end.ends[0].error
        assert (error.stderr[0], error.stderr[-1], error.num_sharing_stderr) == ("first", "last", number + 1)


def test_who_was_first_is_judged_on_the_common_clock(tmp_path):
    summary = summary_of(tmp_path, raised(1, 5 * MS), *VICTIMS, **CLOCKS)
    assert summary.end.ranks == (1,)
    assert summary.verdict.headline.startswith(
        "rank 1 on n1 raised RuntimeError in step 40; rank 0 on n0, rank 2 on n2"
    )


def test_an_operation_that_ran_out_of_time_is_told_with_who_had_not_entered_it(tmp_path):
    late = [timed_out(rank, 4_000 * MS + rank * MS, 3_000 * MS) for rank in (0, 2, 3)]
    summary = summary_of(tmp_path, *late, signalled(1, 6_000 * MS))
    assert summary.verdict.headline == (
        "all_reduce failed in step 40 on ranks 0, 2-3 after 3.00 s; rank 1 had not entered it"
    )
    assert (summary.end.kind, summary.end.what, summary.end.ranks) == (EndKind.FAILURE, "all_reduce", (1,))


def test_a_timeout_longer_than_a_hang_is_a_hang(tmp_path):
    late = [timed_out(rank, 61_000 * MS, 60_000 * MS) for rank in (0, 2, 3)]
    summary = summary_of(tmp_path, *late, signalled(1, 62_000 * MS))
    assert (summary.verdict.mode, [culprit.id for culprit in summary.verdict.culprits]) == ("hang", ["1"])
    assert summary.verdict.findings[0].numbers["failed"] == 3


def test_a_rank_that_came_after_the_timeout_of_the_others_is_to_blame(tmp_path):
    late = [timed_out(rank, 61_000 * MS, 60_000 * MS) for rank in (0, 2, 3)]
    summary = summary_of(tmp_path, *late, lost(1, 62_000 * MS, 500 * MS))
    assert (summary.verdict.mode, [culprit.id for culprit in summary.verdict.culprits]) == ("hang", ["1"])
    assert summary.verdict.why[0] == "rank 1 entered it only when it had failed on the others"


def test_a_rank_whose_own_call_fails_at_once_has_raised(tmp_path):
    summary = summary_of(tmp_path, raised(1, 5 * MS, text=b"ValueError", failed_ns=MS), *VICTIMS)
    assert summary.verdict.headline == "rank 1 raised ValueError in step 40" + WAITED


def test_ranks_that_a_launcher_kills_for_another_one_are_not_first(tmp_path):
    # Their last flush was before the exception, as it is up to a second before their end.
    summary = summary_of(tmp_path, raised(1, 800 * MS), *(killed(rank, 100 * MS) for rank in (0, 2, 3)))
    assert summary.verdict.headline == "rank 1 raised RuntimeError in step 40"


def test_a_rank_killed_after_the_others_ran_out_of_time_had_not_entered(tmp_path):
    late = [timed_out(rank, 4_000 * MS, 3_000 * MS) for rank in (0, 2, 3)]
    summary = summary_of(tmp_path, *late, killed(1, 3_500 * MS))
    assert summary.end.kind is EndKind.FAILURE
    assert summary.end.ranks == (1,)


def test_all_ranks_that_raise_in_one_step_are_told_together(tmp_path):
    summary = summary_of(tmp_path, *(raised(rank, rank * MS, text=b"KeyError") for rank in range(4)))
    assert summary.verdict.headline == "all 4 ranks raised KeyError in step 40"


def test_a_signal_to_all_ranks_is_no_fault_but_told(tmp_path):
    summary = summary_of(tmp_path, *(signalled(rank, rank * MS) for rank in range(4)))
    assert summary.verdict.mode == "healthy"
    assert summary.verdict.headline.endswith("all 4 ranks were ended by SIGTERM in step 40")
    assert summary.end.is_everywhere


@each_case("last", [interrupted(3, 900 * MS), interrupted(3, 900 * MS, failed_ns=800 * MS), signalled(3, 900 * MS)])
def test_ctrl_c_is_a_signal_and_no_error_of_the_rank_that_noticed_it_first(tmp_path, last):
    summary = summary_of(tmp_path, *(interrupted(rank, (3 - rank) * MS) for rank in range(3)), last)
    assert summary.verdict.mode == "healthy"
    assert (summary.end.kind, summary.end.what, summary.end.is_everywhere) == (EndKind.SIGNAL, "SIGINT", True)


def test_ranks_that_notice_ctrl_c_when_their_operation_fails_were_ended_by_it_as_well(tmp_path):
    late = (interrupted(rank, 4500 * MS, failed_ns=4400 * MS) for rank in (0, 2, 3))
    summary = summary_of(tmp_path, interrupted(1, 5 * MS), *late)
    assert (summary.end.ranks, summary.end.waiting) == ((0, 1, 2, 3), ())
    assert summary.verdict.headline.endswith("all 4 ranks were ended by SIGINT in step 40")


def test_a_rank_interrupted_alone_was_ended_by_a_signal(tmp_path):
    summary = summary_of(tmp_path, interrupted(1, 5 * MS), *VICTIMS)
    assert summary.verdict.headline == f"rank 1 was ended by SIGINT in step 40{WAITED}"


@each_case(
    "endings",
    [
        (),
        tuple(exited(rank, rank * MS, 0) for rank in range(4)),
        tuple(killed(rank, rank * MS) for rank in range(4)),
        (killed(3, MS),),
    ],
)
def test_a_run_that_ended_in_order_or_as_a_whole_has_no_first_end(tmp_path, endings):
    summary = summary_of(tmp_path, *endings)
    assert summary.end is None
    assert summary.verdict.mode == "healthy"


def test_what_the_others_waited_in_the_end_is_in_no_figure(tmp_path):
    (tmp_path / "clean").mkdir()
    clean, ended = summary_of(tmp_path / "clean"), summary_of(tmp_path, raised(1, 5 * MS), *VICTIMS)
    assert ended.shares == clean.shares
    assert [kind.num_rows for kind in ended.kinds] == [kind.num_rows for kind in clean.kinds]
    assert [finding.mode for finding in ended.verdict.findings] == ["ended early"]


def test_a_run_that_ends_in_its_first_step_says_why(tmp_path):
    run = SyntheticRun(num_steps=0, endings=(raised(1, 5 * MS), *VICTIMS)).write(tmp_path / "run")
    verdict = examine(read_attempt(run.attempts()[-1]).traces)
    assert verdict.headline.startswith("cannot tell: rank 1 raised RuntimeError in step 0")


@each_case(
    ("endings", "first", "then"),
    [
        (
            (killed(1, 5 * MS), *(killed(rank, 57_000 * MS) for rank in (0, 2, 3))),
            "rank 1 left no word, last seen at 2026-11-29 10:00:00 UTC, 57.0 s before the last one: killed, crashed",
            "ranks 0, 2-3 left no word, last seen at 2026-11-29 10:00:00 UTC: killed, or still running",
        ),
        (
            (exited(1, 5 * MS, 3), *(killed(rank, 57_000 * MS) for rank in (0, 2, 3))),
            "rank 1 exited with code 3 in step 0",
            "rank 1 exited with code 3 at 2026-11-29 10:00:00 UTC, 57.0 s before the last one",
        ),
        (
            tuple(killed(rank, 57_000 * MS) for rank in range(4)),
            "no step that all 4 ranks have",
            "ranks 0-3 left no word, last seen at 2026-11-29 10:00:00 UTC: killed, or still running",
        ),
    ],
)
def test_of_a_run_without_a_step_it_is_said_who_ended_how_and_when(tmp_path, endings, first, then):
    run = SyntheticRun(num_steps=0, endings=endings).write(tmp_path / "run")
    found = read_attempt(run.attempts()[-1]).traces
    dated = [replace(trace, header=replace(trace.header, created_unix_ns=TEN_NS)) for trace in found]
    headline = examine(dated).headline
    assert headline.startswith(f"cannot tell: {first}")
    assert then in headline and "no step that all 4 ranks have" in headline
