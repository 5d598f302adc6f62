"""What a report says where what was counted as steps may not be steps."""

from __future__ import annotations

import dataclasses
import io

from cases import each_case
from report_sample import print_report
from rich.console import Console

from experiments.synthetic_run import MS, Extra, SyntheticRun
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.figures.overview import StepThresholds, step_sources, step_warnings
from hpcpace.diagnosis.measure import Selection
from hpcpace.report.run_report import page
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase

NUM_STEPS = 80


def analyzed(folder, **truth):
    run = SyntheticRun(**{"num_steps": NUM_STEPS, "noise": 0.02, **truth}).write(folder / "run")
    attempt = run.attempts()[0]
    return analyze_traces(run, attempt, read_attempt(attempt), Selection())


def traces_of(folder, **truth):
    run = SyntheticRun(**{"num_steps": 20, **truth}).write(folder / "run")
    return read_attempt(run.attempts()[0]).traces


@each_case(
    ("pattern", "said"),
    [
        ((1.0, 0.1), "may be half of one; see --step-from"),
        ((1.0, 0.5), "may be half of one; see --step-from"),
        ((1.0, 0.02, 0.02), "2 of every 3 are short: what is counted as a step may be part of one"),
        ((0.3, 0.3, 0.3, 1.0), "3 of every 4 are short: what is counted as a step may be part of one"),
    ],
)
def test_steps_that_alternate_on_all_ranks_are_a_warning_and_no_event(tmp_path, pattern, said):
    summary = analyzed(tmp_path, pattern=pattern).summary
    (warning,) = summary.steps.warnings
    assert warning.startswith("steps alternate between ") and said in warning
    assert "recurs" not in " ".join([summary.verdict.headline, *summary.verdict.also])


def test_a_straggler_is_found_in_steps_that_alternate(tmp_path):
    verdict = analyzed(tmp_path, pattern=(1.0, 0.5), slow={2: 1.4}).summary.verdict
    assert (verdict.mode, verdict.culprits[0].id) == ("persistent straggler", "2")


def test_a_straggler_is_found_in_steps_that_grow_and_nobody_else_is_blamed(tmp_path):
    growing = tuple(4.0 ** (3 * step // NUM_STEPS) for step in range(NUM_STEPS))
    run = {"num_ranks": 2, "pattern": growing, "noise": 0.2}
    verdict = analyzed(tmp_path / "slow", slow={1: 3.0}, **run).summary.verdict
    assert (verdict.mode, verdict.culprits[0].id) == ("persistent straggler", "1")
    assert not analyzed(tmp_path / "healthy", **run).summary.verdict.culprits


@each_case(
    "truth",
    [
        {},
        {"noise": 0.2},
        {"slow": {1: 1.5}},
        {"extras": (Extra(rank=0, length_ns=60 * MS, phase=Phase.EVAL, every=4),)},
        {"extras": tuple(Extra(rank=rank, length_ns=60 * MS, phase=Phase.EVAL, every=4) for rank in range(4))},
        {"extras": tuple(Extra(rank=rank, length_ns=60 * MS, phase=Phase.DATA, every=2) for rank in range(4))},
        {"extras": (Extra(rank=0, length_ns=60 * MS, every=2),)},
        {"num_ranks": 2, "extras": (Extra(rank=0, length_ns=60 * MS, phase=Phase.FORWARD, every=4),)},
    ],
)
def test_what_is_no_pattern_of_computation_is_no_warning(tmp_path, truth):
    assert analyzed(tmp_path, **truth).summary.steps.warnings == ()


def test_steps_far_shorter_than_others_on_all_ranks_are_a_warning(tmp_path):
    irregular = tuple(0.01 if step % 17 in (3, 11) else 1.0 for step in range(NUM_STEPS))
    (warning,) = analyzed(tmp_path, pattern=irregular, noise=0.0).summary.steps.warnings
    assert "steps take less than 20.0 % of the usual time on all ranks" in warning


def test_ranks_with_different_numbers_of_steps_are_a_warning(tmp_path):
    first, *others = traces_of(tmp_path)
    half = {**first.tables, "steps": first.tables["steps"].select(slice(0, None, 2))}
    found = [dataclasses.replace(first, tables=half), *others]
    (warning,) = step_warnings(found, None, 0, 10, StepThresholds())
    assert "different numbers of steps (20 on ranks 1-3 and 10 on rank 0)" in warning


def test_a_killed_rank_with_fewer_steps_is_no_warning(tmp_path):
    assert step_warnings(traces_of(tmp_path, lost_steps={1: 5}), None, 0, 10, StepThresholds()) == ()


def test_how_steps_were_found_is_in_the_summary_and_on_both_pages(tmp_path):
    how = "by optimizer: Adam, after each backward pass"  # 2 steps had ended when this was found
    found = analyzed(tmp_path, step_source=f"2 steps {how}", pattern=(1.0, 0.1))
    assert found.summary.steps.sources == (how,)
    stream = io.StringIO()
    print_report(Console(file=stream, width=100, color_system=None), found.summary)
    assert f"found      {how}" in stream.getvalue()
    html = page(found.summary, found.summary.verdict, found.plots)
    for text in (stream.getvalue(), html):
        assert "by optimizer: Adam" in text and "2 steps by" not in text and "steps alternate between" in text


def test_ranks_that_found_steps_in_different_ways_are_named(tmp_path):
    _, *others = traces_of(tmp_path, step_source="by optimizer: SGD")
    (other, *_) = traces_of(tmp_path / "other", step_source="by backward")
    assert step_sources([other, *others]) == ("by optimizer: SGD (ranks 1-3)", "by backward (rank 0)")
