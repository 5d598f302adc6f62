"""The tables of a trace from one profile: steps, phases, operations, and idle devices.

The device passes a mark of its host when all kernels launched before it have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.metrics.clock_suspects import ClockBounds
from hpcpace.runs.imports.imported_run import UNKNOWN_GROUP, Rows, rows_of
from hpcpace.runs.imports.kineto_profile import MAX_GROUPS, Calls, Profile
from hpcpace.trace.schema import NO_STEP, NUMBER_BITS, Op, Phase

Int64Array = NDArray[np.int64]

_NEVER_NS = np.iinfo(np.int64).min
# What begins so shortly before a kernel of NCCL ends still waited for it.
_GRAIN_NS = 10_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device did: work is kernels and copies, but for collectives.

    Attributes:
        launched_ns: when each piece of work was launched, ascending, (num_pieces,).
        done_ns: when all work that was launched until then had ended, (num_pieces,).
        begin_ns: begins of all work, ascending.
        ended_ns: until when some work was running that had begun by then, (num_pieces,).
    """

    launched_ns: Int64Array
    done_ns: Int64Array
    begin_ns: Int64Array
    ended_ns: Int64Array

    @classmethod
    def of(cls, profile: Profile) -> Device:
        """Return the device of a profile that has its work."""
        work = profile.kernels.rows
        launched = launched_ns(work, profile)
        by_launch, by_begin = np.argsort(launched, kind="stable"), np.argsort(work["begin_ns"], kind="stable")
        return cls(
            launched_ns=launched[by_launch],
            done_ns=np.maximum.accumulate(work["end_ns"][by_launch]),
            begin_ns=work["begin_ns"][by_begin],
            ended_ns=np.maximum.accumulate(work["end_ns"][by_begin]),
        )

    def at(self, host_ns: Int64Array) -> Int64Array:
        """Return when the device passed marks that the host made: all work launched before had ended by then."""
        done_ns = np.append(_NEVER_NS, self.done_ns)[np.searchsorted(self.launched_ns, host_ns, side="left")]
        return np.asarray(np.maximum(done_ns, host_ns), np.int64)

    def held_ns(self, enter_ns: Int64Array, exit_ns: Int64Array) -> Int64Array:
        """Return for how long before each collective ended the device did nothing else."""
        busy_until = np.append(0, self.ended_ns)[np.searchsorted(self.begin_ns, exit_ns - _GRAIN_NS, side="left")]
        return np.asarray(np.maximum(exit_ns - np.maximum(enter_ns, busy_until), 0), np.int64)


def idle_rows(profile: Profile, device: Device, steps: Int64Array, calls: _Calls) -> Rows:
    """Return the phases in which the device had nothing to do, from what ended last to what began next.

    IDLE is the host's: it launched what began next after all else had ended. OTHER is the device's own, as between the
    kernels of a graph, or nobody's, where the launch is not known; the shortest of it is no more than a launch takes.
    Each step has IDLE, at least without length at its end, which says that idle time is known.

    Args:
        profile: what its kernels are taken from.
        device: the same as a device.
        steps: number, begin and end of each step, int64, (num_steps, 3).
        calls: the collectives, which are no other work.
    """
    work = profile.kernels.rows
    begins, ends = (np.append(work[name], calls.rows[name]) for name in ("begin_ns", "end_ns"))
    launched = np.append(launched_ns(work, profile), calls.enqueue_ns)
    order = np.argsort(begins, kind="stable")
    from_ns, to_ns, launched = np.maximum.accumulate(ends[order])[:-1], begins[order][1:], launched[order][1:]
    is_host = (launched >= from_ns) & (launched < to_ns)
    is_idle = to_ns - from_ns > np.where(is_host, 0, _GRAIN_NS)
    from_ns, to_ns, is_host = from_ns[is_idle], to_ns[is_idle], is_host[is_idle]
    first_ns, last_ns = device.at(steps[:, 1]), device.at(steps[:, 2])
    first = np.searchsorted(last_ns, from_ns, side="right")
    num_steps = np.maximum(np.searchsorted(first_ns, to_ns, side="left") - first, 0)
    of = np.repeat(np.arange(len(from_ns)), num_steps)
    row = first[of] + np.arange(len(of)) - (np.cumsum(num_steps) - num_steps)[of]
    from_ns = np.append(np.maximum(from_ns[of], first_ns[row]), last_ns)
    to_ns = np.append(np.minimum(to_ns[of], last_ns[row]), last_ns)
    return rows_of(
        "phases",
        has_device=profile.has_device,
        step=np.append(steps[row, 0], steps[:, 0]),
        phase=np.where(np.append(is_host[of], np.ones(len(steps), np.bool_)), int(Phase.IDLE), int(Phase.OTHER)),
        begin_ns=from_ns,
        end_ns=to_ns,
        microbatch=-1,
        device_begin_ns=from_ns,
        device_end_ns=to_ns,
    )


