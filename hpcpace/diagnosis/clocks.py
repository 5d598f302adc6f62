"""The common clock: its certified bound, its measured error, contradictions to causality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.evidence import StepOperations, TimedTraces
from hpcpace.diagnosis.summary import ClockJump, Clocks, ClockSuspect, HostPair
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.clock_suspects import Contradictions, Suspect, contradictions, judge, pair_violations, proven_leads
from hpcpace.metrics.common_clock import CommonClock, ReferenceTimes
from hpcpace.metrics.operations import synchronises
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.schema import ENQUEUE_COLUMN, RESOLUTION_NS

_MAX_VIOLATIONS = 10_000_000  # memory: pairs of operations that are searched
_MAX_SUSPECTS = 16  # display: hosts in summary.json
_PARTS_PER_MILLION = 1e6  # format: units
_ROUNDING_NS = RESOLUTION_NS["collectives"]["enter_ns"]
DEVICE_ERROR_NS = 100_000
"""Format: error of device times. A thread that sees the device idle ties them to the host's; lengths are float32."""


@dataclass(frozen=True, kw_only=True)
class ClockThresholds(Thresholds, topic="clocks"):
    """When clocks are doubted that no operation proves wrong."""

    max_early_share: float = number(0.01, "share")
    """Exits before the last enter beyond the half-widths, for each synchronising operation, up to which transfers are
    judged. In an all_to_all a rank may leave early because it hears from no other, so they prove no clock wrong; but
    whatever the reason, transfers that end before they begin are none.
    """
    max_rate_difference: float = number(0.0011, "share")
    """Difference of the rates of two clocks, beyond which one has jumped: the kernel slews each by 500 ppm at most
    (adjtimex), and crystals differ by up to 100.
    """


def are_exits_early(clocks: Clocks, limits: ClockThresholds) -> bool:
    """Return whether so many exits come before the last enter that transfers cannot be judged."""
    num_early = sum(pair.num_unexplained for pair in clocks.pairs)
    return num_early > limits.max_early_share * max(clocks.num_checked, 1)


@dataclass(frozen=True, kw_only=True)
class Causality:
    """What operations say against the clocks.

    Attributes:
        num_checked: operations of two ranks or more that nobody leaves before all have entered.
        num_negative: rows that exit before the last enter.
        num_messages: messages received before they were sent.
        leads_ns: by how much the clock of node b is ahead of that of a at least, by (a, b).
        violations: such rows, of the first operations that have some, as the columns, each (num_violations,), that
            `hpcpace.metrics.clock_suspects.pair_violations` takes.
    """

    num_checked: int
    num_negative: int
    num_messages: int
    leads_ns: Mapping[tuple[int, int], int]
    violations: tuple[NDArray[Any], ...]


def causality_of(evidence: StepOperations) -> Causality:
    """Return what the operations say against the clocks."""
    done, matching = evidence.operations, evidence.matching
    first = matching.first
    sizes = np.array([*(len(group.ranks) for group in done.groups), 0], np.int64)
    is_checked = matching.is_matched[first] & synchronises(done.op[first]) & (sizes[done.group[first]] > 1)
    found = contradictions(done, matching, evidence.waits)
    return Causality(
        num_checked=int(is_checked.sum()),
        num_negative=int(np.count_nonzero(evidence.waits.negative_ns)),
        num_messages=found.num_messages,
        leads_ns=_leads_ns(evidence, found),
        violations=_violations(evidence),
    )


