"""Leaves out ranks that share no step with the others: one such rank would leave all ranks without figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.measure import Selection
from hpcpace.metrics.steps import common_steps, used_steps
from hpcpace.trace.reader import RankTrace


def ranks_with_common_steps(traces: Sequence[RankTrace], selection: Selection) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that have the step shared by most ranks, and a sentence on each of the others.

    A rank shares no step if it was killed before its first one, or if its table of steps is damaged.

    Args:
        traces: the readable traces.
        selection: which steps count.

    Returns:
        All traces and no sentence if all share that step, or if no rank has any step that counts.
    """
    steps = [_used(trace, selection) for trace in traces]
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *steps]), return_counts=True)
    if not len(numbers) or counts.max() == len(traces):
        return list(traces), []
    shared = numbers[counts.argmax()]
    is_kept = [bool(np.isin(shared, own)) for own in steps]
    kept = [trace for trace, has_shared in zip(traces, is_kept, strict=True) if has_shared]
    left_out = [trace for trace, has_shared in zip(traces, is_kept, strict=True) if not has_shared]
    sentences = [
        f"{trace.path}: rank {trace.header.rank} shares none of its {len(trace.tables['steps'])} steps with the other "
        "ranks; it is left out of all figures"
        for trace in left_out
    ]
    return kept, sentences


def _used(trace: RankTrace, selection: Selection) -> NDArray[np.int64]:
    panel = common_steps([trace.tables["steps"]])
    mask = used_steps(panel, include_warmup=selection.include_warmup, first=selection.first, stop=selection.stop)
    return panel.step[mask]
