"""Ranks that used a device, with the times of the device in place of those of the host.

The host of such a rank issues work and runs ahead of its device, so host times of its phases do not show what takes
time there. With those of the device, all figures are measured as on ranks without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.evidence import blocks_of_steps
from hpcpace.diagnosis.finding import IdlePhase
from hpcpace.diagnosis.incomplete import sound_stream
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.host_waits import (
    NO_PHASE,
    HostPaceThresholds,
    Stretches,
    following_hosts,
    idle_ns,
    stretches_between_marks,
    usual_lengths,
)
from hpcpace.metrics.issue_leads import Issued, IssuedPieces, cut_at_operations, sure_work
from hpcpace.metrics.operations import is_of_devices
from hpcpace.metrics.phases import innermost
from hpcpace.trace.reader import RankTrace, Table
from hpcpace.trace.schema import DEVICE_BEGIN_COLUMN, DEVICE_END_COLUMN, ENQUEUE_COLUMN, Phase
from hpcpace.trace.tables import join_tables

_OF_HOST = (Phase.GC, Phase.PACE, Phase.OTHER)
"""Phases that may be the host's alone: the device goes on meanwhile, as far as it has work."""


@dataclass(frozen=True, kw_only=True)
class DeviceThresholds(Thresholds, topic="devices"):
    """When times of a device replace those of its host."""

    least_known_share: float = number(0.5, "share")
    """Share of the steps whose times on the device must be known: with fewer, the host's are used."""
    close_bounds: float = number(0.05, "share")
    """Difference between the bounds of idle time, as a share of the phase, up to which it counts as known."""


_DEVICE_COLUMNS = {"begin_ns": DEVICE_BEGIN_COLUMN, "end_ns": DEVICE_END_COLUMN}
DURING_COLUMN, BOUNDED_COLUMN, LEAST_COLUMN, SINCE_COLUMN = "during", "is_bounded", "least_ns", "since_ns"
_MIN_IDLE = 0.01  # speed: share that ranks may be idle at most from which operations are looked at
_MAX_SAMPLED_RANKS, _NUM_SAMPLES, _SAMPLED_STEPS = 4, 4, 8  # speed: of a role, whose leads at operations are read
HOST_BEGIN_COLUMN, HOST_END_COLUMN = "host_begin_ns", "host_end_ns"
_HOST_COLUMNS = {HOST_BEGIN_COLUMN: "begin_ns", HOST_END_COLUMN: "end_ns"}


def has_device(trace: RankTrace) -> bool:
    """Return whether a rank used a device, as its columns or the backends of its process groups say."""
    has_columns = ENQUEUE_COLUMN in trace.tables["collectives"] or DEVICE_BEGIN_COLUMN in trace.tables["phases"]
    return has_columns or any(is_of_devices(name) for name in trace.tables["groups"].different("backend"))


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
        return ~_is_of_host(trace, operations)
    return np.full(len(operations), not has_device(trace))


def _is_of_host(trace: RankTrace, operations: Table) -> Bools:
    """Return which operations the host did, as over gloo, bool, (num_operations,): those that begin as it issues them.

    So may one of a device that has run dry, whose group then says so by its backend.
    """
    groups = trace.tables["groups"]
    of_devices = [name for name in groups.different("backend") if is_of_devices(name)]
    numbers = np.unique(groups["id"][np.isin(groups["backend"], of_devices)])
    begins_at_once = operations["enter_ns"] == operations[ENQUEUE_COLUMN]
    return np.asarray(begins_at_once & ~np.isin(operations["group"], numbers))


