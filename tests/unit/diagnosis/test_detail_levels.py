"""What a report says of steps with less than full detail: what was recorded, and otherwise that it cannot tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.errors import CannotTell
from hpcpace.diagnosis.analyze import analyze_traces, examine
from hpcpace.diagnosis.incomplete import NO_PHASES, operation_number
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.schema import NUMBER_BITS, StepFlag
from hpcpace.trace.tables import RankTrace, Table

PLAIN, UNPHASED = StepFlag.PLAIN | StepFlag.WARMUP, StepFlag.UNPHASED | StepFlag.WARMUP


def _with_detail(trace: RankTrace, marks: dict[range, StepFlag]) -> RankTrace:
    """Return a trace as it would be with less detail in some steps."""
    tables = dict(trace.tables)
    for steps, mark in marks.items():
        missing = ("phases", "collectives") if mark == PLAIN else ("phases",)
        for name in missing:
            tables[name] = tables[name].select(~np.isin(tables[name]["step"], steps))
        table = tables["steps"]
        flags = np.where(np.isin(table["step"], steps), table["flags"] | int(mark), table["flags"])
        tables["steps"] = Table({**{name: table[name] for name in table}, "flags": flags.astype(np.uint8)})
    return replace(trace, tables=tables)


def _summary(
    tmp_path: Path, marks: dict[range, StepFlag], selection: Selection | None = None, **options: Any
) -> Summary:
    run = SyntheticRun(**options).write(tmp_path / "run")
    attempt = run.last_attempt()
    found = read_attempt(attempt)
    traces = [_with_detail(trace, marks) for trace in found.traces]
    return analyze_traces(run, attempt, AttemptTraces(traces, found.problems), selection or Selection()).summary


@pytest.mark.parametrize("selection", [Selection(), Selection(include_warmup=True)], ids=["default", "warm-up"])
def test_a_slow_rank_is_found_in_the_steps_with_detail_alone(tmp_path: Path, selection: Selection) -> None:
    summary = _summary(tmp_path, {range(5): PLAIN, range(35, 40): PLAIN}, selection, slow={2: 1.3}, num_steps=40)
    assert (summary.steps.num_used, summary.steps.first, summary.steps.last) == (30, 5, 34)
    assert (summary.steps.num_plain, summary.steps.num_warmup, summary.steps.num_unphased) == (10, 0, 0)
    assert [culprit.id for culprit in summary.verdict.culprits] == ["2"]


def test_steps_without_phases_are_left_out_where_there_are_others(tmp_path: Path) -> None:
    summary = _summary(tmp_path, {range(10, 20): UNPHASED}, slow={2: 1.3}, num_steps=40)
    assert summary.steps.num_unphased == 10 and summary.steps.has_phases
    assert [culprit.id for culprit in summary.verdict.culprits] == ["2"]


@pytest.mark.parametrize("slow", [{}, {2: 1.3}], ids=["healthy", "slow rank"])
def test_without_phases_nobody_is_named_and_nothing_is_healthy(tmp_path: Path, slow: dict[int, float]) -> None:
    summary = _summary(tmp_path, {range(40): UNPHASED}, slow=slow, num_steps=40)
    assert summary.verdict.mode == "cannot tell" and summary.verdict.culprits == ()
    assert "phases were not recorded" in summary.verdict.headline
    assert summary.unknown == NO_PHASES and not summary.steps.has_phases
    assert summary.shares.whole is None
    assert all(row.parts_ns is None for row in summary.ranks)
    assert summary.kinds


@pytest.mark.parametrize("slow", [{}, {2: 1.3}], ids=["healthy", "slow rank"])
def test_without_any_detail_the_report_cannot_tell(tmp_path: Path, slow: dict[int, float]) -> None:
    with pytest.raises(CannotTell, match=r"all 40 common steps .* without detail"):
        _summary(tmp_path, {range(40): PLAIN}, slow=slow, num_steps=40)
    run = SyntheticRun(slow=slow, num_steps=40).write(tmp_path / "again")
    traces = [_with_detail(trace, {range(40): PLAIN}) for trace in read_attempt(run.last_attempt()).traces]
    assert examine(traces).mode == "cannot tell"


def test_few_steps_with_detail_are_too_few(tmp_path: Path) -> None:
    summary = _summary(tmp_path, {range(35): PLAIN}, slow={2: 1.3}, num_steps=40)
    assert summary.verdict.mode == "cannot tell" and "too few" in summary.verdict.headline
    assert "35 others were recorded without detail" in summary.verdict.headline
    assert "hpcpace switch RUN on" in " ".join(map(str, summary.verdict.next))


def test_a_run_that_was_switched_off_during_its_warm_up_does_not_ask_for_the_warm_up(tmp_path: Path) -> None:
    with pytest.raises(CannotTell, match=r": 35 of the 40 common steps .* without detail, and the others are warm-up"):
        _summary(tmp_path, {range(5, 40): PLAIN}, num_steps=40, num_warmup=5)


@each_case(("seq", "words"), [(-1, "-1"), (0, "0"), (17, "17"), ((100 << NUMBER_BITS) + 3, "3 since step 100")])
def test_an_operation_is_called_by_its_number_since_it_was_observed(seq: int, words: str) -> None:
    assert operation_number(seq) == words
