"""Which operations that failed or never completed may have held a rank up until its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from cases import each_case

from hpcpace.diagnosis.incomplete import held_up
from hpcpace.metrics.lost_operations import OpenOperation


def _trace(rank: int, last_step: int) -> Any:
    return SimpleNamespace(
        header=SimpleNamespace(rank=rank), tables={"steps": {"step": np.arange(last_step + 1, dtype=np.int64)}}
    )


def _operation(step: int, **inside: tuple[int, ...]) -> OpenOperation:
    found = {"inside": (0, 1), "failed": (), **inside}
    return OpenOperation(
        op="all_reduce",
        group="0",
        seq=7,
        step=step,
        members=(0, 1),
        completed=(),
        absent=(),
        age_ns=1,
        inside_ns=1,
        **found,
    )


@each_case(
    ("operation", "last_steps", "expected"),
    [
        (_operation(5), (4, 4), True),
        (_operation(5), (5, 5), True),  # begun in a step, and waited for in the next one
        (_operation(5, failed=(0, 1)), (4, 4), True),
        (_operation(5, failed=(0, 1)), (9, 9), False),  # caught, and tried again
        (_operation(5, failed=(0,)), (9, 4), True),
        (_operation(5, inside=(0,)), (9, 4), False),  # a message that its sender never waited for
        (_operation(0), (-1, -1), True),  # no step was recorded
    ],
)
def test_a_rank_that_completed_a_later_step_was_not_held_up(
    operation: OpenOperation, last_steps: tuple[int, int], expected: bool
) -> None:
    traces = [_trace(rank, last_step) for rank, last_step in enumerate(last_steps)]
    assert bool(held_up([operation], cast("Any", traces))) is expected
