"""Ranks that used a device, with the times of the device in place of those of the host.

The host of such a rank issues work and runs ahead of its device, so host times of its phases do not show what takes
time there. With those of the device, all figures are measured as on ranks without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.finding import IdlePhase
from hpcpace.diagnosis.incomplete import sound_stream
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.host_waits import (
    NO_PHASE,
    HostPaceThresholds,
    Stretches,
    following_hosts,
    idle_ns,
    stretches_between_marks,
    usual_lengths,
)
from hpcpace.metrics.operations import is_of_devices
from hpcpace.metrics.phases import innermost
from hpcpace.trace.encoding import DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN, ENQUEUE_COLUMN
from hpcpace.trace.reader import RankTrace, Table
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import join_tables

_OF_HOST = (Phase.GC, Phase.PACE, Phase.OTHER)
"""Phases that may be the host's alone: the device goes on meanwhile, as far as it has work."""


@dataclass(frozen=True, kw_only=True)
class DeviceThresholds(Thresholds, topic="devices"):
    """When times of a device replace those of its host."""

    least_known_share: float = number(0.5, "share")
    """Share of the steps whose times on the device must be known: with fewer, the host's are used."""


_DEVICE_COLUMNS = {"begin_ns": DEVICE_BEGIN_COLUMN, "end_ns": DEVICE_END_COLUMN}
DURING_COLUMN, BOUNDED_COLUMN = "during", "is_bounded"
HOST_BEGIN_COLUMN, HOST_END_COLUMN = "host_begin_ns", "host_end_ns"
_HOST_COLUMNS = {HOST_BEGIN_COLUMN: "begin_ns", HOST_END_COLUMN: "end_ns"}


def has_device(trace: RankTrace) -> bool:
    """Return whether a rank used a device, as its columns or the backends of its process groups say."""
    has_columns = ENQUEUE_COLUMN in trace.tables["collectives"] or DEVICE_BEGIN_COLUMN in trace.tables["phases"]
    return has_columns or any(is_of_devices(name) for name in np.unique(trace.tables["groups"]["backend"]).tolist())


def is_on_device(trace: RankTrace) -> bool:
    """Return whether the phases of a trace from `on_devices` have times of the device."""
    return HOST_BEGIN_COLUMN in trace.tables["phases"]


def is_host_timed(trace: RankTrace) -> bool:
    """Return whether a rank used a device and its phases, after `on_devices`, still have times of the host."""
    return has_device(trace) and not is_on_device(trace)


def is_timed_there(trace: RankTrace, operations: Table) -> Bools:
    """Return which operations have the times of where they take place, bool, (num_operations,).

    A rank without a device does all on its host. With one, an operation of the host, as over gloo, begins as it is
    issued, while the device may still be busy with what it works on.

    Args:
        trace: the rank's.
        operations: rows of its collectives.
    """
    if ENQUEUE_COLUMN in operations:
        return np.asarray(operations["enter_ns"] != operations[ENQUEUE_COLUMN])
    return np.full(len(operations), not has_device(trace))


def on_devices(traces: Sequence[RankTrace], thresholds: ThresholdValues | None = None) -> list[RankTrace]:
    """Return traces with steps and phases as the device did them, where that is known; others as they are.

    Begin and end are those of the device then, and columns `host_begin_ns` and `host_end_ns` have those of the host.
    Phases of the host alone are left out, as are steps of which a time or a phase is not known there. Where the device
    waited for its host, phases IDLE or GC say so, whose column `during` has the phase around them, and `is_bounded`
    whether they last that long at most. A rank of which more than half of the steps would be left out, or whose
    collectives have no times of the device, keeps its host times, as does one that shows no wait for its collectives:
    neither how long they held its stream, nor a phase grad_sync.

    Where a trace has phases of the device being idle itself, they are taken in place of what marks of the stream show.
    """
    thresholds = thresholds or ThresholdValues()
    least_known_share = thresholds.of(DeviceThresholds).least_known_share
    views = [_on_device(trace, least_known_share) for trace in traces]
    changed = [index for index, view in enumerate(views) if is_on_device(view) and view is not traces[index]]
    stretches = [_stretches(views[index], traces[index]) for index in changed]
    stretches = following_hosts(stretches, thresholds.of(HostPaceThresholds)) if stretches else []
    found = dict(zip(changed, stretches, strict=True))
    roles = {index: (traces[index].header.pp, traces[index].header.tp) for index in changed}
    usual = {
        role: usual_lengths([found[index] for index in changed if roles[index] == role]) for role in set(roles.values())
    }
    for index in changed:
        recorded = traces[index].tables["phases"]
        recorded = recorded.select(recorded["phase"] == Phase.IDLE)
        views[index] = (
            _with_recorded_idle(views[index], recorded)
            if len(recorded)
            else _with_idle(views[index], found[index], usual[roles[index]])
        )
    return views


