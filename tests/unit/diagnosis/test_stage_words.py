"""Words for the stages that make ranks late."""

from __future__ import annotations

import pytest

from hpcpace.diagnosis.topics.stages import stage_sentences
from hpcpace.metrics.roles import PhaseExcess, Stage, StageComparison


@pytest.mark.parametrize(("name", "of_name"), [("rank 1", " of rank 1"), ("", "")])
def test_stages_of_nobody_in_particular_are_of_nobody(name: str, of_name: str) -> None:
    phase = PhaseExcess(phase="backward", own_ns=2e6, usual_ns=1e6, interval_ns=(9e5, 11e5))
    compared = StageComparison(stages=(Stage.COMPUTE,), phases=(phase,), num_steps=40, is_with_itself=True)
    assert stage_sentences([compared], [name])[0].startswith(f"backward{of_name}: 2.00 ms in these steps")
    unknown = StageComparison(stages=(), phases=(phase,), num_steps=40)
    assert stage_sentences([unknown], [name])[0].startswith(f"cannot tell which stage{of_name} is slow")
