"""One repetition of each reliability drill that is quick; `make drills` does all of them, several times each."""

from __future__ import annotations

import pytest

from experiments.drills.kinds import DRILLS, Drill, run_drill


@pytest.mark.parametrize("drill", [pytest.param(drill, id=drill.name) for drill in DRILLS if drill.is_quick])
def test_leaves_readable_traces_and_a_true_report(drill: Drill) -> None:
    (outcome,) = run_drill(drill, repetitions=1, tell=print)
    assert outcome.problems == ()