def _on_device(trace: RankTrace, least_known_share: float) -> RankTrace:
    steps, phases = trace.tables["steps"], trace.tables["phases"]
    if is_on_device(trace):
        return trace
    if (phases["phase"] == Phase.IDLE).any():
        phases = phases.select(phases["phase"] != Phase.IDLE)
        trace = replace(trace, tables={**trace.tables, "phases": phases})
    has_times = DEVICE_BEGIN_COLUMN in steps and DEVICE_BEGIN_COLUMN in phases
    if not has_times or ENQUEUE_COLUMN not in trace.tables["collectives"] or not _shows_waits(trace):
        return trace
    is_known, is_phase_known = _are_known(steps), _are_known(phases)
    # What ends before it begins, or begins before an earlier step has ended, is damage.
    is_known &= steps[DEVICE_END_COLUMN] > steps[DEVICE_BEGIN_COLUMN]
    ended_ns = np.maximum.accumulate(np.where(is_known, steps[DEVICE_END_COLUMN], 0))
    is_known[1:] &= steps[DEVICE_BEGIN_COLUMN][1:] >= ended_ns[:-1]
    is_phase_known &= phases[DEVICE_END_COLUMN] >= phases[DEVICE_BEGIN_COLUMN]
    unknown = phases["step"][~is_phase_known & ~np.isin(phases["phase"], _OF_HOST)]
    is_known &= ~np.isin(steps["step"], unknown)
    if not is_known.sum() > least_known_share * len(steps):
        return trace
    tables = {"steps": _view(steps.select(is_known)), "phases": _view(phases.select(is_phase_known))}
    return replace(trace, tables={**trace.tables, **tables})


def _shows_waits(trace: RankTrace) -> bool:
    """Return whether waits for collectives can be distinguished from work; else all ranks seem to work alike."""
    if trace.header.world_size == 1 or (trace.tables["phases"]["phase"] == Phase.GRAD_SYNC).any():
        return True
    some = sound_stream(trace).blocks(0, 1)
    return not len(some) or bool(some["blocked_ns"].any())


def _are_known(rows: Table) -> Bools:
    return np.asarray((rows[DEVICE_BEGIN_COLUMN] != 0) & (rows[DEVICE_END_COLUMN] != 0))


def _view(rows: Table) -> Table:
    """Return rows whose begin and end are those of the device, and those of the host in columns of their own."""
    columns = {name: rows[_DEVICE_COLUMNS.get(name, name)] for name in rows if name not in _DEVICE_COLUMNS.values()}
    return Table({**columns, **{name: rows[of] for name, of in _HOST_COLUMNS.items()}})


def idle_by_phase(traces: Sequence[RankTrace], step: Ints) -> tuple[IdlePhase, ...]:
    """Return how long devices waited for their hosts in each phase, longest first; none where none waited.

    Args:
        traces: from `on_devices`.
        step: numbers of the steps to use, ascending, int64.
    """
    idle_ns, bounded_ns = np.zeros((2, NO_PHASE + 1))
    for trace in traces:
        if not is_on_device(trace):
            continue
        phases = trace.tables["phases"]
        rows = phases.select((phases["phase"] == Phase.IDLE) & np.isin(phases["step"], step))
        length_ns, during = rows["end_ns"] - rows["begin_ns"], rows[DURING_COLUMN]
        idle_ns += np.bincount(during, weights=length_ns, minlength=NO_PHASE + 1)
        bounded_ns += np.bincount(during, weights=length_ns * rows[BOUNDED_COLUMN], minlength=NO_PHASE + 1)
    scale = max(len(traces) * len(step), 1)
    return tuple(
        IdlePhase(
            phase=Phase(code).name.lower() if code != NO_PHASE else "other",
            idle_ns=float(idle_ns[code]) / scale,
            bounded_ns=float(bounded_ns[code]) / scale,
        )
        for code in idle_ns.argsort()[::-1].tolist()
        if idle_ns[code]
    )


