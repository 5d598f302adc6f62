"""The pace of hosts that issue work to devices: how they compare, and how short a step they allow at least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.diagnosis.devices import (
    DURING_COLUMN,
    HOST_BEGIN_COLUMN,
    HOST_END_COLUMN,
    is_on_device,
    issued_operations,
    sampled_steps,
)
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.host_waits import HostPaceThresholds
from hpcpace.metrics.issue_leads import MAX_BEHIND, StepPace, step_pace
from hpcpace.metrics.phases import CoveredTime
from hpcpace.metrics.segments import DEVICE_ERROR_NS
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import Phase

_ISSUING = (Phase.FORWARD, Phase.BACKWARD)
_MARKED = (Phase.DATA, *_ISSUING, Phase.OPTIMIZER)
_MAX_RANKS, _NUM_SAMPLES, _SAMPLED_STEPS = 32, 4, 4  # speed: ranks, and stretches of steps, whose hosts are looked at


def issue_ratio(traces: Sequence[RankTrace], step: Ints) -> Floats:
    """Return how long hosts take for forward and backward, relative to the median host, float64, (num_ranks,).

    Only steps in which its device waits there for a host count for it, by how long it does; 1 where it never does.

    Args:
        traces: from `on_devices`.
        step: numbers of the steps to use, ascending, int64.

    Returns:
        Empty where some rank has no times of its device.
    """
    if not all(is_on_device(trace) for trace in traces):
        return np.zeros(0)
    host_ns, idle_ns = np.zeros((2, len(traces), len(step)))
    for index, trace in enumerate(traces):
        phases = trace.tables["phases"]
        phases = phases.select(np.isin(phases["step"], step))
        column = np.searchsorted(step, phases["step"])
        is_idle = (phases["phase"] == Phase.IDLE) & np.isin(phases[DURING_COLUMN], _ISSUING)
        for panel, begin, end, is_used in (
            (host_ns, HOST_BEGIN_COLUMN, HOST_END_COLUMN, np.isin(phases["phase"], _ISSUING)),
            (idle_ns, "begin_ns", "end_ns", is_idle),
        ):
            np.add.at(panel[index], column[is_used], (phases[end] - phases[begin])[is_used])
    own_ns, usual_ns = (idle_ns * host_ns).sum(axis=1), (idle_ns * np.median(host_ns, axis=0)).sum(axis=1)
    return np.where(idle_ns.any(axis=1), own_ns / np.maximum(usual_ns, 1.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class HostPace:
    """The pace of some ranks.

    Attributes:
        row: indices of the ranks, ascending, int64, (num_looked_at,).
        of: what each shows.
    """

    row: Ints
    of: tuple[StepPace, ...]

    def figures(self, name: str) -> Floats:
        """Return one figure of all of them, float64, (num_looked_at,)."""
        return np.array([getattr(each, name) for each in self.of], np.float64)


def pace_of(
    traces: Sequence[RankTrace], limits: HostPaceThresholds, *, step: Ints, rows: Sequence[int] = ()
) -> HostPace:
    """Return the pace of ranks with times of their device in some steps.

    Args:
        traces: from `on_devices`; of many, some are looked at.
        limits: when a device has run dry, and a host may be held up.
        step: numbers of the steps, ascending, int64, at least one; of many, some are looked at.
        rows: indices of ranks that are looked at in any case.
    """
    some = sampled_steps(step, _NUM_SAMPLES, _SAMPLED_STEPS)
    chosen = np.union1d(np.linspace(0, len(traces) - 1, _MAX_RANKS).astype(np.int64), np.array(rows, np.int64))
    used = [row for row in chosen.tolist() if is_on_device(traces[row])]
    found = [step_pace(*_marks(traces[row], some), limits) for row in used]
    return HostPace(row=np.array(used, np.int64), of=tuple(found))


def _marks(trace: RankTrace, step: Ints) -> tuple[Ints, Ints, CoveredTime, Ints]:
    """Return when a host made its marks in steps that are alike, and so on, as `step_pace` takes them."""
    # What holds a device may be of a step before those that its host is at.
    around = np.unique(step[:, None] - np.arange(MAX_BEHIND + 2))
    steps, phases, issued = trace.tables["steps"], trace.tables["phases"], issued_operations(trace, around)
    blocking = phases.select(phases["phase"] == Phase.GRAD_SYNC)
    phases = phases.select(np.isin(phases["phase"], _MARKED))
    host = [issued.issue_ns, *(rows[name] for rows in (steps, phases) for name in (HOST_BEGIN_COLUMN, HOST_END_COLUMN))]
    device = [issued.enter_ns, *(rows[name] for rows in (steps, phases) for name in ("begin_ns", "end_ns"))]
    host_ns, device_ns = np.concatenate(host), np.concatenate(device)
    order = np.lexsort((device_ns, host_ns))
    host_ns, device_ns = host_ns[order], device_ns[order]
    arrived_ns = np.sort(device_ns)
    used = steps.select(np.isin(steps["step"], step))
    first = np.searchsorted(host_ns, used[HOST_BEGIN_COLUMN], side="left")
    count = np.searchsorted(host_ns, used[HOST_END_COLUMN], side="right") - first
    usual = int(np.bincount(count).argmax())
    at = first[count == usual][:, None] + np.arange(usual)
    host_ns, device_ns = host_ns[at], np.maximum.accumulate(device_ns[at], axis=1)
    begin_ns = np.concatenate([issued.exit_ns - issued.blocked_ns, blocking["begin_ns"]])
    held = CoveredTime.of(begin_ns, np.concatenate([issued.exit_ns, blocking["end_ns"]]))
    last = np.searchsorted(arrived_ns, host_ns + DEVICE_ERROR_NS, side="right") - 1
    since_ns = np.where(last >= 0, np.maximum(host_ns - arrived_ns[last], 0), np.iinfo(np.int64).max)
    return host_ns, device_ns, held, since_ns
