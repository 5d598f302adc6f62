"""The steps that a timeline shows, and processes with tracks of slices, arrows and counters, as a file for Perfetto.

The file is a sequence of protobuf messages `Trace` (perfetto/protos/perfetto/trace/trace.proto), whose concatenation
is one trace, so that only some packets are in memory at a time. Perfetto's own trace builder makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import CannotTell, UsageError, with_reasons
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import plural, printable, rank_list
from hpcpace.diagnosis.clocks import causality_of
from hpcpace.diagnosis.close_up import with_steps
from hpcpace.diagnosis.credible import CredibleThresholds, steps_apart_ns
from hpcpace.diagnosis.devices import on_devices
from hpcpace.diagnosis.evidence import TABLES_USED, StepOperations, TimedTraces, evidence_of, timed_traces
from hpcpace.diagnosis.incomplete import problems_of, sound_stream
from hpcpace.diagnosis.plot_source import regular_steps
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.steps import common_steps, is_warmup, step_times
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.tables import RankTrace

_MAX_NAME = 60

Argument = tuple[str, int | float | str]


class Slice(NamedTuple):
    """Something that lasts.

    Attributes:
        begin_ns, end_ns: on the common clock; without an end, it had none.
        name: what it is.
        arguments: what is known of it.
        from_here: numbers of arrows that leave it.
        to_here: numbers of arrows that end at it.
    """

    begin_ns: int
    end_ns: int | None
    name: str
    arguments: tuple[Argument, ...] = ()
    from_here: tuple[int, ...] = ()
    to_here: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Track:
    """Slices of one kind of a process; those that overlap without being nested are drawn in rows of their own."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A number over time.

    Attributes:
        unit: of its values.
        time_ns: on the common clock, ascending, int64, (num_values,).
        values: from each time on, float64, (num_values,).
    """

    name: str
    unit: str
    time_ns: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A rank, or a host with its interfaces.

    Attributes:
        name: as it is shown, with the number after it.
        number: unique among the processes, above 0; None for a group of tracks that is no process.
        outer: the track below which the others are shown in their order; without it, Perfetto orders those of a process
            by name.
    """

    name: str
    number: int | None
    outer: Track | None = None
    tracks: Sequence[Track] = ()
    counters: Sequence[Counter] = field(default=())


def nested_rows(slices: Iterable[Slice]) -> Iterator[list[tuple[int, Slice, bool]]]:
    """Yield the rows that slices are drawn in, each as marks in order of time: time, slice, whether it begins there.

    In a row every slice ends before the one around it. A slice goes into the first row that can take it.
    """
    rows: list[list[tuple[int, Slice, bool]]] = []
    opened: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: (one.begin_ns, -_end(one))):
        for marks, stack in zip(rows, opened, strict=True):
            while stack and _end(stack[-1]) <= one.begin_ns:
                last = stack.pop()
                marks.append((_end(last), last, False))
            if not stack or _end(one) <= _end(stack[-1]):
                break
        else:
            marks, stack = [], []
            rows.append(marks)
            opened.append(stack)
        marks.append((one.begin_ns, one, True))
        stack.append(one)
    for marks, stack in zip(rows, opened, strict=True):
        marks += [(_end(one), one, False) for one in reversed(stack) if one.end_ns is not None]
        yield marks


def _end(one: Slice) -> int:
    return one.end_ns if one.end_ns is not None else 1 << 62


def shown_name(name: str) -> str:
    """Return a name that comes from a file as it can be shown."""
    text = printable(name)
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 3]}..."


_PACKETS_AT_ONCE = 4096
_SEQUENCE = 1
_VALUES = {str: "string_value", float: "double_value", int: "int_value"}  # of a DebugAnnotation
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags


@dataclass
class Written:
    """What a file holds: its bytes, slices and arrows."""

    num_bytes: int = 0
    num_slices: int = 0
    num_arrows: int = 0