def _stretches(view: RankTrace, trace: RankTrace) -> Stretches:
    """Return the stream between the marks of a rank."""
    steps, phases, of_host = view.tables["steps"], view.tables["phases"], trace.tables["phases"]
    times = (HOST_BEGIN_COLUMN, HOST_END_COLUMN, "begin_ns", "end_ns")
    collections = np.flatnonzero(of_host["phase"] == Phase.GC)
    collections = collections[np.argsort(of_host["begin_ns"][collections], kind="stable")]
    return stretches_between_marks(
        (steps["step"], *(steps[name] for name in times)),
        (phases["phase"], *(phases[name] for name in times)),
        (of_host["begin_ns"][collections], of_host["end_ns"][collections]),
    )


def _with_recorded_idle(view: RankTrace, idle: Table) -> RankTrace:
    """Return a trace with the phases in which its device was idle by its own record, cut where another phase begins."""
    phases, steps = view.tables["phases"], view.tables["steps"]
    begin_ns, end_ns = idle[DEVICE_BEGIN_COLUMN], idle[DEVICE_END_COLUMN]
    marks = np.concatenate([phases["begin_ns"], phases["end_ns"], steps["begin_ns"], steps["end_ns"]])
    edges = np.unique(np.concatenate([marks, begin_ns, end_ns]))
    own = innermost(begin_ns, end_ns, edges)
    around = innermost(phases["begin_ns"], phases["end_ns"], edges)
    row = np.searchsorted(steps["begin_ns"], edges[:-1], side="right") - 1
    kept = np.flatnonzero((own >= 0) & (row >= 0) & (edges[:-1] < steps["end_ns"][row]))
    begin_ns, end_ns = edges[:-1][kept], edges[1:][kept]
    during = np.append(phases["phase"].astype(np.int64), NO_PHASE)[around[kept]]
    is_bounded = np.zeros(len(kept), np.bool_)
    return _with_rows(view, [_idle_rows(steps["step"][row[kept]], Phase.IDLE, begin_ns, end_ns, during, is_bounded)])


def _idle_rows(
    step: Ints, phase: Phase, begin_ns: Ints, end_ns: Ints, during: Ints, is_bounded: Bools
) -> dict[str, NDArray[Any]]:
    """Return the columns of phases in which a device was idle."""
    return {
        "step": step,
        "phase": np.full(len(step), phase),
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "microbatch": np.full(len(step), -1),
        HOST_BEGIN_COLUMN: begin_ns,
        HOST_END_COLUMN: end_ns,
        DURING_COLUMN: during,
        BOUNDED_COLUMN: is_bounded,
    }


def _with_idle(view: RankTrace, stretches: Stretches, usual: NDArray[np.float64]) -> RankTrace:
    """Return a trace with phases in which its device was idle, in front of the marks at which it had run dry."""
    waited_ns, collected_ns = idle_ns(stretches, usual)
    found = []
    for phase, length_ns, end_ns in (
        (Phase.IDLE, waited_ns, stretches.end_ns - collected_ns),
        (Phase.GC, collected_ns, stretches.end_ns),
    ):
        rows = np.flatnonzero(length_ns)
        begin_ns, during = (end_ns - length_ns)[rows], stretches.phase[rows]
        is_bounded = np.isnan(usual[0, stretches.kind[rows]])
        found.append(_idle_rows(stretches.step[rows], phase, begin_ns, end_ns[rows], during, is_bounded))
    return _with_rows(view, found)


def _with_rows(view: RankTrace, found: Sequence[Mapping[str, NDArray[Any]]]) -> RankTrace:
    """Return a trace with further phases of the device, each given by its columns."""
    phases = view.tables["phases"]
    is_bounded = np.zeros(len(phases), np.bool_)
    own = {**{name: phases[name] for name in phases}, DURING_COLUMN: phases["phase"], BOUNDED_COLUMN: is_bounded}
    rows = [Table(own)]
    rows += [Table({name: columns[name].astype(rows[0][name].dtype) for name in rows[0]}) for columns in found]
    return replace(view, tables={**view.tables, "phases": join_tables(rows)})
