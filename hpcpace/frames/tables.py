"""The frames of a run, the columns of each made from its traces, and how much of a run a frame covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hpcpace.audit.settings import AuditConfig
from hpcpace.core.errors import TraceError, UsageError, with_reasons
from hpcpace.core.records import dataclass
from hpcpace.core.text import format_ranges, rank_list
from hpcpace.diagnosis.clocks import rank_clock_figures
from hpcpace.diagnosis.evidence import StepOperations, iter_share, share_of_steps
from hpcpace.diagnosis.incomplete import SoundStream, sound_stream
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.operation_figures import operation_transfers
from hpcpace.diagnosis.plot_source import clock_errors_ns
from hpcpace.diagnosis.within_steps import held_up_by_rank
from hpcpace.frames.columns import Columns, Texts, Values, nothing, texts_of
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.communication import bus_factors, bytes_per_s
from hpcpace.metrics.flows import Flows, InterfaceUse, counter_steps, in_window
from hpcpace.metrics.operations import MESSAGES, is_one_of, op_name
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK, Part, without_waits
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.steps import StepPanel, columns_of, is_warmup
from hpcpace.metrics.waits import HeldUp, exposed_waits_ns
from hpcpace.trace.schema import ExitKind, Phase, StepFlag
from hpcpace.trace.tables import RankTrace

_CELLS = 200_000
"""Memory: rows of steps, about, of one block of a frame."""
_GROWN = (
    *("cpu_time_ns", "run_wait_ns", "cpu_throttled_ns", "cpu_pressure_ns", "involuntary_switches", "major_faults"),
    *("tcp_retransmits", "nic_drops", "gpu_ecc_corrected", "gpu_ecc_uncorrected", "gpu_pcie_replays"),
)
"""Counters of the table `host` of a trace: a frame has what they grew by."""
_GAUGES = (
    *("rss_bytes", "gpu_memory_bytes", "gpu_clock_mhz", "gpu_max_clock_mhz", "gpu_temperature_c"),
    *("gpu_power_mw", "gpu_power_limit_mw"),
)
"""What that table has as of a time."""


def ranks(extent: Extent) -> Columns:
    """Return who took part."""
    headers = [trace.header for trace, _ in extent.traces()]
    numbers = ("rank", "node", "local_rank", "dp", "pp", "tp")
    return {
        **{name: np.array([getattr(header, name) for header in headers], np.int64) for name in numbers},
        "host": texts_of([header.host for header in headers]),
        "role": extent.measured.role[extent.rows],
        "is_clock_known": extent.is_clock_known,
    }


def steps(extent: Extent) -> Columns:
    """Return when each rank did each step."""
    measured, common = extent.measured, extent.common
    chosen, num_ranks = measured.chosen.select(extent.columns), len(extent.rows)
    begin_ns, end_ns = (
        np.where(extent.is_clock_known[:, None], times_ns[extent.rows] - extent.origin_ns, np.nan).T.ravel()
        for times_ns in (common.begin_ns, common.end_ns)
    )
    return {
        **_step_and_rank(extent),
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "duration_ns": (chosen.end_ns - chosen.begin_ns)[extent.rows].T.ravel(),
        "step_time_ns": np.repeat(measured.times_ns[extent.columns], num_ranks),
        "samples": np.repeat(chosen.samples, num_ranks),
        "is_warmup": np.repeat(is_warmup(chosen.flags), num_ranks),
        "is_checkpoint": np.repeat((chosen.flags & StepFlag.CHECKPOINT) != 0, num_ranks),
        "is_eval": np.repeat((chosen.flags & StepFlag.EVAL) != 0, num_ranks),
    }


def parts(extent: Extent) -> Columns:
    """Return what each rank spent each step on; NaN where that is not known.

    Where waits cannot be distinguished from transfers, they are NaN, and in the transfers.
    """
    measured = extent.measured
    found = measured.parts[np.ix_(extent.rows, extent.columns)]
    for row, rank in enumerate(extent.ranks.tolist()):
        if rank in measured.host_timed:
            found[row] = np.nan
        elif rank in measured.unknown_waits:
            found[row] = without_waits(found[row])
    by_step = np.swapaxes(found, 0, 1).reshape(-1, len(Part))
    excess_ns = measured.excess_ns
    excess = np.full(found.shape[:2], np.nan) if excess_ns is None else excess_ns[np.ix_(extent.rows, extent.columns)]
    sums = {"work_ns": OWN_WORK, "exposed_wait_ns": EXPOSED_WAIT, "exposed_transfer_ns": EXPOSED_TRANSFER}
    return {
        **_step_and_rank(extent),
        **{f"{part.name.lower()}_ns": by_step[:, part] for part in Part},
        **{name: by_step[:, list(of)].sum(axis=1) for name, of in sums.items()},
        "excess_ns": excess.T.ravel(),
    }


def phases(extent: Extent) -> Columns:
    """Return the phases of each rank, rank after rank in the order in which they ended."""
    step, found = extent.step, []
    for trace, clock in extent.traces():
        table = trace.tables["phases"]
        rows = table.select(columns_of(step, np.asarray(table["step"], np.int64)) >= 0)
        found.append(
            {
                "step": rows["step"].astype(np.int64),
                "rank": np.full(len(rows), trace.header.rank),
                "phase": rows["phase"].astype(np.int64),
                "microbatch": rows["microbatch"].astype(np.int64),
                "begin_ns": extent.times_ns(trace, clock, rows["begin_ns"]),
                "end_ns": extent.times_ns(trace, clock, rows["end_ns"]),
                "duration_ns": rows["end_ns"] - rows["begin_ns"],
            }
        )
    if not found:
        return nothing("phases")
    columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    names, known = tuple(phase.name.lower() for phase in Phase), columns["phase"]
    return {**columns, "phase": Texts(names, np.where(known < len(names), known, -1))}


def connections(extent: Extent) -> Columns:
    """Return what each TCP connection of the ranks carried, interval by interval."""
    flows, places = extent.measured.flows, extent.measured.places
    if flows is None:
        return nothing("connections")
    ends, of = flows.connections, flows.connection
    numbers = np.append(ends.rank, -1)[of]
    rows = _during(extent, flows)
    rows = rows[np.isin(numbers[rows], extent.ranks)]
    of = of[rows]
    texts = {
        "host": [places.node_names[node] for node in ends.node.tolist()],
        "peer_host": [places.node_names[node] if node >= 0 else "" for node in ends.peer_node.tolist()],
        "interface": list(ends.interface or ("",) * len(ends.rank)),
        "local": list(ends.local),
        "remote": list(ends.remote),
    }
    counted = ("sent_bytes", "acked_bytes", "received_bytes", "retransmitted_bytes", "busy_ns", "receiver_limited_ns")
    others = ("sender_limited_ns", "rtt_ns", "least_rtt_ns", "unsent_bytes")
    return {
        "rank": numbers[rows],
        "peer_rank": np.append(ends.peer_rank, -1)[of],
        **{name: _of_rows(values, of) for name, values in texts.items()},
        **_interval(extent, flows, rows),
        **{name: getattr(flows, name)[rows] for name in (*counted, *others)},
    }


def network(extent: Extent) -> Columns:
    """Return what each network interface carried, interval by interval; that of all hosts of the run."""
    use = extent.measured.interfaces
    if use is None:
        return nothing("network")
    rows = _during(extent, use)
    of = use.interface[rows]
    rate = np.where(use.line_rate_bps > 0, use.line_rate_bps, np.nan)
    counted = ("sent_bytes", "received_bytes", "errors", "drops", "pauses", "marks")
    return {
        "host": _of_rows([host for host, _ in use.names], of),
        "interface": _of_rows([interface for _, interface in use.names], of),
        "line_rate_bps": rate[of],
        **_interval(extent, use, rows),
        **{name: getattr(use, name)[rows] for name in counted},
    }


def hosts(extent: Extent) -> Columns:
    """Return what the host did to each rank, interval by interval; ranks whose clock is unknown are left out."""
    of_ranks = [_host_rows(extent, trace, clock) for trace, clock in extent.traces()]
    found = [part for part in of_ranks if part is not None]
    if not found:
        return nothing("hosts")
    columns: dict[str, Values] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    host = {trace.header.rank: trace.header.host for trace, _ in extent.traces()}
    return {**columns, "host": texts_of([host[rank] for rank in np.asarray(columns["rank"]).tolist()])}


def _host_rows(extent: Extent, trace: RankTrace, clock: CommonClock) -> dict[str, Any] | None:
    table = trace.tables["host"]
    if not len(table) or trace.header.rank in extent.measured.timed.unknown_clocks:
        return None
    steps_of = counter_steps(np.zeros(len(table), np.int64), table, (), _GROWN)
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps_of.begin_ns, steps_of.end_ns))
    first_ns, last_ns = extent.window_ns
    middle_ns = begin_ns + (end_ns - begin_ns) // 2
    rows = np.flatnonzero((middle_ns >= first_ns) & (middle_ns < last_ns))
    nan = np.full(len(rows), np.nan)
    # A counter that is 0 in all rows of a trace is one that the host does not have.
    grown = {name: steps_of.grown[name][rows].astype(np.float64) if table[name].any() else nan for name in _GROWN}
    gauges = {name: table[name][steps_of.last_row[rows]].astype(np.float64) for name in _GAUGES}
    return {
        "rank": np.full(len(rows), trace.header.rank),
        "begin_ns": begin_ns[rows] - extent.origin_ns,
        "end_ns": end_ns[rows] - extent.origin_ns,
        **grown,
        **{name: np.where(values != 0, values, np.nan) for name, values in gauges.items()},
    }


def clocks(extent: Extent) -> Columns:
    """Return how well the times of each rank compare with those of others."""
    measured = extent.measured
    figures = rank_clock_figures(measured.timed, measured.chosen.select(extent.columns))
    chosen = [figures[row] for row in extent.rows.tolist()]
    headers = [trace.header for trace, _ in extent.traces()]
    times = [one.times if one.times is not None and len(one.times.time_ns) else None for one in chosen]

    def floats(values: list[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([np.nan if value is None else value for value in values], np.float64)

    return {
        "rank": extent.ranks,
        "host": texts_of([header.host for header in headers]),
        "is_known": extent.is_clock_known,
        "is_reference": np.array([one.is_reference for one in chosen], np.bool_),
        "num_samples": np.array([one.num_samples for one in chosen], np.int64),
        "halfwidth_ns": floats([one and np.median(one.halfwidth_ns) for one in times]),
        "max_halfwidth_ns": floats([one and one.halfwidth_ns.max() for one in times]),
        "extrapolated_share": floats([one and one.extrapolated.mean() for one in times]),
        "residual_ns": floats([one.residual_ns for one in chosen]),
        "drift_ppm": floats([one.drift_ppm for one in chosen]),
    }


def audit(extent: Extent) -> Columns:
    """Return the findings of the audit on the snapshots of the run; none without snapshots."""
    if not extent.judged.snapshots:
        return nothing("audit")
    # All rules take longer to load than the frames of a run without snapshots.
    from hpcpace.audit.job import AuditedJob
    from hpcpace.audit.rulebook import run_rules

    found = run_rules(AuditedJob(extent.judged.snapshots, extent.judged.config.of(AuditConfig))).findings
    names = ("rule", "severity", "host", "place", "seen", "cost", "fix")
    return {
        **{name: texts_of([str(getattr(finding, name)) for finding in found]) for name in names},
        "ranks": texts_of([format_ranges(sorted(finding.ranks)) for finding in found]),
    }


_OF_STEPS: Mapping[str, Callable[[Extent], Columns]] = {"steps": steps, "parts": parts, "phases": phases}
_WHOLE: Mapping[str, Callable[[Extent], Columns]] = {
    "ranks": ranks,
    "connections": connections,
    "network": network,
    "hosts": hosts,
    "clocks": clocks,
    "audit": audit,
}


def blocks(extent: Extent, table: str) -> Iterator[Columns]:
    """Yield the columns of a frame in blocks of steps; those without steps are one block.

    Raises:
        TraceError: a file of operations has changed since the run was measured.
    """
    if table == "collectives":
        yield from operations(extent)
        return
    if table in _WHOLE:
        yield _WHOLE[table](extent)
        return
    for part in extent.blocks(max(_CELLS // max(len(extent.rows), 1), 1)):
        yield _OF_STEPS[table](part)


def _step_and_rank(extent: Extent) -> dict[str, Values]:
    return {
        "step": np.repeat(extent.step, len(extent.rows)),
        "rank": np.tile(extent.ranks, len(extent.columns)),
    }


def _during(extent: Extent, rows: Flows | InterfaceUse) -> Ints:
    """Return the rows in the time of the steps."""
    begin_ns, end_ns = extent.window_ns
    return np.flatnonzero(in_window(rows, begin_ns, end_ns))


def _interval(extent: Extent, of: Flows | InterfaceUse, rows: Ints) -> dict[str, Values]:
    return {"begin_ns": of.begin_ns[rows] - extent.origin_ns, "end_ns": of.end_ns[rows] - extent.origin_ns}


def _of_rows(values: list[str], index: Ints) -> Texts:
    """Return the text that each row has by its index, an empty one for -1."""
    texts = texts_of([*values, ""])
    return Texts(texts.names, texts.code[index])


MAX_ROWS = 250_000
"""Memory: rows of a range of steps of all ranks, about; a frame takes some 250 bytes for each."""


def operations(extent: Extent) -> Iterator[Columns]:
    """Yield the completed operations of some steps and ranks, rank after rank within ranges of steps.

    Waits are known from all ranks, whatever ranks are asked for.

    Raises:
        TraceError: a file has changed since the run was measured.
    """
    if not len(extent.columns):
        return
    timed, step = extent.measured.timed, extent.step
    streams = [sound_stream(stream.original) for stream in extent.measured.operations.streams]
    share = share_of_steps(streams, step, extent.measured.panel.num_seen, max_rows=MAX_ROWS)
    held_up = held_up_by_rank(timed)
    numbers: dict[object, int] = {}
    for _, evidence in iter_share(streams, timed, share):
        done = evidence.operations
        chosen = np.flatnonzero((columns_of(step, done.step) >= 0) & np.isin(done.rank, extent.ranks))
        ids = np.array([numbers.setdefault(group, len(numbers)) for group in done.groups] + [-1], np.int64)
        if len(chosen):
            yield _columns(extent, evidence, held_up, chosen, ids)
        del evidence, done  # before the next range is read
    _check_unchanged(extent, streams)


def _check_unchanged(extent: Extent, streams: Sequence[SoundStream]) -> None:
    """Refuse rows that could be read when the run was measured, and no longer.

    Raises:
        TraceError: there are some.
    """
    pairs = zip(streams, extent.measured.operations.streams, strict=True)
    lost = [now.damaged[block] for now, before in pairs for block in now.damaged if block not in before.damaged]
    if lost:
        raise TraceError(
            with_reasons(f"{extent.judged.attempt.path} has changed since it was opened: open it anew", lost)
        )


def _columns(
    extent: Extent, evidence: StepOperations, held_up: dict[int, HeldUp | None], rows: Ints, ids: Ints
) -> dict[str, Values]:
    done, matching, waits = evidence.operations, evidence.matching, evidence.waits
    held = [held_up[rank] for rank in np.unique(done.rank).tolist()]
    exposed_ns = exposed_waits_ns(done, waits.wait_ns, held)[rows]
    partner, is_matched = last_partner(done, matching)[rows], matching.is_matched[rows]
    longest_ns, is_seen = operation_transfers(evidence)
    instance, is_message = matching.instance[rows], is_one_of(done.op[rows], MESSAGES)
    whole_ns = _known(longest_ns[instance], is_matched & (is_seen[instance] | ~is_message))
    is_sound = (whole_ns > _clock_error_ns(extent, evidence)[instance]) & ~waits.may_contradict[instance]
    algorithm = bytes_per_s(done.size_bytes[rows], np.where(is_sound, whole_ns, np.nan))
    group_size = done.group_size[rows]
    is_clock_known = ~np.isin(done.rank[rows], list(evidence.unknown_clocks))
    return {
        **{name: getattr(done, name)[rows] for name in ("step", "rank", "seq", "size_bytes", "peer", "blocked_ns")},
        "op": _op_names(done.op[rows].astype(np.int64)),
        "group": Texts(*_group_names(evidence, done.group[rows])),
        "group_id": ids[done.group[rows]],
        "group_size": group_size,
        "end": Texts(tuple(kind.name.lower() for kind in ExitKind), _codes(done.exit_kind[rows], len(ExitKind))),
        "enter_ns": _known(done.enter_ns[rows] - extent.origin_ns, is_clock_known),
        "exit_ns": _known(done.exit_ns[rows] - extent.origin_ns, is_clock_known),
        "duration_ns": done.exit_ns[rows] - done.enter_ns[rows],
        "is_matched": is_matched,
        "wait_ns": _known(waits.wait_ns[rows], is_matched),
        "exposed_wait_ns": _known(exposed_ns, is_matched),
        "transfer_ns": _known(waits.transfer_ns[rows], is_matched),
        "operation_transfer_ns": whole_ns,
        "late_rank": np.where(partner >= 0, done.rank[partner], -1),
        "algorithm_bytes_per_s": algorithm,
        "bus_bytes_per_s": algorithm * bus_factors(done.op[rows], group_size),
    }


def _clock_error_ns(extent: Extent, evidence: StepOperations) -> Floats:
    """Return the error of the transfer of each operation, float64, (num_instances,).

    It is two half-widths between hosts, and none on one host. It is not known where a clock may be wrong.
    """
    done, instance, num_instances = evidence.operations, evidence.matching.instance, len(evidence.matching.num_rows)
    of_row = np.searchsorted(evidence.ranks, done.rank)
    node = np.array([trace.header.node for trace in evidence.traces], np.int64)[of_row]
    lowest, highest = np.full(num_instances, np.iinfo(np.int64).max), np.full(num_instances, -1)
    np.minimum.at(lowest, instance, node)
    np.maximum.at(highest, instance, node)
    widest_ns = np.zeros(num_instances)
    np.maximum.at(widest_ns, instance, clock_errors_ns(extent.measured)[of_row])
    return np.where(lowest == highest, 0.0, 2 * widest_ns)


def _known(values: Ints, is_known: Bools) -> Floats:
    return np.where(is_known, values, np.nan)


def _codes(values: Bytes, num_names: int) -> Ints:
    return np.where(values < num_names, values.astype(np.int64), -1)


def _op_names(op: Ints) -> Texts:
    found, code = np.unique(op, return_inverse=True)
    return Texts(tuple(op_name(one) for one in found.tolist()), code.astype(np.int64))


def _group_names(evidence: StepOperations, group: Ints) -> tuple[tuple[str, ...], Ints]:
    """Return the names of groups, each once, and the index of that of each row, -1 where it is unknown."""
    number: dict[str, int] = {}
    code = [number.setdefault(one.name, len(number)) for one in evidence.operations.groups]
    return tuple(number), np.array([*code, -1], np.int64)[group]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Some steps and ranks of a run.

    Attributes:
        judged: the run, measured.
        columns: positions of the steps among the used ones, ascending, int64, (num_steps,).
        rows: positions of the ranks among the measured ones, ascending, int64, (num_ranks,).
    """

    judged: JudgedAttempt
    columns: Ints
    rows: Ints

    @classmethod
    def whole(cls, judged: JudgedAttempt) -> Extent:
        """Return all of a run."""
        measured = judged.measured
        return cls(judged=judged, columns=np.arange(len(measured.chosen)), rows=np.arange(len(measured.timed.ranks)))

    def narrowed(self, first: int | None, stop: int | None, ranks: Collection[int] | None) -> Extent:
        """Return what of it is in the steps `first <= step < stop` and on some ranks; None does not narrow.

        Raises:
            UsageError: it lacks one of these ranks.
        """
        step, rank = self.step, self.ranks
        if ranks is not None and (missing := sorted(set(ranks) - set(rank.tolist()))):
            there = rank_list(rank.tolist())
            raise UsageError(f"the selection names {rank_list(missing)}, and the figures of this run have {there}")
        is_kept = np.ones(len(step), np.bool_)
        if first is not None:
            is_kept &= step >= first
        if stop is not None:
            is_kept &= step < stop
        rows = self.rows if ranks is None else self.rows[np.isin(rank, list(ranks))]
        return replace(self, columns=self.columns[is_kept], rows=rows)

    def blocks(self, num_steps: int) -> Iterator[Extent]:
        """Yield it in blocks of at most so many steps, at least one block."""
        for begin in range(0, max(len(self.columns), 1), num_steps):
            yield replace(self, columns=self.columns[begin : begin + num_steps])

    @property
    def measured(self) -> Measured:
        """What was measured of the whole run."""
        return self.judged.measured

    @property
    def step(self) -> Ints:
        """Numbers of the steps, ascending, int64, (num_steps,)."""
        return self.measured.chosen.step[self.columns]

    @property
    def ranks(self) -> Ints:
        """Numbers of the ranks, ascending, int64, (num_ranks,)."""
        return np.array(self.measured.timed.ranks, np.int64)[self.rows]

    @property
    def common(self) -> StepPanel:
        """The steps of all ranks on the common clock."""
        return self.measured.common.select(self.columns)

    @cached_property
    def origin_ns(self) -> int:
        """Time 0 of all frames on the common clock: the first begin of the first used step."""
        return int(self.measured.common.begin_ns[self.measured.timed.known, 0].min())

    @property
    def window_ns(self) -> tuple[int, int]:
        """Begin of the first and end of the last step on ranks with a known clock; both 0 without steps."""
        if not len(self.columns):
            return 0, 0
        known, common = self.measured.timed.known, self.common
        return int(common.begin_ns[known, 0].min()), int(common.end_ns[known, -1].max())

    @property
    def is_clock_known(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether times of each rank can be compared with those of others, bool, (num_ranks,)."""
        return ~np.isin(self.ranks, list(self.measured.timed.unknown_clocks))

    def traces(self) -> Iterator[tuple[RankTrace, CommonClock]]:
        """Yield the trace and the clock of each rank."""
        timed = self.measured.timed
        for row in self.rows.tolist():
            yield timed.traces[row], timed.clocks[row]

    def times_ns(self, trace: RankTrace, clock: CommonClock, local_ns: Ints) -> Floats:
        """Return times of a rank since `origin_ns`, float64, (num_times,); NaN where its clock is unknown."""
        if trace.header.rank in self.measured.timed.unknown_clocks:
            return np.full(len(local_ns), np.nan)
        return (reference_times(clock, local_ns) - self.origin_ns).astype(np.float64)
