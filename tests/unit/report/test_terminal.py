from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import SyntheticRun

from hpcpace.report.analysis import Selection, summarize
from hpcpace.report.layout import milliseconds, printable, rank_list
from hpcpace.report.terminal import print_report
from hpcpace.trace.reader import read_attempt

EXPECTED = Path(__file__).parents[2] / "data" / "report-slow-rank.txt"


def printed(tmp_path, width):
    """Return the report of a run in which rank 2 is slow, with what varies from version to version made constant."""
    run = SyntheticRun(pipeline=2, slow={2: 1.3}, noise=0.05, hosts=("n0", "n1")).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    summary = summarize(run, attempt, found.traces, found.problems, Selection())
    tracing = dataclasses.replace(
        summary.tracing, size_bytes=12_345, overhead_share=0.0012, num_events=400, num_dropped=0
    )
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None)
    print_report(console, dataclasses.replace(summary, run="runs/demo", tracing=tracing))
    return stream.getvalue()


def test_the_whole_report_is_as_it_was(tmp_path):
    """After a wanted change: write `printed(path, 100)` to the file and read the difference."""
    assert printed(tmp_path, 100) == EXPECTED.read_text()


def test_nothing_is_cut_at_80_columns(tmp_path):
    text = printed(tmp_path, 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((0, 1, 2), "ranks 0-2"), ((0, 2, 3, 7), "ranks 0, 2-3, 7"), ((), "ranks ")],
)
def test_ranks_are_listed_as_runs(ranks, text):
    assert rank_list(ranks) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [("node-1", "node-1"), ("\x1b[2J", "\\x1b[2J"), ("a\nb", "a\\nb"), ("\u202e", "\\u202e"), ("é", "é")],
)
def test_what_could_steer_a_terminal_is_escaped(text, safe):
    assert printable(text) == safe


@pytest.mark.parametrize(("time_ns", "text"), [(0, "0"), (12_345, "0.01"), (9_990_000, "9.99"), (123_456_789, "123")])
def test_milliseconds_are_short(time_ns, text):
    assert milliseconds(time_ns) == text