def device_columns(device: Device | None, begin_ns: Int64Array, end_ns: Int64Array) -> dict[str, Int64Array]:
    """Return the columns that say when a device passed begins and ends of its host; none without a device."""
    if device is None:
        return {}
    return {"device_begin_ns": device.at(begin_ns), "device_end_ns": device.at(end_ns)}


def launched_ns(kernels: Rows, profile: Profile) -> Int64Array:
    """Return when the host launched each kernel; where that is not known, when it began."""
    link, begin_ns = kernels["link"], np.asarray(kernels["begin_ns"], np.int64)
    launches = profile.launches.rows
    if not len(launches):
        return begin_ns
    launches = launches[np.argsort(launches["link"], kind="stable")]
    launches = launches[np.minimum(np.searchsorted(launches["link"], link), len(launches) - 1)]
    is_known = (launches["link"] == link) & (link != 0)
    return np.where(is_known, np.minimum(launches["time_ns"], begin_ns), begin_ns)


_NO_GROUP = ""
_HOST_TIMES = ("begin_ns", "end_ns", "enter_ns", "exit_ns")
_BEGINS = (("steps", "begin_ns"), ("phases", "begin_ns"), ("collectives", "enter_ns"))


@dataclass(frozen=True, kw_only=True)
class ProfileRows:
    """One profile as rows.

    Attributes:
        profile: the profile.
        tables: rows by table, without `groups` and `clock`; `group` of `collectives` is the place in `groups`.
        groups: names of the process groups with operations.
        num_ungrouped: operations whose process group is not known, which match no other rank's.
        has_numbers: whether operations have recorded numbers, and not those of their places in steps.
        step_source: how steps were found.
        shows_device: whether it is known what its device did in some steps, or without any.
        clock: offset to the clock of the rank `reference`; None where there is one clock for all, or nothing says it.
    """

    profile: Profile
    tables: dict[str, Rows]
    groups: tuple[str, ...]
    num_ungrouped: int
    has_numbers: bool
    step_source: str
    shows_device: bool
    clock: ClockBounds | None = None
    reference: int = 0


def rows_of_profile(profile: Profile) -> ProfileRows:
    """Return the tables of a profile.

    Raises:
        TraceError: it has more than a trace can hold.
    """
    steps, source = _steps(profile)
    device = Device.of(profile) if profile.shows_device else None
    calls, unknown = _calls(profile), np.zeros(0, np.int64)
    if len(profile.unnamed):
        unknown = _unknown_steps(profile, device, steps)
        device = None if len(unknown) == len(steps) else device
    groups = tuple(sorted({name for name in calls.group if name != _NO_GROUP}))
    if len(groups) > MAX_GROUPS:
        raise TraceError(f"it has {len(groups)} process groups, and a trace has at most {MAX_GROUPS}")
    phases = _phases(profile, steps, calls, device)
    if device is not None and len(steps):
        known = steps[~np.isin(steps[:, 0], unknown)]
        phases = np.concatenate([phases, idle_rows(profile, device, known, calls)])
    collectives, num_ungrouped, has_numbers = _collectives(profile, calls, steps, groups, device, phases, unknown)
    tables = {
        "steps": rows_of(
            "steps",
            has_device=profile.has_device,
            step=steps[:, 0],
            begin_ns=steps[:, 1],
            end_ns=steps[:, 2],
            **device_columns(device, steps[:, 1], steps[:, 2]),
        ),
        "phases": phases,
        "collectives": collectives,
    }
    for table in ("steps", "phases") if device is not None else ():
        is_unknown = np.isin(tables[table]["step"], unknown)
        for name in ("device_begin_ns", "device_end_ns"):
            tables[table][name][is_unknown] = 0
    shift_times(tables, profile.base_ns)
    return ProfileRows(
        profile=profile,
        tables=tables,
        groups=groups,
        num_ungrouped=num_ungrouped,
        has_numbers=has_numbers,
        step_source=source,
        shows_device=device is not None,
    )