def write_processes(
    processes: Iterable[Process], write: Callable[[bytes, int], None], *, progress: Callable[[int], None]
) -> Written:
    """Write processes to a file, one after the other.

    Args:
        processes: what the file shows.
        write: writes bytes at an offset, which is that of the end of what was written before.
        progress: called with the number of processes written, after each.

    Raises:
        UsageError: the package perfetto is not installed.
    """
    writer = _Writer(_builder_module(), write)
    for number, process in enumerate(processes, start=1):
        writer.add_process(process)
        progress(number)
    writer.flush()
    return writer.written


def check_perfetto() -> None:
    """Raise what `write_processes` does where the package perfetto is not installed."""
    _builder_module()


def _builder_module() -> ModuleType:
    try:
        # Loads in 0.15 s, which only this command pays.
        from perfetto.trace_builder import proto_builder
    except ImportError as error:
        raise UsageError(
            f"a timeline is written with the package perfetto, which cannot be loaded ({error}): "
            "pip install 'hpcpace[timeline]'"
        ) from None
    return proto_builder  # type: ignore[no-any-return]


@dataclass
class _Writer:
    """Turns marks into packets; names are written once and numbered from then on."""

    module: ModuleType
    write: Callable[[bytes, int], None]
    written: Written = field(default_factory=Written)
    _names: dict[str, int] = field(default_factory=dict)
    _keys: dict[str, int] = field(default_factory=dict)
    _num_tracks: int = 0
    _num_waiting: int = 0
    _builder: Any = None

    def add_process(self, process: Process) -> None:
        """Add a process with all that it has."""
        descriptor = self._descriptor(None)
        parent = int(descriptor.uuid)
        descriptor.name = process.name  # tracks without a parent are in the order of names, those without one first
        if process.number is None:
            descriptor.child_ordering = descriptor.EXPLICIT
        else:
            descriptor.process.pid = process.number
            descriptor.process.process_name = process.name
            descriptor.process.legacy_sort_index = process.number
        if process.outer is not None:
            parent = self._add_track(process.outer, parent, 0)
        for order, track in enumerate(process.tracks):
            self._add_track(track, parent, order)
        for order, counter in enumerate(process.counters, start=len(process.tracks)):
            self._add_counter(counter, parent, order)

    def _add_track(self, track: Track, parent: int, order: int) -> int:
        """Add a track and return its number; below it, others are in their order."""
        first = 0
        for row in nested_rows(track.slices):
            # Rows of one name are drawn as one track of several lines.
            descriptor = self._descriptor(parent)
            descriptor.name, descriptor.sibling_order_rank = track.name, order
            descriptor.child_ordering = descriptor.EXPLICIT
            uuid = int(descriptor.uuid)
            first = first or uuid
            for time_ns, one, is_begin in row:
                self._add_mark(uuid, time_ns, one if is_begin else None)
        return first or parent

    def _add_mark(self, uuid: int, time_ns: int, begun: Slice | None) -> None:
        packet = self._packet()
        packet.timestamp = max(time_ns, 0)
        event = packet.track_event
        event.track_uuid = uuid
        if begun is None:
            event.type = event.TYPE_SLICE_END
            return
        event.type = event.TYPE_SLICE_BEGIN
        event.name_iid = self._number(packet, self._names, begun.name, packet.interned_data.event_names)
        event.flow_ids.extend(begun.from_here)
        event.terminating_flow_ids.extend(begun.to_here)
        keys = packet.interned_data.debug_annotation_names
        for key, value in begun.arguments:
            annotation = event.debug_annotations.add()
            annotation.name_iid = self._number(packet, self._keys, key, keys)
            setattr(annotation, _VALUES[type(value)], value)
        self.written.num_slices += 1
        self.written.num_arrows += len(begun.to_here)

    def _add_counter(self, counter: Counter, parent: int, order: int) -> None:
        descriptor = self._descriptor(parent)
        descriptor.name, descriptor.sibling_order_rank = f"{counter.name} ({counter.unit})", order
        descriptor.counter.unit_name = counter.unit
        uuid = int(descriptor.uuid)
        for time_ns, value in zip(counter.time_ns.tolist(), counter.values.tolist(), strict=True):
            packet = self._packet()
            packet.timestamp = max(time_ns, 0)
            event = packet.track_event
            event.track_uuid, event.type, event.double_counter_value = uuid, event.TYPE_COUNTER, value

    def _descriptor(self, parent: int | None) -> Any:
        self._num_tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._num_tracks
        if parent is not None:
            descriptor.parent_uuid = parent
        return descriptor

    def _packet(self) -> Any:
        """Return a new packet; the one before it is complete."""
        if self._num_waiting >= _PACKETS_AT_ONCE:
            self.flush()
        is_first = self._builder is None and not self.written.num_bytes
        if self._builder is None:
            self._builder = self.module.TraceProtoBuilder()
        self._num_waiting += 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = _STATE_CLEARED | _NEEDS_STATE if is_first else _NEEDS_STATE
        return packet

    def _number(self, packet: Any, known: dict[str, int], name: str, table: Any) -> int:
        """Return the number of a name, which its first packet brings along."""
        number = known.get(name)
        if number is None:
            number = known[name] = len(known) + 1
            entry = table.add()
            entry.iid, entry.name = number, name
        return number

    def flush(self) -> None:
        """Write what is waiting."""
        if self._builder is not None:
            content = self._builder.serialize()
            self.write(content, self.written.num_bytes)
            self.written.num_bytes += len(content)
        self._builder, self._num_waiting = None, 0


