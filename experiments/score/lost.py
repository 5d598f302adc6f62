"""Traces that cannot carry a verdict: ranks are missing, of another run, or contradict themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.score.scenario import Scenario
from hpcpace.trace.tables import RankTrace, Table

_HOUR_NS = 3_600_000_000_000
_UNKNOWN = 200
_TIMES = ("begin_ns", "end_ns", "enter_ns", "exit_ns", "local_ns", "time_ns", "blocked_ns")


def with_losses(
    scenario: Scenario, traces: Sequence[RankTrace], others: Callable[[], Sequence[RankTrace]]
) -> list[RankTrace]:
    """Return the traces of a scenario as its data fault leaves them.

    Args:
        scenario: names the fault, and the ranks that it is about.
        traces: of all ranks.
        others: returns the traces of another run of as many ranks.
    """
    lost = scenario.lost_ranks
    if scenario.data in ("sound", "host_times"):
        return list(traces)
    if scenario.data == "missing":
        return [trace for trace in traces if trace.header.rank not in lost]
    if scenario.data == "other_run":
        return [other if other.header.rank in lost else own for own, other in zip(traces, others(), strict=True)]
    change = _CHANGES[scenario.data]
    return [change(trace) if trace.header.rank in lost else trace for trace in traces]


def _changed(trace: RankTrace, **tables: dict[str, Any]) -> RankTrace:
    """Return a trace with other columns: a value for all rows, or an array."""
    made = dict(trace.tables)
    for name, columns in tables.items():
        table = made[name]
        new = {key: np.broadcast_to(value, len(table)).astype(table[key].dtype) for key, value in columns.items()}
        made[name] = Table({key: new.get(key, table[key]) for key in table})
    return replace(trace, tables=made)


def _other_start(trace: RankTrace) -> RankTrace:
    """Return a rank's trace of an earlier start under the same names: an hour before the others."""
    times = {
        name: {key: table[key] - _HOUR_NS for key in table if key in _TIMES and key != "blocked_ns"}
        for name, table in trace.tables.items()
        if name != "clock"
    }
    return _changed(trace, **times)


def _zero_times(trace: RankTrace) -> RankTrace:
    return _changed(trace, **{name: {key: 0 for key in table if key in _TIMES} for name, table in trace.tables.items()})


def _unknown_enums(trace: RankTrace) -> RankTrace:
    return _changed(trace, collectives={"op": _UNKNOWN, "exit_kind": _UNKNOWN}, phases={"phase": _UNKNOWN})


def _exits_before_enters(trace: RankTrace) -> RankTrace:
    return _changed(trace, collectives={"exit_ns": trace.tables["collectives"]["enter_ns"] - _HOUR_NS})


def _overlapping_steps(trace: RankTrace) -> RankTrace:
    steps = trace.tables["steps"]
    return _changed(trace, steps={"end_ns": steps["end_ns"] + (steps["end_ns"] - steps["begin_ns"]) // 2})


def _wrong_clock(trace: RankTrace) -> RankTrace:
    return _changed(trace, clock={"offset_ns": trace.tables["clock"]["offset_ns"] + _HOUR_NS})


def _no_collectives(trace: RankTrace) -> RankTrace:
    return replace(trace, tables={**trace.tables, "collectives": trace.tables["collectives"].select(slice(0))})


_CHANGES: dict[str, Callable[[RankTrace], RankTrace]] = {
    "other_start": _other_start,
    "zero_times": _zero_times,
    "unknown_enums": _unknown_enums,
    "exits_before_enters": _exits_before_enters,
    "overlapping_steps": _overlapping_steps,
    "wrong_clock": _wrong_clock,
    "no_collectives": _no_collectives,
}
