"""Traces of one attempt as other tools want them: on one clock, with what a rank computes between its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_US
from hpcpace.trace.attempt_reader import read_attempt

# What a call takes on which the rank does not block.
_HELD_NS = 20 * NS_PER_US

_COLUMNS = ("step", "group", "bytes", "enter_ns", "exit_ns", "blocked_ns")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One rank of a run in which ranks compute and all-reduce in turn. Times are on the common clock, int64.

    Attributes:
        rank, num_ranks: in the run.
        members: global ranks of each group, by the group's number.
        step_begins_ns, step_ends_ns: of each step, (num_steps,).
        step: index of the step of each operation, (num_operations,), in the order of entering.
        group, size_bytes: of each operation.
        compute_ns: since when the rank computes for each operation; enter_ns where it does not.
        enter_ns, exit_ns: of each operation.
    """

    rank: int
    num_ranks: int
    members: dict[int, list[int]]
    step_begins_ns: np.ndarray
    step_ends_ns: np.ndarray
    step: np.ndarray
    group: np.ndarray
    size_bytes: np.ndarray
    compute_ns: np.ndarray
    enter_ns: np.ndarray
    exit_ns: np.ndarray


def timelines(attempt: Attempt) -> Iterator[Timeline]:
    """Yield the timelines of all ranks."""
    traces = read_attempt(attempt).traces
    for trace in traces:
        clock, steps = trace.tables["clock"], trace.tables["steps"]
        table = trace.tables["collectives"]
        order = np.argsort(table["enter_ns"], kind="stable")
        done = {column: table[column][order] for column in _COLUMNS}

        def common(times_ns: np.ndarray, clock: np.ndarray = clock) -> np.ndarray:
            return times_ns - np.interp(times_ns, clock["local_ns"], clock["offset_ns"]).astype(np.int64)

        begins_ns, enter_ns, exit_ns = common(steps["begin_ns"]), common(done["enter_ns"]), common(done["exit_ns"])
        step = np.searchsorted(steps["step"], done["step"])
        free_ns = np.maximum.accumulate(np.where(done["blocked_ns"] > 0, exit_ns, enter_ns + _HELD_NS))
        compute_ns = np.maximum(np.concatenate([[0], free_ns[:-1]]), begins_ns[step])
        groups = trace.tables["groups"]
        yield Timeline(
            rank=trace.header.rank,
            num_ranks=len(traces),
            members={int(each): groups["rank"][groups["id"] == each].tolist() for each in np.unique(groups["id"])},
            step_begins_ns=begins_ns,
            step_ends_ns=common(steps["end_ns"]),
            step=step,
            group=done["group"],
            size_bytes=done["bytes"],
            compute_ns=np.minimum(compute_ns, enter_ns),
            enter_ns=enter_ns,
            exit_ns=exit_ns,
        )