MAX_SLICES = 250_000
"""Slices of a timeline, unless more are allowed: about 16 MB, which a browser opens in seconds."""
TABLES_SHOWN = TABLES_USED | {"pacing", "network", "connections", "flows"}
_BESIDE_SLOWEST = 2
_MIN_RANKS = 16  # below, a timeline of fewer steps shows more
_MAX_READ = 6_000_000  # slices of all ranks: their waits are known only from all of them
_MAX_MISSING = 1 << 17
_SLICES_OF_OPERATION = 4  # the operation, and of those that waited, the wait, twice, and the transfer

Progress = Callable[[int, int], None]
"""Takes how many parts of a stage are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a timeline shows.

    Attributes:
        first, stop: steps, `first <= step < stop`; None leaves that end open.
        around: the step to show with its neighbours, in place of a range; None takes the slowest one.
        is_range: whether `first` and `stop` count.
        ranks: the ranks to show; None shows all.
        most_slices: about how many slices the file may have.
    """

    first: int | None = None
    stop: int | None = None
    around: int | None = None
    is_range: bool = False
    ranks: frozenset[int] | None = None
    most_slices: int = MAX_SLICES


@dataclass(frozen=True, kw_only=True)
class ShownSteps:
    """Some steps of a run.

    Attributes:
        recorded: the traces of the ranks as they were recorded, without operations.
        timed: the same with phases and steps on their devices where these are known, and the operations of the steps on
            the common clock.
        partner: for each operation the row of the last partner to enter, -1 where it waits for nobody.
        ranks: those to show, ascending.
        shift_ns: what brings a rank whose clock is unknown, or whose steps are at another time, to the others: its last
            step ends with theirs, by rank.
        span_ns: begin of the first and end of the last step, on the common clock.
        step: numbers of the steps, ascending, int64, (num_steps,).
        slowest: the step around which they are; None for a range.
        unfinished: the last step, not shown, with operations that never completed; None without any.
        problems: what could not be read or is not shown, a sentence each.
    """

    recorded: Sequence[RankTrace]
    timed: StepOperations
    partner: NDArray[np.int64]
    ranks: tuple[int, ...]
    shift_ns: dict[int, int]
    span_ns: tuple[int, int]
    step: NDArray[np.int64]
    slowest: int | None
    unfinished: int | None
    problems: tuple[str, ...]