def _unknown_steps(profile: Profile, device: Device | None, steps: Int64Array) -> Int64Array:
    """Return the numbers of steps in which a kernel of NCCL ran or was launched that does not say what it does."""
    kernels = profile.unnamed.rows
    first_ns, last_ns = (steps[:, place] if device is None else device.at(steps[:, place]) for place in (1, 2))
    begun = np.searchsorted(np.sort(kernels["begin_ns"]), last_ns, side="left")
    ended = np.searchsorted(np.sort(kernels["end_ns"]), first_ns, side="right")
    of_launch = _step_at(steps, launched_ns(kernels, profile))
    return np.union1d(steps[begun > ended, 0], of_launch[of_launch != NO_STEP])


def first_ns(tables: Mapping[str, Rows]) -> int:
    """Return the earliest time of tables; 0 without rows."""
    begins = [tables[table][name] for table, name in _BEGINS if len(tables[table])]
    return min((int(begin.min()) for begin in begins), default=0)


def shift_times(tables: Mapping[str, Rows], by_ns: int) -> None:
    """Add to all times of tables, in place; of devices and launches 0 means not known, and stays."""
    for rows in tables.values():
        for name in rows.dtype.names or ():
            if name in _HOST_TIMES:
                rows[name] += by_ns
            elif name.endswith("_ns") and name != "blocked_ns":
                rows[name] = np.where(rows[name] != 0, rows[name] + by_ns, 0)


def _steps(profile: Profile) -> tuple[Int64Array, str]:
    """Return number, begin and end of each step, int64, (num_steps, 3), and how they were found."""
    if profile.steps:
        return _recorded_steps(profile.steps)
    ends = _update_ends(profile)
    if not len(ends):
        return np.zeros((0, 3), np.int64), "none: no ProfilerStep and no optimizer step is in the profile"
    begins = [begin for _, begin, _ in profile.marks] + profile.backward.rows["begin_ns"][:1].tolist()
    begin_ns = np.append(min(begins), ends[:-1])
    return np.stack([np.arange(len(ends)), begin_ns, ends], axis=1), "the ends of optimizer steps"


def _recorded_steps(recorded: list[tuple[int, int, int]]) -> tuple[Int64Array, str]:
    """Return steps in the order of time, numbered anew where numbers do not ascend, as in a file of several profiles.

    Where more than a step's time is between two steps, a number is left out: they do not follow each other.
    """
    rows = np.array(sorted(set(recorded), key=lambda step: step[1:]), np.int64)
    rows[:-1, 2] = np.minimum(rows[:-1, 2], rows[1:, 1])  # none goes on while the next one does
    source = "ProfilerStep of torch.profiler"
    more = np.diff(rows[:, 0])
    if (more > 0).all():
        return rows, source
    is_apart = rows[1:, 1] - rows[:-1, 2] > np.median(rows[:, 2] - rows[:, 1])
    rows[1:, 0] = rows[0, 0] + np.cumsum(np.where(more > 0, more, np.where(is_apart, 2, 1)))
    return rows, f"{source}, numbered in order of time, for its numbers repeat or fall"


def _update_ends(profile: Profile) -> Int64Array:
    """Return when the parameters were updated: the end of the last optimizer step before the model works again.

    So several optimizers that step one after the other end one step, where the profile shows work of the model.
    """
    intervals = np.array(_outermost(profile.optimizer), np.int64).reshape(-1, 2)
    marked = [begin for phase, begin, _ in profile.marks if phase in (Phase.FORWARD, Phase.BACKWARD)]
    works_ns = np.sort(np.append(profile.backward.rows["begin_ns"], np.array(marked, np.int64)))
    if not len(works_ns):
        return intervals[:, 1]
    num_before = np.searchsorted(works_ns, intervals[:, 0])
    is_last = np.append(np.diff(num_before) > 0, True)[: len(intervals)]
    return np.asarray(intervals[is_last, 1], np.int64)


