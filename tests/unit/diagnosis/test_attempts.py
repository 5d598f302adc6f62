from __future__ import annotations

from dataclasses import replace

import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.figures.overview import attempt_rows
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import AttemptRow
from hpcpace.report.sections.phases import attempts_differ, ended
from hpcpace.trace.attempt_reader import read_attempt


def rows_of(run, number=-1, selection=None):
    attempt = run.attempts()[number]
    return attempt_rows(run, attempt, read_attempt(attempt).traces, selection or Selection())


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A run of two attempts: 4 ranks that hang, then 2 ranks on one of the hosts and another one."""
    path = tmp_path_factory.mktemp("runs") / "run"
    SyntheticRun(num_steps=12, hosts=("n1", "n2"), slow={3: 1.5}, hangs=True).write(path)
    return SyntheticRun(num_ranks=2, num_steps=9, hosts=("n1", "n3")).write(path)


def test_one_attempt_alone_is_no_table(tmp_path):
    assert rows_of(SyntheticRun(num_steps=3).write(tmp_path / "run")) == ()


@pytest.mark.parametrize("number", [0, 1])
def test_every_attempt_has_its_row_whichever_is_reported(restarted, number):
    first, last = rows_of(restarted, number)
    assert (first.attempt, first.world_size, first.hosts, first.num_steps) == (0, 4, ("n1", "n2"), 10)
    assert (last.attempt, last.world_size, last.hosts, last.num_steps) == (1, 2, ("n1", "n3"), 7)
    assert (first.num_not_closed, first.num_inside, last.num_not_closed) == (4, 3, 0)
    # 1 data, 45 forward and backward of the slow rank, 2 transfer, 3 optimizer; the second one has 30 in place of 45.
    assert (first.p50_ns, last.p50_ns) == (51e6, 36e6)


def test_the_steps_asked_for_are_those_of_every_attempt(restarted):
    first, last = rows_of(restarted, selection=Selection(first=8))
    assert [(row.num_steps, row.first, row.last) for row in (first, last)] == [(4, 8, 11), (1, 8, 8)]
    empty = rows_of(restarted, selection=Selection(first=10))[1]
    assert (empty.num_steps, empty.first, empty.p50_ns) == (0, None, None)


def test_an_attempt_that_cannot_be_read_is_a_row(tmp_path):
    run = SyntheticRun(num_steps=3).write(tmp_path / "run")
    SyntheticRun(num_steps=3).write(tmp_path / "run")
    for file in run.attempt(0).trace_dir.iterdir():
        file.write_bytes(b"no trace")
    first = rows_of(run)[0]
    assert (first.world_size, first.num_ranks, ended(first)) == (0, 0, "no trace can be read")


ROW = AttemptRow(
    attempt=0,
    world_size=4,
    num_ranks=4,
    hosts=("n1", "n2"),
    mesh="dp=4",
    num_steps=10,
    first=2,
    last=11,
    p50_ns=100.0,
    num_not_closed=0,
    num_inside=0,
)


@each_case(
    ("changes", "sentence"),
    [
        ({}, "the same ranks on the same hosts; median step 0.0 % shorter"),
        ({"p50_ns": 112.0}, "the same ranks on the same hosts; median step 12.0 % longer"),
        ({"hosts": ("n1", "n3")}, "with n3; without n2; median step 0.0 % shorter"),
        ({"hosts": ("\x1b[2J",)}, "with \\x1b[2J; without n1 and n2"),
        ({"world_size": 2, "mesh": "dp=2"}, "2 ranks instead of 4; mesh dp=2 instead of dp=4"),
        ({"p50_ns": None}, "no steps to compare"),
        ({"num_ranks": 0}, "without traces there is nothing to compare"),
    ],
)
def test_where_attempts_differ_is_one_line(changes, sentence):
    line = attempts_differ((ROW, replace(ROW, attempt=1, **changes)), 1)
    assert line.startswith("attempt 1 compared with 0: ")
    assert sentence in line


def test_the_first_attempt_is_held_against_the_second():
    assert attempts_differ((ROW, replace(ROW, attempt=1)), 0).startswith("attempt 0 compared with 1: ")


@each_case(
    ("changes", "how"),
    [
        ({}, "all traces closed"),
        ({"num_not_closed": 1}, "1 of 4 traces not closed"),
        ({"num_not_closed": 4, "num_inside": 3}, "4 of 4 traces not closed, 3 inside an operation"),
        ({"num_ranks": 3}, "1 without a trace"),
    ],
)
def test_how_an_attempt_ended_is_said(changes, how):
    assert ended(replace(ROW, **changes)) == how