def read_steps(
    attempt: Attempt, wanted: Wanted, *, memory_bytes: int, begin_stage: Callable[[str], Progress]
) -> ShownSteps:
    """Read the steps of an attempt that a timeline shows.

    Args:
        attempt: of a run.
        wanted: which steps of which ranks.
        memory_bytes: memory for the tables.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.

    Raises:
        TraceError: no trace can be read.
        UsageError: there are no such steps or ranks, or they make too many slices.
        CannotTell: no step can be shown.
    """
    found = read_attempt(
        attempt, progress=begin_stage("reading traces"), most_rows=0, tables=TABLES_SHOWN, memory_bytes=memory_bytes
    )
    recorded = sorted(found.traces, key=lambda trace: trace.header.rank)
    timed = timed_traces(on_devices(recorded))
    apart = _ranks_apart(timed)
    unknown_clocks, timed = timed.unknown_clocks, replace(timed, unknown_clocks=(*timed.unknown_clocks, *apart))
    step, slowest = _chosen_steps(timed, wanted, found.problems)
    num_shown = _num_shown(recorded, step, wanted)
    streams = [sound_stream(trace) for trace in timed.traces]
    stretch = [(int(step[0]), int(step[-1]) + 1)]
    evidence = evidence_of([with_steps(stream, stretch) for stream in streams], timed.clocks, timed.unknown_clocks)
    partner = last_partner(evidence.operations, evidence.matching)
    ranks = _shown_ranks(evidence, partner, num_shown, wanted.ranks)
    return ShownSteps(
        recorded=recorded,
        timed=evidence,
        partner=partner,
        ranks=ranks,
        shift_ns=_shifts(evidence, step),
        span_ns=_span(evidence, step),
        step=step,
        slowest=slowest,
        unfinished=_unfinished(recorded, step),
        problems=(
            *found.problems,
            *(problem for stream in streams for problem in problems_of(stream)),
            *_sentences(recorded, ranks, wanted, unknown_clocks, apart),
            *_contradiction(evidence),
        ),
    )


def _contradiction(evidence: StepOperations) -> Iterator[str]:
    """Yield that clocks are wrong by more than they say, where operations show it."""
    *_, size_ns, allowed_ns = causality_of(evidence).violations
    if count := int(np.count_nonzero(size_ns > allowed_ns)):
        yield (
            f"{plural(count, 'exit')} from collectives {'seems' if count == 1 else 'seem'} to come before the last rank"
            " has entered: a clock is wrong by more than its half-width, these waits are too long and have no arrows"
        )


def _unfinished(traces: Sequence[RankTrace], step: NDArray[np.int64]) -> int | None:
    """Return the last step with operations that never completed; None if it is among the given ones."""
    open_steps = np.concatenate([trace.open_collectives["step"] for trace in traces])
    last = int(open_steps.max(initial=-1))
    return None if last < 0 or last in step else last


def _ranks_apart(timed: TimedTraces) -> tuple[int, ...]:
    """Return the ranks whose steps are at another time than the same steps of the others."""
    rows = [row for row, rank in enumerate(timed.ranks) if rank not in timed.unknown_clocks]
    panel = common_steps([timed.traces[row].tables["steps"] for row in rows])
    if not len(panel):
        return ()
    begins = zip(rows, panel.begin_ns, strict=True)
    begin_ns = np.array([reference_times(timed.clocks[row], own_ns) for row, own_ns in begins])
    apart_ns = steps_apart_ns(begin_ns, float(np.median(panel.end_ns - panel.begin_ns)), CredibleThresholds())
    return tuple(timed.ranks[row] for row, ns in zip(rows, apart_ns.tolist(), strict=True) if ns)