def _outermost(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals that lie in no other one, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def _step_at(steps: Int64Array, times_ns: Int64Array) -> Int64Array:
    """Return the step that each time is in, or that began last before it; NO_STEP before the first."""
    return np.append(NO_STEP, steps[:, 0])[np.searchsorted(steps[:, 1], times_ns, side="right")]


# -- phases


def _phases(profile: Profile, steps: Int64Array, calls: _Calls, device: Device | None) -> Rows:
    """Return annotations that say what they are, backward passes as autograd shows them, and waits in these."""
    found: list[tuple[int, int, int]] = []
    for phase in {phase for phase, _, _ in profile.marks}:
        of_phase = [(begin, end) for kind, begin, end in profile.marks if kind == phase]
        found += [(phase, begin, end) for begin, end in _outermost(of_phase)]
    if not any(phase == Phase.BACKWARD for phase, _, _ in found):
        found += _backward(profile, steps, calls, is_on_host=device is None)
    found.sort(key=lambda row: (row[1], -row[2]))
    rows = np.array(found, np.int64).reshape(-1, 3)
    return rows_of(
        "phases",
        has_device=profile.has_device,
        step=_step_at(steps, rows[:, 1]),
        phase=rows[:, 0],
        begin_ns=rows[:, 1],
        end_ns=rows[:, 2],
        microbatch=-1,
        **device_columns(device, rows[:, 1], rows[:, 2]),
    )


def _backward(profile: Profile, steps: Int64Array, calls: _Calls, *, is_on_host: bool) -> list[tuple[int, int, int]]:
    """Return a backward pass a step, from the first function of autograd to the last one's end.

    On hosts, autograd then waits for the collectives that it began: that is grad_sync, part of the pass.
    """
    begins, ends = (np.sort(profile.backward.rows[name]) for name in ("begin_ns", "end_ns"))
    if not len(begins) or not len(steps):
        return []
    enter_ns, exit_ns = calls.rows["begin_ns"], calls.rows["end_ns"]
    firsts = np.searchsorted(begins, steps[:, 1], side="left")
    found = []
    for place, (first, after) in enumerate(pairwise([*firsts.tolist(), len(begins)])):
        if first == after:
            continue
        begin, end = int(begins[first]), int(ends[after - 1])
        waited_until = end
        if is_on_host:
            until = min(end, int(steps[place, 2]))
            inside = slice(np.searchsorted(enter_ns, begin), np.searchsorted(enter_ns, until, side="right"))
            waited_until = max(end, int(exit_ns[inside].max(initial=end)))
            waited_until = min(waited_until, int(steps[place, 2]))
        if waited_until > end:
            found.append((int(Phase.GRAD_SYNC), end, waited_until))
        found.append((int(Phase.BACKWARD), begin, waited_until))
    return found


# -- operations


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """The operations that took place in a profile, in the order in which they were entered.

    Attributes:
        rows: as of `Calls`, from when a rank entered them until it left them.
        enqueue_ns: when they were launched, int64, (num_operations,).
        group: name of the process group of each; of the only one where none is named, empty where it is not known.
    """

    rows: Rows
    enqueue_ns: Int64Array
    group: list[str]


def _calls(profile: Profile) -> _Calls:
    """Return the operations that took place: kernels of NCCL, or operations of gloo.

    An operation of gloo is entered when c10d is called, which its own record begins some time after, and has ended when
    the next optimizer step begins, which may be noticed later.
    """
    kernels = profile.nccl or profile.gloo
    found, names = kernels.rows.copy(), kernels.group
    if kernels is profile.gloo:
        order = np.argsort(found["begin_ns"], kind="stable")
        found, names = found[order], [names[at] for at in order.tolist()]
        _call_from_c10d(found, profile.c10d)
        _end_before_optimizer(found, profile)
        if sorted(profile.comms.rows["op"]) == sorted(found["op"]):
            for name in ("seq", "size_bytes", "peer"):  # in the order of calls, as the operations are
                found[name] = profile.comms.rows[name]
            names = profile.comms.group
        elif not any(names):
            found["seq"], found["size_bytes"], found["peer"] = -1, 0, -1
        enqueue_ns = found["begin_ns"].copy()
    else:
        enqueue_ns = launched_ns(found, profile)
    found["end_ns"] = np.maximum(found["end_ns"], found["begin_ns"])
    order = np.argsort(found["begin_ns"], kind="stable")
    names = [name if name in profile.groups else _NO_GROUP if name else profile.only_group for name in names]
    return _Calls(rows=found[order], enqueue_ns=enqueue_ns[order], group=[names[at] for at in order.tolist()])


def _call_from_c10d(found: Rows, c10d: Calls) -> None:
    """Begin operations when they were called: the n-th of a kind by the n-th call, where there are as many."""
    for kind in np.unique(found["op"]).tolist():
        own = found["op"] == kind
        calls_ns = np.sort(c10d.rows["begin_ns"][c10d.rows["op"] == kind])
        if own.sum() == len(calls_ns) and (calls_ns <= found["begin_ns"][own]).all():
            found["begin_ns"][own] = calls_ns


def _end_before_optimizer(found: Rows, profile: Profile) -> None:
    begins = np.array([*sorted(begin for begin, _ in profile.optimizer), np.iinfo(np.int64).max], np.int64)
    at = np.searchsorted(begins, found["begin_ns"], side="left")
    found["end_ns"] = np.minimum(found["end_ns"], begins[at])


def _collectives(
    profile: Profile,
    calls: _Calls,
    steps: Int64Array,
    groups: tuple[str, ...],
    device: Device | None,
    phases: Rows,
    unknown: Int64Array,
) -> tuple[Rows, int, bool]:
    """Return the operations, how many are of an unknown group, and whether their numbers are recorded ones.

    In steps that lack some, a place says nothing: without recorded numbers, operations of `unknown` ones match nothing.
    """
    found = calls.rows
    number = {name: place for place, name in enumerate(groups)}
    group = np.array([number.get(name, UNKNOWN_GROUP) for name in calls.group], np.int64)
    peer = [
        members[to] if 0 <= to < len(members := profile.groups[name] if name in number else ()) else -1
        for name, to in zip(calls.group, found["peer"].tolist(), strict=True)
    ]
    step = _step_at(steps, found["begin_ns"] if device is None else calls.enqueue_ns)
    is_launch_known = not profile.has_kernels or profile.has_launches
    columns = {"enqueue_ns": calls.enqueue_ns if is_launch_known else 0} if profile.has_device else {}
    channel = _channels(group, found["op"], np.array(peer, np.int64))
    has_numbers = _has_numbers(found["seq"], channel, found["op"])
    if not has_numbers:
        group = np.where(np.isin(step, unknown), UNKNOWN_GROUP, group)
    rows = rows_of(
        "collectives",
        has_device=profile.has_device,
        step=step,
        group=group,
        seq=found["seq"] if has_numbers else _places(channel, step),
        op=found["op"],
        bytes=found["size_bytes"],
        peer=np.array(peer, np.int64),
        enter_ns=found["begin_ns"],
        exit_ns=found["end_ns"],
        blocked_ns=_blocked_ns(profile, found, phases)
        if device is None
        else device.held_ns(found["begin_ns"], found["end_ns"]),
        **columns,
    )
    return rows, int((group == UNKNOWN_GROUP).sum()), has_numbers


def _channels(group: Int64Array, op: Int64Array, peer: Int64Array) -> Int64Array:
    """Return what operations are numbered in: their group, and that of messages to a peer, (3, num_operations)."""
    is_message = (op == Op.SEND) | (op == Op.RECV)
    return np.stack([group, np.where(is_message, op, -1), np.where(is_message, peer, -1)])


def _has_numbers(seq: Int64Array, channel: Int64Array, op: Int64Array) -> bool:
    """Return whether each operation has a recorded number of its own."""
    is_recorded = bool(len(seq)) and bool((seq >= 0).all())
    return is_recorded and np.unique(np.vstack([channel, op, seq]), axis=1).shape[1] == len(seq)


def _places(channel: Int64Array, step: Int64Array) -> Int64Array:
    """Return the number of each operation without a recorded one: its step, and its place there.

    So ranks whose profiles begin in different steps agree, whatever came before.
    """
    keys = np.vstack([channel, step])
    order = np.lexsort(keys)
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(keys[:, order]) != 0).any(axis=0)
    index = np.arange(len(order))
    place = np.empty(len(order), np.int64)
    place[order] = index - np.maximum.accumulate(np.where(new, index, 0))
    return (np.maximum(step, 0) << NUMBER_BITS) + place


