"""Compares all starts of one run: a requeue or an elastic restart may have changed ranks, hosts or speed.

The verdict is on one attempt; of the others only headers, steps and clocks are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.diagnosis.common_steps import ranks_with_common_steps
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import AttemptRow
from hpcpace.errors import TraceError
from hpcpace.metrics.clocks.rank_clocks import rank_clocks
from hpcpace.metrics.steps import common_steps, step_times, used_steps
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.reader import RankTrace

_MOST_ATTEMPTS = 16


def attempt_rows(
    run: RunDirectory, attempt: Attempt, traces: Sequence[RankTrace], selection: Selection
) -> tuple[AttemptRow, ...]:
    """Return a row for each attempt of a run, the last 16 at most; none if there is only one attempt.

    Args:
        run: the run.
        attempt: the attempt that is reported.
        traces: its readable traces, ascending by rank.
        selection: which steps count, of all attempts alike.
    """
    attempts = run.attempts()
    if len(attempts) < 2:
        return ()
    shown = [other for other in attempts[-_MOST_ATTEMPTS:] if other.number != attempt.number]
    rows = [_row(attempt, traces, selection), *(_row(other, _traces(other), selection) for other in shown)]
    return tuple(sorted(rows, key=lambda row: row.attempt))


def _traces(attempt: Attempt) -> Sequence[RankTrace]:
    try:
        return read_attempt(attempt, most_rows=0).traces
    except TraceError:
        return ()


def _row(attempt: Attempt, traces: Sequence[RankTrace], selection: Selection) -> AttemptRow:
    num_steps, first, last, p50_ns = _steps(traces, selection)
    return AttemptRow(
        attempt=attempt.number,
        world_size=world_size_of(traces) if traces else 0,
        num_ranks=len(traces),
        hosts=tuple(dict.fromkeys(trace.header.host for trace in traces)),
        mesh=traces[0].header.mesh if traces else "",
        num_steps=num_steps,
        first=first,
        last=last,
        p50_ns=p50_ns,
        num_not_closed=sum(not trace.closed_cleanly for trace in traces),
        num_inside=sum(len(trace.open_collectives) > 0 for trace in traces),
    )


def _steps(traces: Sequence[RankTrace], selection: Selection) -> tuple[int, int | None, int | None, float | None]:
    """Return how many steps count, the first and the last of them, and their median time."""
    traces, _ = ranks_with_common_steps(traces, selection)
    panel = common_steps([trace.tables["steps"] for trace in traces])
    used = used_steps(panel, include_warmup=selection.include_warmup, first=selection.first, stop=selection.stop)
    if not used.any():
        return 0, None, None, None
    clocks, unknown = rank_clocks(traces)
    known = [index for index, trace in enumerate(traces) if trace.header.rank not in unknown] or [0]
    begin_ns, end_ns = (
        np.array([clocks[index].to_reference(own[index]).time_ns for index in known])
        for own in (panel.begin_ns, panel.end_ns)
    )
    times_ns, step = step_times(panel.step, begin_ns, end_ns)[used], panel.step[used]
    return len(step), int(step[0]), int(step[-1]), float(np.median(times_ns))