def _sentences(
    traces: Sequence[RankTrace],
    ranks: Sequence[int],
    wanted: Wanted,
    unknown_clocks: Sequence[int],
    apart: Sequence[int],
) -> Iterator[str]:
    """Yield what a timeline lacks."""
    present = {trace.header.rank for trace in traces}
    missing = [rank for rank in range(min(world_size_of(traces), _MAX_MISSING)) if rank not in present]
    if missing:
        yield f"{rank_list(missing)} left no trace that can be read: waits for them are not known"
    if wanted.ranks and (beyond := sorted(rank for rank in wanted.ranks if rank >= world_size_of(traces))):
        yield f"the run has no {rank_list(beyond)} of --ranks: its ranks are 0 to {world_size_of(traces) - 1}"
    if wanted.ranks is None and len(ranks) < len(traces):
        yield (
            f"{len(ranks)} of {len(traces)} ranks are shown: those that others waited for longest, and some of the "
            "rest: --ranks chooses others, --slices allows more"
        )
    if unknown_clocks:
        yield (
            f"the clock of {rank_list(sorted(unknown_clocks))} is unknown: their steps are drawn as ending with the "
            "last one, without arrows"
        )
    if len(apart) == len(traces):
        yield (
            f"the steps of {rank_list(apart)} are at different times (another start, or wrong clocks): each is"
            " drawn as ending with the last one, without arrows"
        )
    elif apart:
        yield (
            f"the steps of {rank_list(apart)} are at another time than those of the others (another start, or a wrong "
            "clock): they are drawn as ending with the last one, without arrows"
        )


def _num_shown(traces: Sequence[RankTrace], step: NDArray[np.int64], wanted: Wanted) -> int:
    """Return how many ranks can be shown, before anything large is read.

    Raises:
        UsageError: there are no such ranks, or all together they have too many slices.
    """
    chosen = [trace for trace in traces if wanted.ranks is None or trace.header.rank in wanted.ranks]
    if not chosen:
        there = rank_list([trace.header.rank for trace in traces])
        raise UsageError(f"--ranks names no rank with a trace: this run has {there}")
    slices, rows = num_slices(chosen, step), num_slices(traces, step)
    num_fitting = len(chosen) * wanted.most_slices // max(slices, 1)
    least = len(chosen) if wanted.ranks is not None else min(_MIN_RANKS, len(chosen))
    if num_fitting < least or rows > _MAX_READ:
        raise UsageError(
            f"{plural(len(step), 'step')} of {plural(len(chosen), 'rank')} have about {slices} slices, more than "
            f"{wanted.most_slices}: choose fewer steps (--steps A:B) or ranks (--ranks), or allow more (--slices)"
        )
    return min(num_fitting, len(chosen))