def _blocked_ns(profile: Profile, calls: Rows, phases: Rows) -> Int64Array:
    """Return for how long callers were blocked by operations of the host.

    Of the function of autograd that began last before an operation ended: if it has ended, too, it is waited for from
    then on; if it goes on, it began either before the operation, and waits in it, or after, and nothing waits. What a
    backward pass leaves under way is waited for in the phase grad_sync.
    """
    enter_ns, exit_ns = calls["begin_ns"], calls["end_ns"]
    functions = profile.backward.rows
    functions = functions[np.argsort(functions["begin_ns"], kind="stable")]
    begins, ends = (np.append(_NEVER_NS, functions[name]) for name in ("begin_ns", "end_ns"))
    last = np.searchsorted(begins, exit_ns, side="left") - 1
    waits_inside = (ends[last] > exit_ns) & (begins[last] <= enter_ns)
    since_ns = np.where(waits_inside, enter_ns, np.clip(ends[last], enter_ns, exit_ns))
    left_ns = phases["begin_ns"][phases["phase"] == Phase.GRAD_SYNC]
    next_left_ns = np.append(left_ns, np.iinfo(np.int64).max)[np.searchsorted(left_ns, enter_ns, side="left")]
    return np.where(exit_ns > next_left_ns, 0, exit_ns - since_ns)
