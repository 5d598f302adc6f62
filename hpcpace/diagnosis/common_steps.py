"""Ranks that have no step in common with the others: one of them must not leave the others without figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.measure import Selection
from hpcpace.metrics.steps import common_steps, used_steps
from hpcpace.trace.reader import RankTrace

_MOST_NAMED = 8


def ranks_together(traces: Sequence[RankTrace], selection: Selection) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that have the step which most ranks have, and a sentence on each of the others.

    Where no step is common to all: a rank was killed before its first one, or its table of steps is damaged.

    Args:
        traces: the readable traces.
        selection: which steps count.

    Returns:
        All traces and no sentence where that leaves nobody out, or where no rank has any step that counts.
    """
    steps = [_used(trace, selection) for trace in traces]
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *steps]), return_counts=True)
    if not len(numbers) or counts.max() == len(traces):
        return list(traces), []
    shared = numbers[counts.argmax()]
    is_kept = [bool(np.isin(shared, own)) for own in steps]
    kept = [trace for trace, together in zip(traces, is_kept, strict=True) if together]
    apart = [trace for trace, together in zip(traces, is_kept, strict=True) if not together]
    said = [
        f"{trace.path}: none of the {len(trace.tables['steps'])} steps of rank {trace.header.rank} is one that the "
        f"other ranks have; no figures are made of it"
        for trace in apart[:_MOST_NAMED]
    ]
    more = len(apart) - _MOST_NAMED
    return kept, [*said, f"{more} more ranks have no step that the others have"] if more > 0 else said


def _used(trace: RankTrace, selection: Selection) -> NDArray[np.int64]:
    panel = common_steps([trace.tables["steps"]])
    mask = used_steps(panel, include_warmup=selection.include_warmup, first=selection.first, stop=selection.stop)
    return panel.step[mask]
