"""What a rank does now, from what it did in its earlier steps: traces have phases and steps only once they end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.hang.views import Doing
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import Table

_STEPS_COMPARED = 64
_DOING = {
    Phase.DATA: Doing.LOADING,
    Phase.CHECKPOINT: Doing.SAVING,
    Phase.EVAL: Doing.EVALUATING,
    Phase.GRAD_SYNC: Doing.COMMUNICATING,
}

Int64s = NDArray[np.int64]


class UnderWay(NamedTuple):
    """What a rank does, and since when, on the clock of its trace."""

    doing: Doing
    since_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The steps and phases that a rank has finished, in the order of their ends; times on one clock.

    Attributes:
        step, step_end_ns, step_times_ns, step_flags: of each step, int64, (num_steps,).
        phase, phase_step, phase_end_ns, phase_times_ns: of each phase, int64, (num_phases,).
    """

    step: Int64s
    step_end_ns: Int64s
    step_times_ns: Int64s
    step_flags: Int64s
    phase: Int64s
    phase_step: Int64s
    phase_end_ns: Int64s
    phase_times_ns: Int64s

    def last_step(self, at_ns: int) -> int:
        """Return the last step that had ended by a time; -1 without one."""
        return int(self.step[self.step_end_ns <= at_ns].max(initial=-1))

    def times_of_ns(self, phase: Phase, at_ns: int) -> Int64s:
        """Return how long each phase of a kind lasted that had ended by a time, int64, (num_such,)."""
        times_ns: Int64s = self.phase_times_ns[(self.phase == phase) & (self.phase_end_ns <= at_ns)]
        return times_ns


def doing_of_code(phase: int) -> Doing:
    """Return what a rank does in a phase of this code."""
    return _DOING.get(Phase(phase), Doing.COMPUTING) if phase in Phase._value2member_map_ else Doing.UNKNOWN


def finished(steps: Table, phases: Table, step_ns: tuple[Int64s, Int64s], phase_ns: tuple[Int64s, Int64s]) -> Finished:
    """Return what a rank has finished, from its tables and their begins and ends on one clock."""
    by_end, order = np.argsort(step_ns[1], kind="stable"), np.argsort(phase_ns[1], kind="stable")
    return Finished(
        step=np.asarray(steps["step"], np.int64)[by_end],
        step_end_ns=step_ns[1][by_end],
        step_times_ns=(step_ns[1] - step_ns[0])[by_end],
        step_flags=np.asarray(steps["flags"], np.int64)[by_end],
        phase=np.asarray(phases["phase"], np.int64)[order],
        phase_step=np.asarray(phases["step"], np.int64)[order],
        phase_end_ns=phase_ns[1][order],
        phase_times_ns=(phase_ns[1] - phase_ns[0])[order],
    )


def under_way(done: Finished, at_ns: int, *, last_exit_ns: int | None) -> UnderWay:
    """Return what a rank did at a time, as far as its earlier steps tell.

    The phase under way is the one that came next in all of the last steps. Where some had another one, such as a
    checkpoint, it is that one if its steps were equally far apart and this step continues them.

    Args:
        done: what it has finished.
        at_ns: the time.
        last_exit_ns: when it last left an operation; None without one.
    """
    begin_ns = done.phase_end_ns - done.phase_times_ns
    within = np.flatnonzero((begin_ns <= at_ns) & (at_ns < done.phase_end_ns))
    if len(within):  # it ended later
        row = int(within[begin_ns[within].argmax()])
        return UnderWay(doing_of_code(int(done.phase[row])), int(begin_ns[row]))
    # Garbage is collected at any place of a step, and by any thread.
    ends_ns = (done.step_end_ns, done.phase_end_ns[done.phase != Phase.GC])
    step_ends, phase_ends = (ends[ends <= at_ns] for ends in ends_ns)
    since = [*step_ends[-1:].tolist(), *phase_ends[-1:].tolist(), *([] if last_exit_ns is None else [last_exit_ns])]
    if not since:
        return UnderWay(Doing.STARTING, None)
    this_step = done.last_step(at_ns) + 1
    return UnderWay(_next(done, at_ns, this_step), max(since))


def _next(done: Finished, at_ns: int, this_step: int) -> Doing:
    is_past = (done.phase_end_ns <= at_ns) & (done.phase != Phase.GC)
    num_before = int((is_past & (done.phase_step == this_step)).sum())
    next_of: dict[int, Doing] = {}
    recent = is_past & (done.phase_step < this_step) & (done.phase_step >= this_step - _STEPS_COMPARED)
    for step in np.unique(done.phase_step[recent]).tolist():
        phases = done.phase[is_past & (done.phase_step == step)]
        has_next = len(phases) > num_before
        next_of[step] = doing_of_code(int(phases[num_before])) if has_next else Doing.UNKNOWN
    if not next_of:
        return Doing.UNKNOWN
    usual, num_usual = Counter(next_of.values()).most_common(1)[0]
    for doing in set(next_of.values()) - {usual}:
        steps = [step for step, one in next_of.items() if one is doing]
        apart = {later - earlier for earlier, later in pairwise([*steps, this_step])}
        if len(steps) > 1 and len(apart) == 1:
            return doing
    return usual if 2 * num_usual > len(next_of) else Doing.UNKNOWN
