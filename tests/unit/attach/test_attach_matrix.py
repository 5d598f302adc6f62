"""The matrix of attaching: its judge sees what is wrong, and its status promises no more than was found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from experiments.attach.__main__ import status
from experiments.attach.judge import Judgement, covered_ns, judge_fault, judge_runs, profiled_phases, typical_difference
from experiments.attach.rows import FAULTS, ROWS
from experiments.attach.runs import CheckoutError, Ran, lay_out
from hpcpace.trace.schema import Phase

_ROW = ROWS[0]
_GOOD = Judgement(steps="4 of 4", samples="8 of 8", faults=dict.fromkeys(FAULTS, (True, ""))).to_json()


def _event(name: str, begin_us: float, taken_us: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin_us, "dur": taken_us}


def test_phases_of_the_profiler_are_their_outermost_events(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    events = [
        _event("nn.Module: Model_0", 0, 10),
        _event("nn.Module: Linear_0", 2, 5),
        _event("torch/autograd/__init__.py(353): backward", 20, 30),
        _event("nn.Module: Linear_0", 25, 5),
        _event("torch/optim/adamw.py(12): step", 60, 7),
        _event("torch/optim/optimizer.py(500): step", 58, 20),
        _event("torch/utils/data/dataloader.py(700): __next__", 90, 4),
        {"ph": "M", "name": "nn.Module: Model_0"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert profiled_phases(path) == {
        Phase.FORWARD: [(0, 10_000)],
        Phase.BACKWARD: [(20_000, 50_000)],
        Phase.OPTIMIZER: [(60_000, 67_000)],
        Phase.DATA: [(90_000, 94_000)],
    }


@each_case(("spans", "covered"), [([], 0), ([(0, 5), (3, 8)], 8), ([(0, 5), (5, 8)], 8), ([(4, 6), (0, 2)], 4)])
def test_time_that_spans_cover(spans: list[tuple[int, int]], covered: int) -> None:
    assert covered_ns(spans) == covered


@each_case(
    ("ours", "share"),
    [
        ([(0, 10), (20, 30), (40, 50)], 0.0),
        ([(0, 11), (20, 31), (40, 51)], 0.1),
        ([(0, 10), (20, 30), (40, 90)], 0.0),  # lost its core once
        ([(0, 10), (20, 30)], -1 / 3),  # missed one
        ([(0, 10), (20, 30), (40, 50), (60, 75)], 0.5),  # saw one too many
        ([], -1.0),
    ],
)
def test_intervals_are_compared_in_pairs(ours: list[tuple[int, int]], share: float) -> None:
    theirs = [(0, 10), (20, 30), (40, 50)]
    assert typical_difference(_in_ms(ours), _in_ms(theirs)) == pytest.approx(share)


def test_intervals_that_the_profiler_itself_fills_do_not_count() -> None:
    ours, theirs = [(0, 10), (20, 20.1), (40, 40.1)], [(0, 10), (20, 20.2), (40, 40.2)]
    assert typical_difference(_in_ms(ours), _in_ms(theirs)) == 0.0


def _in_ms(spans: Iterable[tuple[float, float]]) -> list[tuple[int, int]]:
    return [(round(begin * 1e6), round(end * 1e6)) for begin, end in spans]


def _ran(loss: str = "0x1p0", code: int = 0, stderr: str = "") -> Ran:
    step = {"loss": loss, "samples": 8, "end_ns": 1}
    witnesses = {rank: {"rank": rank, "steps": [step], "profile": {}} for rank in range(4)}
    return Ran(folder=Path("nowhere"), code=code, stdout="", stderr=stderr, witnesses=witnesses)


@each_case(
    ("traced", "problem"),
    [
        (_ran(loss="0x1p1"), "losses differ"),
        (_ran(code=1), "exit code 1, 0 without tracing"),
        (_ran(stderr="Traceback\n"), "stderr has 1 line more, first: Traceback"),
        (_ran(), "0 of 4 ranks have a trace"),
    ],
)
def test_what_differs_is_a_problem(traced: Ran, problem: str) -> None:
    assert problem in judge_runs(_ROW, _ran(), traced).problems


def test_our_own_lines_and_numbers_are_no_difference() -> None:
    before = _ran(stderr="took 3.5 s\nran plain/progr ...\nsrun python /r/plain/m.py p ...\n")
    after = _ran(stderr="took 4.5 s\nran plain/prog ...\nsrun python /r/traced/m.py ...\nhpcpace: recorded 4 ranks\n")
    problems = judge_runs(_ROW, before, after).problems
    assert not any(problem.startswith("stderr") for problem in problems)


def _summary(headline: str, kind: str, name: str) -> dict[str, Any]:
    return {"verdict": {"headline": headline, "why": [], "culprits": [{"kind": kind, "id": name, "aliases": []}]}}


@each_case(
    ("summary", "is_right"),
    [
        (_summary("data loading of rank 2 is slow", "rank", "2"), True),
        (_summary("data loading of rank 1 is slow", "rank", "1"), False),
        (_summary("rank 2 computes longer", "rank", "2"), False),
        (_summary("rank 2 is slow: cannot tell which stage, data loading or another", "rank", "2"), False),
        (None, False),
    ],
)
def test_a_fault_is_found_if_rank_and_stage_are_named(summary: dict[str, Any] | None, is_right: bool) -> None:
    assert judge_fault(_ROW, "loader", summary)[0] is is_right


def test_a_row_may_load_outside_of_all_phases() -> None:
    summary = _summary("rank 2 costs 20 % of the step time by something that no phase accounts for", "rank", "2")
    by_function = replace(_ROW, loader_stage=("no phase accounts for",))
    assert [judge_fault(row, "loader", summary)[0] for row in (_ROW, by_function)] == [False, True]


def test_a_fault_that_is_named_behind_another_finding_is_not_first() -> None:
    also = ["persistent straggler: rank 12 costs 9 % by data loading", "straggler: rank 2 costs 8 % by data loading"]
    verdict = {"headline": "communication-bound", "why": [], "culprits": [], "also": also}
    is_right, said = judge_fault(_ROW, "loader", {"verdict": verdict})
    assert not is_right and said == f"communication-bound; in place 3: {also[1]}"


@each_case(
    ("changes", "expected"),
    [
        ({}, "works"),
        ({"problems": ["losses differ"]}, "does not work"),
        ({"problems": ["3 of 4 ranks have a trace"]}, "does not work"),
        ({"problems": ["forward differs from the profiler's by +9%"]}, "with a note"),
        ({"faults": {}}, "with a note"),
        ({"faults": {**_GOOD["faults"], "host": (False, "")}}, "with a note"),
        ({"untested": "no clone"}, "untested"),
    ],
)
def test_a_row_works_only_if_everything_was_tried_and_right(changes: dict[str, Any], expected: str) -> None:
    assert status(_ROW, _GOOD | changes) == expected


def test_a_row_with_a_note_says_so() -> None:
    assert status(replace(_ROW, note="Not all."), _GOOD) == "with a note"
    assert status(replace(_ROW, refused="Needs CUDA."), None) == "refused"


def test_a_row_without_a_clone_is_refused(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.source is not None)
    with pytest.raises(CheckoutError, match="needs a clone of"):
        lay_out(row, None, tmp_path / "place")


def test_names_of_rows_are_unique_and_their_programs_are_there() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    programs = Path(__file__).parents[3] / "experiments" / "attach" / "programs"
    own = [row for row in ROWS if row.source is None and not row.refused]
    assert [row.name for row in own if not (programs / row.program).is_file()] == []
