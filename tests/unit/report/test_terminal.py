from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from cases import each_case
from report_sample import print_report
from rich.console import Console

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.text import alias_name, milliseconds, named_ranks, printable, rank_list
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.incomplete import jump_line, suspect_line
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import ClockJump, Clocks, ClockSuspect, RankCores
from hpcpace.report.terminal import line, note
from hpcpace.trace.attempt_reader import read_attempt

EXPECTED = Path(__file__).parents[2] / "data" / "report-slow-rank.txt"


def printed(tmp_path, width, **changes):
    """Return the report of a run in which rank 2 is slow, with what varies from version to version made constant."""
    run = SyntheticRun(pipeline=2, slow={2: 1.3}, noise=0.05, hosts=("n0", "n1")).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    summary = analyze_traces(run, attempt, found, Selection()).summary
    tracing = dataclasses.replace(
        summary.tracing, size_bytes=12_345, overhead_share=0.0012, num_events=400, num_dropped=0
    )
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None)
    print_report(console, dataclasses.replace(summary, run="runs/demo", tracing=tracing, **changes))
    return stream.getvalue()


def test_the_whole_report_is_as_it_was(tmp_path):
    """After a wanted change: write `printed(path, 100)` to the file and read the difference."""
    assert printed(tmp_path, 100) == EXPECTED.read_text()


def test_waits_that_are_not_known_are_no_zeros_anywhere(tmp_path):
    run = SyntheticRun(missing=(3,)).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    summary = analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary
    stream = io.StringIO()
    print_report(Console(file=stream, width=100, highlight=False, color_system=None), summary)
    lines = stream.getvalue().splitlines()
    (shares,) = (text for text in lines if text.startswith("shares"))
    assert "wait or transfer 5.6 %" in shares and "exposed wait" not in shares
    assert (
        "waits are not known: operations have no comparable counterpart on every member"
        in lines[lines.index(shares) + 2]
    )
    of_rank_0 = [text.split() for text in lines if text.startswith("0 ")]
    assert [cells.count("?") for cells in of_rank_0] == [2, 4]


def test_nothing_is_cut_at_80_columns(tmp_path):
    phases = tuple((name, 544e6) for name in ("forward", "backward", "optimizer", "other", "data"))
    cores = RankCores(
        rank=1, host="n0", nice=10, num_cpus=2, waiting=0.96, work_ns=971e6, running_ns=107e6, phases=phases
    )
    text = printed(tmp_path, 80, rank_cores=(cores,))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@each_case(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((0, 1, 2), "ranks 0-2"),
        ((0, 2, 3, 7), "ranks 0, 2-3, 7"),
        ((), "ranks "),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, ... and 34 more"),
    ],
)
def test_ranks_are_listed_as_runs(ranks, text):
    assert rank_list(ranks) == text


@each_case(
    ("ranks", "text"),
    [
        ((2,), "rank 2 on n2"),
        ((0, 1, 2), "ranks 0-1 on n1, rank 2 on n2"),
        ((1, 12), "rank 1 on n1, rank 12"),
        (range(12), "ranks 0-11 on 6 hosts"),
    ],
)
def test_ranks_are_named_with_their_hosts(ranks, text):
    assert named_ranks(ranks, {rank: "" if rank == 12 else f"n{rank // 2 + 1}" for rank in range(13)}) == text


def test_one_host_is_not_repeated_with_every_rank():
    assert named_ranks((0, 1), {0: "n1", 1: "n1", 2: ""}) == "ranks 0-1"


def accused(names, num_wrong, **options):
    """Return clocks of which those named are suspects: the first is 1.5 ms ahead, the others 0.9 ms behind."""
    suspects = [
        ClockSuspect(
            node=node,
            host=name,
            ahead_ns=0 if node else 1_500_000,
            behind_ns=900_000 if node else 0,
            against=("m1", "m2"),
            num_against=options.get("num_against", 2),
        )
        for node, name in enumerate(names)
    ]
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(Clocks)), 0)
    num_suspects = options.get("num_suspects", len(names))
    return Clocks(**{**nothing, "num_wrong": num_wrong, "num_suspects": num_suspects, "suspects": tuple(suspects)})


