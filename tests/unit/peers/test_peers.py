"""The comparison with peers: who is right about a case, what a tool left behind, and what that cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import each_case

from experiments.peers import __main__ as page
from experiments.peers import job, runs
from experiments.peers.runs import CASES, Case, Verdict, is_right

_BY_NAME = {case.name: case for case in CASES}
_SLOW = Verdict(headline="rank 1 is slow", text="rank 1 is slow by data loading", ranks=(1,))


@each_case(
    ("case", "verdict", "expected"),
    [
        ("loader", _SLOW, True),
        ("backward", _SLOW, False),  # another stage
        ("loader-all", _SLOW, False),  # a rank where none is to be named
        ("checkpoint", _SLOW, False),  # another rank
        ("loader", Verdict(headline="", text="data loading", ranks=(1,), is_fault=False), False),
        ("healthy", _SLOW, False),
        ("healthy", Verdict(headline="healthy", text="healthy", is_fault=False), True),
    ],
)
def test_a_verdict_is_right_if_it_names_rank_and_stage(case: str, verdict: Verdict, expected: bool) -> None:
    assert is_right(_BY_NAME[case], verdict) is expected


def test_names_of_cases_are_unique_and_faults_are_in_the_lab() -> None:
    assert len(_BY_NAME) == len(CASES)
    assert [case.name for case in CASES if case.fault and not case.in_lab] == []


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@each_case(
    ("diagnosis", "ranks", "is_fault"),
    [
        ({"severity": "warn", "evidence": {"worst": {"rank": 1}}}, (1,), True),
        ({"severity": "warn"}, (), True),
        ({"severity": "info", "evidence": {"worst": {"rank": 1}}}, (), False),
    ],
)
def test_what_the_peer_says_is_read_from_its_summary(
    tmp_path: Path, diagnosis: dict[str, Any], ranks: tuple[int, ...], is_fault: bool
) -> None:
    found = {"status": "INPUT", "summary": "rank 1 waits", "action": "look at its data", **diagnosis}
    _write(tmp_path / "logs" / "run" / "final_summary.json", {"primary_diagnosis": found})
    verdict = runs._theirs(tmp_path, ())
    assert verdict is not None
    assert (verdict.ranks, verdict.is_fault) == (ranks, is_fault)
    assert verdict.text == "INPUT: rank 1 waits look at its data"


def test_a_peer_without_a_summary_says_nothing(tmp_path: Path) -> None:
    assert runs._theirs(tmp_path, ()) is None


def test_costs_are_those_between_the_marks_and_the_rest(tmp_path: Path) -> None:
    marks = [{"step": 50, "wall_s": 10.0, "cpu_s": 3.0}, {"step": 150, "wall_s": 12.0, "cpu_s": 4.0}]
    _write(tmp_path / job.MARKS, marks)
    _write(tmp_path / runs.RUN / "summary.json", 12)
    _write(tmp_path / runs.RUN / "attempt-0" / "trace", 1234)
    took = runs._took(tmp_path, job_s=7.0, report_s=0.5)
    assert took == runs.Took(steps_per_s=50.0, step_ms=10.0, rest_s=6.0, report_s=0.5, trace_bytes=4, report_bytes=2)


def test_a_job_without_its_second_mark_has_no_costs(tmp_path: Path) -> None:
    _write(tmp_path / job.MARKS, [{"step": 50, "wall_s": 10.0, "cpu_s": 3.0}])
    assert runs._took(tmp_path, job_s=7.0, report_s=0.5) == runs.Took()


def test_all_ranks_end_some_steps_after_a_fault_has_begun(tmp_path: Path) -> None:
    assert job.last_step(0, 100, tmp_path) is None
    (tmp_path / job.FAULT).touch()
    assert job.last_step(1, 101, tmp_path) is None  # rank 0 decides
    last = job.last_step(0, 102, tmp_path)
    assert last is not None and last > 102
    assert {job.last_step(rank, 110, tmp_path) for rank in (0, 1)} == {last}


def _row(tool: str, turn: int, verdict: Verdict | None = None) -> dict[str, Any]:
    rate = {"plain": 100.0, "hpcpace": 90.0, "TraceML": 80.0}[tool] * (1 + turn)
    said = None if verdict is None else {**vars(verdict), "ranks": list(verdict.ranks)}
    return {"tool": tool, "verdict": said, "steps_per_s": rate, "step_ms": 1000 / rate}


def test_costs_are_compared_within_a_turn() -> None:
    rows = [_row(tool, turn) for turn in range(2) for tool in runs.TOOLS]
    title, num_runs, rates, rate_ratios, _, time_ratios = page._costs(_BY_NAME["loader"], rows)
    assert (title, num_runs, rates) == ("slow loader (waits), rank 1", "2", "150, 135, 120")
    assert (rate_ratios, time_ratios) == ("0.900, 0.800", "1.111, 1.250")


def test_a_tool_that_says_nothing_in_one_run_is_not_right_in_all() -> None:
    case: Case = _BY_NAME["loader"]
    rows = [_row("hpcpace", 0, _SLOW), _row("hpcpace", 1)]
    assert page._judged(case, rows, "hpcpace") == ("rank 1 is slow", "1 of 2")
    assert not page._is_all("1 of 2") and page._is_all("2 of 2") and not page._is_all("0 of 0")


@each_case("tool", [(tool,) for tool in runs.TOOLS])
def test_every_tool_runs_the_same_job(tool: str, tmp_path: Path) -> None:
    words = runs._command(_BY_NAME["link"], tool, tmp_path, tmp_path / "site", ["10.0.0.1", "10.0.0.2"], 1, 29500)
    assert {"--nproc-per-node=1", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"} <= set(words)
    assert words[-4:] == ["link", tool, "600", str(tmp_path)]
    assert ("hpcpace" in words) == (tool == runs.OURS)