def join_causality(parts: Sequence[Causality]) -> Causality:
    """Return what parts of a run say together; at least one, all of the same ranks."""
    leads_ns: dict[tuple[int, int], int] = {}
    for part in parts:
        for pair, lead_ns in part.leads_ns.items():
            leads_ns[pair] = max(lead_ns, leads_ns.get(pair, lead_ns))
    return Causality(
        num_checked=sum(part.num_checked for part in parts),
        num_negative=sum(part.num_negative for part in parts),
        num_messages=sum(part.num_messages for part in parts),
        leads_ns=leads_ns,
        violations=tuple(
            np.concatenate(column)[:_MAX_VIOLATIONS]
            for column in zip(*(part.violations for part in parts), strict=True)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RankClock:
    """How well the times of one rank compare with those of the reference.

    Attributes:
        num_samples: its own synchronisations.
        is_reference: whether it is the reference itself.
        times: the ends of its steps on the common clock, with bounds of their error; None where its clock is unknown.
        residual_ns: largest leave-one-out residual; None with fewer than 3 samples.
        drift_ppm: drift against the reference; None with fewer than 2.
    """

    num_samples: int
    is_reference: bool
    times: ReferenceTimes | None
    residual_ns: float | None
    drift_ppm: float | None


def rank_clock_figures(timed: TimedTraces, chosen: StepPanel) -> list[RankClock]:
    """Return how well the times of each rank compare during the chosen steps, on each rank's own clock."""
    found = []
    for trace, clock, end_ns in zip(timed.traces, timed.clocks, chosen.end_ns, strict=True):
        residuals_ns, drift_ppm = np.abs(clock.residuals_ns()), None
        if clock.num_samples > 1:
            drift = np.diff(clock.offset_ns[[0, -1]])[0] / np.diff(clock.local_ns[[0, -1]])[0]
            drift_ppm = float(drift) * _PARTS_PER_MILLION
        found.append(
            RankClock(
                num_samples=len(np.unique(trace.tables["clock"]["local_ns"])),
                is_reference=clock.is_reference,
                times=None if trace.header.rank in timed.unknown_clocks else clock.to_reference(end_ns),
                residual_ns=float(residuals_ns.max()) if len(residuals_ns) else None,
                drift_ppm=drift_ppm,
            )
        )
    return found


def clock_jumps(timed: TimedTraces, chosen: StepPanel, limits: ClockThresholds) -> tuple[ClockJump, ...]:
    """Return the jumps of clocks between two synchronisations, in order of the steps.

    If the reference jumps, all other clocks jump against it by as much. Of two hosts either may have jumped.

    Args:
        timed: the traces and their clocks.
        chosen: the steps in which jumps are looked for, on each rank's own clock.
        limits: the threshold.
    """
    is_reference = [clock.is_reference for clock in timed.clocks]
    if not any(is_reference):
        return ()
    reference = is_reference.index(True)
    own = timed.traces[reference].header
    # Ranks of a host share its clock.
    first = {trace.header.node: row for row, trace in reversed(list(enumerate(timed.traces)))}
    others = [row for node, row in sorted(first.items()) if node != own.node]
    found: list[tuple[int, int, ClockJump]] = []
    for row in others:
        clock, apart_ns = timed.clocks[row], chosen.end_ns[row] - chosen.end_ns[reference]
        for at in clock.jumps(limits.max_rate_difference).tolist():
            size_ns = int(clock.offset_ns[at + 1] - clock.offset_ns[at])
            is_behind = (np.abs(apart_ns - clock.offset_ns[at]) > abs(size_ns) / 2) & (
                chosen.end_ns[row] >= clock.local_ns[at]
            )
            step = int(chosen.step[np.argmax(is_behind)]) if is_behind.any() else -1
            begin_ns, end_ns = (clock.local_ns[at : at + 2] - clock.offset_ns[at : at + 2]).tolist()
            found.append(
                (begin_ns, end_ns, ClockJump(hosts=(timed.traces[row].header.host,), size_ns=size_ns, step=step))
            )
    jumps = [jump for at_once in _at_once(found) for jump in _of_reference(at_once, own.host, len(others))]
    return tuple(sorted(jumps, key=lambda jump: jump.step))


def _at_once(found: Sequence[tuple[int, int, ClockJump]]) -> list[list[ClockJump]]:
    """Return jumps in groups that may have happened at one time: each between its begin and end."""
    groups: list[list[ClockJump]] = []
    until_ns = 0
    for begin_ns, end_ns, jump in sorted(found, key=lambda one: one[:2]):
        if groups and begin_ns < until_ns:
            groups[-1].append(jump)
            until_ns = min(until_ns, end_ns)
        else:
            groups.append([jump])
            until_ns = end_ns
    return groups


def _of_reference(jumps: list[ClockJump], host: str, num_others: int) -> list[ClockJump]:
    """Return jumps at one time, as one of the reference's clock where all others have one in the same direction."""
    sizes_ns = [jump.size_ns for jump in jumps]
    if num_others == 1:
        return [replace(jump, hosts=(*jump.hosts, host)) for jump in jumps]
    if len(jumps) < num_others or min(sizes_ns) < 0 < max(sizes_ns):
        return jumps
    return [replace(jumps[0], hosts=(host,), size_ns=-int(np.median(sizes_ns)))]


def clock_figures(timed: TimedTraces, chosen: StepPanel, causality: Causality, limits: ClockThresholds) -> Clocks:
    """Return how well times of different ranks compare during the chosen steps.

    Args:
        timed: the traces and their clocks.
        chosen: the steps, on each rank's own clock.
        causality: what the operations say.
        limits: when a clock has jumped.
    """
    traces, unknown = timed.traces, timed.unknown_clocks
    ranks = rank_clock_figures(timed, chosen)
    mapped = [figures.times for figures in ranks if figures.times is not None and not figures.is_reference]
    halfwidth_ns = np.concatenate([times.halfwidth_ns for times in mapped] or [np.zeros(len(chosen))])
    outside = np.concatenate([times.extrapolated for times in mapped] or [np.zeros(len(chosen), np.bool_)])
    residuals_ns = [figures.residual_ns for figures in ranks if figures.residual_ns is not None]
    drifts = [abs(figures.drift_ppm) for figures in ranks if figures.drift_ppm is not None]
    verdict = judge(causality.leads_ns)
    hosts = {trace.header.node: trace.header.host for trace in traces}
    is_compared = len(unknown) < len(traces)
    return Clocks(
        num_samples=min(figures.num_samples for figures in ranks),
        num_unknown=len(unknown),
        median_halfwidth_ns=float(np.median(halfwidth_ns)) if is_compared else None,
        max_halfwidth_ns=float(halfwidth_ns.max()) if is_compared else None,
        residual_ns=max(residuals_ns, default=None),
        drift_ppm=max(drifts, default=None),
        extrapolated_share=float(outside.mean()) if is_compared else None,
        num_checked=causality.num_checked,
        num_negative=causality.num_negative,
        num_negative_messages=causality.num_messages,
        pairs=tuple(
            HostPair(**vars(pair), exit_host=hosts[pair.exit_node], enter_host=hosts[pair.enter_node])
            for pair in pair_violations(*causality.violations)
        ),
        num_wrong=verdict.num_wrong,
        num_suspects=len(verdict.suspects),
        suspects=tuple(_named(suspect, hosts) for suspect in verdict.suspects[:_MAX_SUSPECTS]),
        jumps=clock_jumps(timed, chosen, limits)[:_MAX_SUSPECTS],
    )


def _named(suspect: Suspect, hosts: Mapping[int, str]) -> ClockSuspect:
    return ClockSuspect(
        node=suspect.node,
        host=hosts[suspect.node],
        ahead_ns=suspect.ahead_ns,
        behind_ns=suspect.behind_ns,
        against=tuple(hosts[node] for node in suspect.against[:_MAX_SUSPECTS]),
        num_against=len(suspect.against),
    )


def _leads_ns(evidence: StepOperations, found: Contradictions) -> dict[tuple[int, int], int]:
    done, enter_error_ns, exit_error_ns = evidence.operations, *np.zeros((2, len(found.rows)))
    for index, own in _rows_by_rank(evidence, found.rows):
        error_ns = DEVICE_ERROR_NS if ENQUEUE_COLUMN in evidence.traces[index].tables["collectives"] else _ROUNDING_NS
        causes, effects = own[found.is_cause[own]], own[found.is_effect[own]]
        times_ns = np.concatenate([done.enter_ns[found.rows[causes]], done.exit_ns[found.rows[effects]]])
        widths_ns = _halfwidth_ns(evidence.clocks[index], times_ns) + error_ns
        enter_error_ns[causes], exit_error_ns[effects] = np.split(widths_ns, [len(causes)])
    node = _nodes(evidence, found.rows)
    return proven_leads(done, found, node=node, enter_error_ns=enter_error_ns, exit_error_ns=exit_error_ns)


def _violations(evidence: StepOperations) -> tuple[NDArray[Any], ...]:
    """Return the rows that exit before the last enter, as `Causality` has them."""
    done, matching = evidence.operations, evidence.matching
    early = np.flatnonzero(evidence.waits.negative_ns)
    violated, which = np.unique(matching.instance[early], return_inverse=True)
    rows = np.flatnonzero(np.isin(matching.instance, violated))
    # The last enter of each operation; of equal ones that of the lowest rank.
    rows = rows[np.lexsort((-rows, done.enter_ns[rows], matching.instance[rows]))]
    last = rows[np.flatnonzero(np.diff(matching.instance[rows], append=-1))][which]
    exit_node, enter_node = _nodes(evidence, early), _nodes(evidence, last)
    # Ranks of one node share a clock; rounding may still add to a violation.
    widths_ns = _widths_ns(evidence, early) + _widths_ns(evidence, last)
    allowed_ns = np.where(exit_node == enter_node, 0.0, widths_ns) + 2 * _ROUNDING_NS
    return exit_node, enter_node, evidence.waits.negative_ns[early], allowed_ns


def _nodes(evidence: StepOperations, rows: Ints) -> Ints:
    """Return the node of the rank of each row, int64, (num_rows,)."""
    node = np.array([trace.header.node for trace in evidence.traces], np.int64)
    return node[np.searchsorted(evidence.ranks, evidence.operations.rank[rows])]


def _rows_by_rank(evidence: StepOperations, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield the index of the trace of each rank that has some of the rows, and the positions of these among them."""
    index = np.searchsorted(evidence.ranks, evidence.operations.rank[rows])
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(len(evidence.traces) + 1))
    for trace in np.flatnonzero(np.diff(bounds)).tolist():
        yield trace, order[bounds[trace] : bounds[trace + 1]]


def _widths_ns(evidence: StepOperations, rows: Ints) -> Floats:
    """Return the half-widths of clocks at the enters of rows, (num_rows,)."""
    widths_ns = np.zeros(len(rows))
    for index, own in _rows_by_rank(evidence, rows):
        widths_ns[own] = _halfwidth_ns(evidence.clocks[index], evidence.operations.enter_ns[rows[own]])
    return widths_ns


def _halfwidth_ns(clock: CommonClock, time_ns: Ints) -> Floats:
    """Return the half-widths at times of the common clock: they vary over seconds, so one offset is as good as all."""
    offset_ns = int(clock.offset_ns[0]) if clock.num_samples else 0
    return clock.to_reference(time_ns + offset_ns).halfwidth_ns