@each_case(
    ("hosts", "size_ns", "step", "sentence"),
    [
        (("n1",), 50_000_000, 20, "the clock of n1 jumped forward by 50.0 ms in step 20: from the comparison"),
        (("n1",), -50_000_000, -1, "the clock of n1 jumped back by 50.0 ms: from"),
        (("n1", "n0"), 50_000_000, 2, "n1 or n0 jumped (n1 forward, or the other one the other way) by 50.0 ms in"),
    ],
)
def test_a_clock_that_jumped_is_one_sentence(hosts, size_ns, step, sentence):
    assert sentence in jump_line(ClockJump(hosts=hosts, size_ns=size_ns, step=step))


@each_case(
    ("clocks", "sentence"),
    [
        (
            accused(["n1"], 1),
            "the clock of n1 is wrong by at least 1.50 ms against m1 and m2 (ahead); times between n1",
        ),
        (accused(["n1"], 1, num_against=99), "against 99 others (ahead)"),
        (accused(["n1", "n2"], 1), "by at least 1.50 ms (n1 ahead); the traces do not show which one is wrong"),
        (accused(["n1", "n2"], 2), "the clocks of n1 and n2 are wrong by at least 900 us: no smaller set explains"),
        (accused(["n1", "n2", "n3"], 2), "n1, n2 and n3 contradict each other by at least 1.50 ms; at least 2 of them"),
        (accused(["n1", "n2"], 4, num_suspects=70), "the clocks of n1, n2 and 68 more contradict"),
        (accused(["\x1b[2J"], 1), "the clock of \\x1b[2J is wrong"),
    ],
)
def test_a_wrong_clock_is_one_sentence(clocks, sentence):
    told = suspect_line(clocks)
    assert sentence in told
    assert told.endswith("cannot be trusted")


def test_right_clocks_are_not_mentioned():
    assert suspect_line(accused([], 0)) == ""


@each_case(
    ("text", "safe"),
    [("node-1", "node-1"), ("\x1b[2J", "\\x1b[2J"), ("a\nb", "a\\nb"), ("\u202e", "\\u202e"), ("é", "é")],
)
def test_what_could_steer_a_terminal_is_escaped(text, safe):
    assert printable(text) == safe


@each_case(("time_ns", "text"), [(0, "0"), (12_345, "0.01"), (9_990_000, "9.99"), (123_456_789, "123")])
def test_milliseconds_are_short(time_ns, text):
    assert milliseconds(time_ns) == text


def shown(print_, width=100):
    stream = io.StringIO()
    print_(Console(file=stream, width=width, highlight=False, color_system=None))
    return stream.getvalue()


@each_case("width", [80, 100])
@each_case("num_hosts", [1, 4, 40])
def test_a_line_for_the_job_script_stays_one_line(width, num_hosts):
    directive = f"#SBATCH --exclude=gpu[{','.join(f'{3 * number:04d}' for number in range(num_hosts))}]"
    text = shown(lambda console: line(console, "Next", f"look at clocks, or leave it out: {directive}"), width)
    assert sum(directive in one for one in text.splitlines()) == 1
    assert [len(one) > width for one in text.splitlines() if directive not in one] in ([], [False])


def test_two_lines_for_the_job_script_stay_apart():
    text = shown(lambda console: note(console, "#SBATCH --switches=1, or #SBATCH --exclude=n[1,3] now"))
    assert text == "- #SBATCH --switches=1, or #SBATCH --exclude=n[1,3] now\n"


def test_a_number_is_not_parted_from_its_unit():
    text = shown(lambda console: note(console, "x" * 24 + " 3.2 % of 17 ms"), 30)
    assert text.splitlines() == ["- " + "x" * 24, "  3.2 % of 17 ms"]


@each_case(
    ("alias", "name"),
    [
        ("rank 5", "rank 5"),
        ("leaf leaf1", "leaf switch leaf1"),
        ("link leaf2 uplink", "link leaf2 uplink"),
        ("slot pp2", "pipeline stage 2"),
        ("slot local1", "local rank 1 of every node"),
        ("node \x1b[2J", "node \\x1b[2J"),
        ("odd", "odd"),
    ],
)
def test_places_have_the_names_of_the_field(alias, name):
    assert alias_name(alias) == name