def on_devices(traces: Sequence[RankTrace], thresholds: ThresholdValues | None = None) -> list[RankTrace]:
    """Return traces with steps and phases as the device did them, where that is known; others as they are.

    Begin and end are those of the device then, and columns `host_begin_ns` and `host_end_ns` have those of the host.
    Phases of the host alone are left out, as are steps of which a time or a phase is not known there. Where the device
    waited for its host, phases IDLE or GC say so, whose column `during` has the phase around them, `is_bounded` whether
    they last that long at most, `least_ns` how long at least, and `since_ns` from when on, at the earliest. A rank of
    which more than half of the steps would be left out, or whose collectives have no times of the device, keeps its
    host times, as does one that shows no wait for its collectives: neither how long they held its stream, nor a phase
    grad_sync.

    Where a trace has phases of the device being idle itself, they are taken in place of what marks of the stream show.
    """
    thresholds = thresholds or ThresholdValues()
    least_known_share = thresholds.of(DeviceThresholds).least_known_share
    views = [_on_device(trace, least_known_share) for trace in traces]
    changed = [index for index, view in enumerate(views) if is_on_device(view) and view is not traces[index]]
    pace = thresholds.of(HostPaceThresholds)
    stretches = [_stretches(views[index], traces[index], pace) for index in changed]
    # Tensor parallelism divides the work of a stage evenly: all its ranks show how long devices work.
    role = np.unique([traces[index].header.pp for index in changed], return_inverse=True)[1].tolist()
    of_role: dict[int, list[int]] = {}
    for index, of in zip(changed, role, strict=True):
        of_role.setdefault(of, []).append(index)
    samples = _sampled_pieces([traces[index] for index in changed], stretches, role)
    shown = {key: follows for key, pieces in samples.items() if (follows := pieces.is_following()) is not None}
    if stretches:
        stretches = following_hosts(stretches, role, shown, pace)
    found = dict(zip(changed, stretches, strict=True))
    work = {}
    for key, members in of_role.items():
        usual_ns = usual_lengths([found[index] for index in members], pace)
        bounds_ns = {kind: pieces.work_bounds() for (of, kind), pieces in samples.items() if of == key}
        following = frozenset(kind for (of, kind), follows in shown.items() if of == key and follows)
        limits = pace.last_share, thresholds.of(DeviceThresholds).close_bounds
        shared = _Work(usual_ns, bounds_ns, following, *limits)
        work.update(dict.fromkeys(members, shared))
    for index in changed:
        recorded = traces[index].tables["phases"]
        recorded = recorded.select(recorded["phase"] == Phase.IDLE)
        views[index] = (
            _with_recorded_idle(views[index], recorded)
            if len(recorded)
            else _with_idle(views[index], found[index], work[index], traces[index])
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
    nothing = np.zeros(NO_PHASE + 1)
    idle_ns, bounded_ns, least_ns = nothing.copy(), nothing.copy(), nothing.copy()
    for trace in traces:
        if not is_on_device(trace):
            continue
        phases = trace.tables["phases"]
        rows = phases.select((phases["phase"] == Phase.IDLE) & np.isin(phases["step"], step))
        length_ns, during = rows["end_ns"] - rows["begin_ns"], rows[DURING_COLUMN]
        idle_ns += np.bincount(during, weights=length_ns, minlength=NO_PHASE + 1)
        bounded_ns += np.bincount(during, weights=length_ns * rows[BOUNDED_COLUMN], minlength=NO_PHASE + 1)
        least_ns += np.bincount(during, weights=rows[LEAST_COLUMN], minlength=NO_PHASE + 1)
    scale = max(len(traces) * len(step), 1)
    return tuple(
        IdlePhase(
            phase=Phase(code).name.lower() if code != NO_PHASE else "other",
            idle_ns=float(idle_ns[code]) / scale,
            bounded_ns=float(bounded_ns[code]) / scale,
            least_ns=float(least_ns[code]) / scale,
        )
        for code in idle_ns.argsort()[::-1].tolist()
        if idle_ns[code]
    )


def _stretches(view: RankTrace, trace: RankTrace, limits: HostPaceThresholds) -> Stretches:
    """Return the stream between the marks of a rank."""
    steps, phases, of_host = view.tables["steps"], view.tables["phases"], trace.tables["phases"]
    times = (HOST_BEGIN_COLUMN, HOST_END_COLUMN, "begin_ns", "end_ns")
    collections = np.flatnonzero(of_host["phase"] == Phase.GC)
    collections = collections[np.argsort(of_host["begin_ns"][collections], kind="stable")]
    return stretches_between_marks(
        (steps["step"], *(steps[name] for name in times)),
        (phases["phase"], *(phases[name] for name in times)),
        (of_host["begin_ns"][collections], of_host["end_ns"][collections]),
        limits,
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
        LEAST_COLUMN: end_ns - begin_ns,
        SINCE_COLUMN: begin_ns,
    }


@dataclass(frozen=True)
class _Work:
    """What ranks of a role show of the work in stretches.

    Attributes:
        usual_ns: from `usual_lengths`.
        bounds_ns: of each kind, the least and the most work in its pieces, each (num_pieces,).
        following: kinds in which leads show that devices follow their hosts.
        last_share: of a piece of another kind, what may be left at the end of one in which the device was idle.
        close: difference of these, as a share of stretches, up to which the work is known.
    """

    usual_ns: Floats
    bounds_ns: Mapping[int, tuple[Floats, Floats]]
    following: frozenset[int]
    last_share: float
    close: float


def _sampled_pieces(
    traces: Sequence[RankTrace], stretches: Sequence[Stretches], role: Sequence[int]
) -> dict[tuple[int, int], IssuedPieces]:
    """Return pieces between operations of some steps of a few ranks, by role and kind, where devices may be idle."""
    found = {}
    for key in sorted(set(role)):
        members = [index for index, of in enumerate(role) if of == key]
        share = {index: stretches[index].most_idle_ns.sum() / stretches[index].length_ns.sum() for index in members}
        if max(share.values()) <= _MIN_IDLE:
            continue
        # Hosts that are ahead show how long devices work.
        members.sort(key=lambda index: float(share[index]))
        sampled = []
        for index in dict.fromkeys([*members[: _MAX_SAMPLED_RANKS // 2], *members[-_MAX_SAMPLED_RANKS // 2 :]]):
            # What a host that collects garbage holds up says nothing about how it issues work.
            own = stretches[index].select(stretches[index].collected_ns == 0)
            steps = np.unique(own.step)
            some = sampled_steps(steps, _NUM_SAMPLES, _SAMPLED_STEPS)
            sampled.append((own.select(np.isin(own.step, some)), issued_operations(traces[index], some)))
        kinds = {kind for some, _ in sampled for kind in np.unique(some.kind).tolist()}
        found.update({(key, kind): IssuedPieces.of(sampled, kind) for kind in sorted(kinds)})
    return found


def sampled_steps(step: Ints, num_samples: int, length: int) -> Ints:
    """Return some stretches of steps, evenly spread; `step` is ascending, int64, (num_steps,), at least one."""
    first = np.linspace(0, max(len(step) - length, 0), num_samples).astype(np.int64)
    return np.asarray(step[np.unique(np.minimum(first[:, None] + np.arange(length), len(step) - 1))])


def issued_operations(trace: RankTrace, step: Ints | None = None) -> Issued:
    """Return what the host of a rank issued to its device, in some steps or all; what gloo does is work of the host."""
    stream = sound_stream(trace)
    blocks = [(0, stream.num_blocks)]
    if step is not None:
        parts = np.split(step, np.flatnonzero(np.diff(step) > 1) + 1)
        blocks = blocks_of_steps(stream, [(int(part[0]), int(part[-1]) + 1) for part in parts])
    names = {"issue_ns": ENQUEUE_COLUMN, "enter_ns": "enter_ns", "exit_ns": "exit_ns", "blocked_ns": "blocked_ns"}
    columns = {name: [np.zeros(0, np.int64)] for name in names}
    for block in (at for first, stop in blocks for at in range(first, stop)):
        rows = stream.blocks(block, block + 1)
        is_own = (rows[ENQUEUE_COLUMN] != 0) & ~_is_of_host(trace, rows)
        rows = rows.select(is_own if step is None else is_own & np.isin(rows["step"], step))
        for name, of in names.items():
            columns[name].append(rows[of])
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(whole["issue_ns"], kind="stable")
    return Issued(**{name: values[order] for name, values in whole.items()})


def _with_idle(view: RankTrace, stretches: Stretches, work: _Work, trace: RankTrace) -> RankTrace:
    """Return a trace with phases in which its device was idle, in front of the marks at which it had run dry."""
    waited_ns, collected_ns = idle_ns(stretches, work.usual_ns)
    is_bounded = (waited_ns > 0) & np.isnan(work.usual_ns[0, stretches.kind])
    cut, found = _idle_pieces(stretches, work, trace, is_bounded)
    waited_ns[cut] = 0
    for phase, length_ns, least_ns, end_ns in (
        (Phase.IDLE, waited_ns, np.where(is_bounded, 0, waited_ns), stretches.end_ns - collected_ns),
        (Phase.GC, collected_ns, collected_ns, stretches.end_ns),
    ):
        rows = np.flatnonzero(length_ns)
        begin_ns, during = (end_ns - length_ns)[rows], stretches.phase[rows]
        own = _idle_rows(stretches.step[rows], phase, begin_ns, end_ns[rows], during, is_bounded[rows])
        found.append({**own, LEAST_COLUMN: least_ns[rows], SINCE_COLUMN: stretches.begin_ns[rows]})
    return _with_rows(view, found)


def _idle_pieces(
    stretches: Stretches, work: _Work, trace: RankTrace, is_bounded: Bools
) -> tuple[Ints, list[dict[str, NDArray[Any]]]]:
    """Return the stretches whose idle time is known by pieces, and phases in which the device was idle in these.

    Args:
        stretches: of the rank.
        work: of its role.
        trace: the rank's.
        is_bounded: which stretches follow their host while it is not known how long the device works in them.
    """
    issued, pieces = None, []
    for kind, bounds_ns in work.bounds_ns.items():
        low_ns, high_ns = bounds_ns
        is_kind = (stretches.kind == kind) & (stretches.collected_ns == 0)
        is_close = (high_ns - low_ns).sum() <= work.close * stretches.length_ns
        rows = np.flatnonzero(is_kind & (is_close | is_bounded))
        if stretches.most_idle_ns[rows].any():
            issued = issued_operations(trace) if issued is None else issued
            cut, columns = cut_at_operations(stretches.select(rows), issued, len(low_ns))
            whole = stretches.select(rows[cut])
            # A host that gets ahead of its device is faster, whatever its leads depend on.
            grown_ns = whole.lead_after_ns - whole.lead_before_ns
            follows = (kind in work.following) & (grown_ns <= 2 * work.last_share * whole.length_ns)
            is_shown = is_bounded[rows[cut]] | follows
            _, _, own_ns, _, most_idle_ns, _, lead_after_ns = columns
            most_idle_ns[~is_shown[:, None] & (lead_after_ns > work.last_share * own_ns)] = 0
            pieces.append((rows[cut], columns, bounds_ns, is_close[rows[cut]]))
    shown = [sure_work(own_ns, most_ns, bounds_ns) for _, (_, _, own_ns, _, most_ns, *_), bounds_ns, _ in pieces]
    own, usual = np.sum([(0.0, 0.0), *shown], axis=0)
    pace = own / usual if usual else 1.0  # a slow device works longer than others of its role, and is not idle
    found = []
    for rows, (begin_ns, end_ns, own_ns, _, most_ns, *_), (low_ns, high_ns), is_close in pieces:
        low, high = (pace * np.where(is_close[:, None], (low_ns + high_ns) / 2, one) for one in (low_ns, high_ns))
        idle, least = (np.clip(own_ns - work_ns, 0, most_ns).astype(np.int64) for work_ns in (low, high))
        some = np.nonzero(idle > _MIN_IDLE * (end_ns - begin_ns))
        of = rows[some[0]]
        during, is_open = stretches.phase[of], ~is_close[some[0]]
        marks = _idle_rows(stretches.step[of], Phase.IDLE, (end_ns - idle)[some], end_ns[some], during, is_open)
        found.append({**marks, LEAST_COLUMN: least[some], SINCE_COLUMN: begin_ns[some]})
    return np.concatenate([np.zeros(0, np.int64), *(rows for rows, *_ in pieces)]), found


def _with_rows(view: RankTrace, found: Sequence[Mapping[str, NDArray[Any]]]) -> RankTrace:
    """Return a trace with further phases of the device, each given by its columns."""
    phases = view.tables["phases"]
    is_bounded = np.zeros(len(phases), np.bool_)
    own = {**{name: phases[name] for name in phases}, DURING_COLUMN: phases["phase"], BOUNDED_COLUMN: is_bounded}
    own |= {LEAST_COLUMN: np.zeros(len(phases), np.int64), SINCE_COLUMN: phases["begin_ns"]}
    rows = [Table(own)]
    rows += [Table({name: columns[name].astype(rows[0][name].dtype) for name in rows[0]}) for columns in found]
    return replace(view, tables={**view.tables, "phases": join_tables(rows)})
