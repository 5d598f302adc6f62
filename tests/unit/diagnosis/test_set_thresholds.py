"""Thresholds that a user sets take effect in a report, wherever they are used."""

from __future__ import annotations

import pytest

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.config import Config
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.trace.attempt_reader import read_attempt

SLOW = {"num_steps": 60, "noise": 0.02, "slow": {2: 1.4}, "hosts": ("n0", "n1")}
IN_PARTS = {
    "num_steps": 60,
    "noise": 0.0,
    "pattern": tuple(0.01 if step % 17 in (3, 11) else 1.0 for step in range(60)),
}


FIGURES = {
    "hotspots": lambda summary: [spot.id for spot in summary.hotspots],
    "excess": lambda summary: summary.ranks[2].excess,
    "verdict": lambda summary: (summary.verdict.headline, summary.verdict.why, summary.verdict.next),
    "warnings": lambda summary: summary.steps.warnings,
    "refused": lambda summary: summary.jitter and summary.jitter.predictions.refused,
}
CASES = (
    (SLOW, "hotspots.min_steps", 1000, "hotspots"),
    (SLOW, "hotspots.level", 0.0, "hotspots"),
    (SLOW, "straggler.noise_level", 0.1, "excess"),
    (SLOW, "straggler.min_excess_steps", 1000, "excess"),
    (SLOW, "straggler.explained_part", 1.0, "verdict"),
    (SLOW, "jitter.min_exceedances", 10_000, "refused"),
    (IN_PARTS, "steps.min_short", 50, "warnings"),
    (IN_PARTS, "steps.short_share", 0.0, "warnings"),
)


@pytest.mark.parametrize("truth", [SLOW, IN_PARTS], ids=["slow", "in-parts"])
def test_what_a_threshold_decides_changes_with_it(tmp_path, truth):
    run = SyntheticRun(**truth).write(tmp_path / "run")
    attempt = run.attempts()[0]

    def summary(**changed: float) -> Summary:
        config = Config(ThresholdValues(**changed))
        return analyze_traces(run, attempt, read_attempt(attempt), Selection(), config).summary

    usual = summary()
    cases = [case for case in CASES if case[0] is truth]
    found = [
        (name, value)
        for _, name, value, figure in cases
        if FIGURES[figure](summary(**{name: value})) == FIGURES[figure](usual)
    ]
    assert found == []
