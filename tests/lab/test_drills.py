"""One repetition of each reliability drill that is quick; `make drills` does all of them, several times each."""

from __future__ import annotations

import pytest
from cases import only_nightly

from experiments.drills.kinds import DRILLS, run_drill

QUICK = {drill.name: drill for drill in DRILLS if drill.is_quick}


@pytest.mark.parametrize("name", only_nightly(["kill-rank"], sorted(QUICK.keys() - {"kill-rank"})))
def test_leaves_readable_traces_and_a_true_report(name: str) -> None:
    (outcome,) = run_drill(QUICK[name], repetitions=1, tell=print)
    assert outcome.problems == ()
