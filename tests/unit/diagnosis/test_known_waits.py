"""Of which ranks waits are known."""

from __future__ import annotations

import numpy as np
from cases import each_case

from hpcpace.diagnosis.within_steps import StepPanels, WaitThresholds, are_waits_known, unknown_waits
from hpcpace.metrics.phases import Part


def _panels(*, unmatched: float, work: float = 50.0) -> StepPanels:
    """Return two ranks of 3 steps, blocked for 10 in each: rank 0 waits for 4; of rank 1 a part is unmatched."""
    panels = StepPanels.empty((2, 3), np.zeros)
    panels.parts_ns[:, :, Part.FORWARD] = work
    panels.parts_ns[:, :, Part.TRANSFER], panels.parts_ns[0, :, Part.WAIT] = np.array([[6.0], [10.0]]), 4.0
    panels.under_way_ns[:] = 20.0
    panels.unmatched_ns[1] = 20.0 * unmatched
    return panels


@each_case(
    ("unmatched", "work", "unknown", "is_known"),
    [
        (0.0, 50.0, [False, False], True),
        (0.09, 50.0, [False, False], True),
        (0.15, 50.0, [False, True], True),
        (1.0, 50.0, [False, True], False),
        (1.0, 20_000.0, [False, False], True),
    ],
)
def test_waits_are_unknown_where_much_that_blocks_has_no_counterpart(
    unmatched: float, work: float, unknown: list[bool], is_known: bool
) -> None:
    panels = _panels(unmatched=unmatched, work=work)
    assert unknown_waits(panels, WaitThresholds()).tolist() == unknown
    assert are_waits_known(panels, WaitThresholds()) == is_known


def test_ranks_that_nothing_blocks_wait_for_nobody() -> None:
    panels = StepPanels.empty((2, 3), np.zeros)
    assert not unknown_waits(panels, WaitThresholds()).any() and are_waits_known(panels, WaitThresholds())