def _shown_ranks(
    evidence: StepOperations, partner: NDArray[np.int64], num_shown: int, ranks: Collection[int] | None
) -> tuple[int, ...]:
    """Return the ranks to show: of too many, half are those that others waited for longest, half are spread."""
    chosen = [rank for rank in evidence.ranks if ranks is None or rank in ranks]
    if num_shown >= len(chosen):
        return tuple(chosen)
    waited = partner >= 0
    caused_ns = np.bincount(
        evidence.operations.rank[partner[waited]],
        weights=evidence.waits.wait_ns[waited],
        minlength=max(evidence.ranks) + 1,
    )
    latest = sorted(chosen, key=lambda rank: -caused_ns[rank])[: num_shown // 2]
    rest = sorted(set(chosen) - set(latest))
    spread = np.linspace(0, len(rest) - 1, num_shown - len(latest)).astype(np.int64)
    return tuple(sorted({*latest, *(rest[place] for place in spread.tolist())}))


def _chosen_steps(timed: TimedTraces, wanted: Wanted, problems: Sequence[str]) -> tuple[NDArray[np.int64], int | None]:
    """Return the steps that some rank has, ascending, and the one around which they are."""
    # A job that hangs or was killed left phases and operations of a step that has not ended.
    tables = [(*(trace.tables[name] for name in ("steps", "phases")), trace.open_collectives) for trace in timed.traces]
    own = [np.asarray(table["step"], np.int64) for of_rank in tables for table in of_rank]
    seen = np.unique(np.concatenate([np.zeros(0, np.int64), *own]))
    seen = seen[seen >= 0]
    if not len(seen):
        reason = "the job ended before its first one, steps were not marked, or its traces are damaged"
        raise CannotTell(with_reasons(f"no rank has recorded a step: {reason}", problems))
    if wanted.is_range:
        chosen = seen[(seen >= (wanted.first or 0)) & (seen < (wanted.stop if wanted.stop is not None else 1 << 62))]
        if not len(chosen):
            raise UsageError(
                f"--steps names no step of this run, which has {plural(len(seen), 'step')}, {seen[0]} to {seen[-1]}"
            )
        return chosen, None
    slowest = _slowest(timed) if wanted.around is None else wanted.around
    if slowest is None:
        slowest = int(seen[-1])
    near = seen[np.abs(seen - slowest) <= _BESIDE_SLOWEST]
    return (near if num_slices(timed.traces, near) <= wanted.most_slices else near[near == slowest]), slowest


def _slowest(timed: TimedTraces) -> int | None:
    """Return the slowest of the steps that all ranks have, without warm-up, checkpoint and evaluation if possible."""
    panel = common_steps([trace.tables["steps"] for trace in timed.traces])
    if not len(panel):
        return None
    common = timed.on_common_clock(panel)
    counts = regular_steps(panel.flags) & ~is_warmup(panel.flags)
    times_ns = step_times(panel.step, common.begin_ns[timed.known], common.end_ns[timed.known])
    return int(panel.step[int(np.argmax(np.where(counts, times_ns, -1) if counts.any() else times_ns))])


def num_slices(traces: Sequence[RankTrace], step: NDArray[np.int64]) -> int:
    """Return about how many slices some steps have, from the rows in memory and the mean number of operations."""
    total = 0.0
    for trace in traces:
        tables = trace.tables
        share = np.isin(tables["steps"]["step"], step).sum() / max(len(tables["steps"]), 1)
        total += np.isin(tables["phases"]["step"], step).sum() + len(step)
        total += len(tables["collectives"]) * share * _SLICES_OF_OPERATION
    return int(total)


def _span(evidence: StepOperations, step: NDArray[np.int64]) -> tuple[int, int]:
    """Return when the first rank with a known clock begins the steps and the last one ends them; 0 without any."""
    begins, ends = [], []
    for trace, clock in zip(evidence.traces, evidence.clocks, strict=True):
        rows = trace.tables["steps"]
        rows = rows.select(np.isin(rows["step"], step))
        if len(rows) and trace.header.rank not in evidence.unknown_clocks:
            begins.append(int(reference_times(clock, rows["begin_ns"]).min()))
            ends.append(int(reference_times(clock, rows["end_ns"]).max()))
    return (min(begins), max(ends)) if begins else (0, 0)


def _shifts(evidence: StepOperations, step: NDArray[np.int64]) -> dict[int, int]:
    """Return by how much the times of ranks with an unknown clock move, so that they end with the others."""
    ends: dict[int, int] = {}
    for trace, clock in zip(evidence.traces, evidence.clocks, strict=True):
        rows = trace.tables["steps"]
        mine = np.isin(rows["step"], step)
        if mine.any():
            ends[trace.header.rank] = int(reference_times(clock, rows["end_ns"][mine]).max())
    known = [end for rank, end in ends.items() if rank not in evidence.unknown_clocks]
    last = max(known or ends.values(), default=0)
    return {rank: last - end for rank, end in ends.items() if rank in evidence.unknown_clocks}
