"""The common clock: its certified bound, its measured error, contradictions to causality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence, TimedTraces
from hpcpace.diagnosis.summary import Clocks, ClockSuspect, HostPair
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.clock_suspects import Contradictions, Suspect, contradictions, judge, pair_violations, proven_leads
from hpcpace.metrics.common_clock import CommonClock
from hpcpace.metrics.operations import synchronises
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.encoding import ENQUEUE_COLUMN, RESOLUTION_NS

_MAX_VIOLATIONS = 10_000_000  # memory: pairs of operations that are searched
_MAX_SUSPECTS = 16  # display: hosts in summary.json
_PARTS_PER_MILLION = 1e6  # format: units
_ROUNDING_NS = RESOLUTION_NS["collectives"]["enter_ns"]
DEVICE_ERROR_NS = 100_000
"""Format: error of device times. A thread that sees the device idle ties them to the host's; lengths are float32."""


@dataclass(frozen=True, kw_only=True)
class Causality:
    """What operations say against the clocks.

    Attributes:
        num_checked: operations of two ranks or more that nobody leaves before all have entered.
        num_negative: rows that exit before the last enter.
        num_messages: messages received before they were sent.
        leads_ns: by how much the clock of node b is ahead of that of a at least, by (a, b).
        exit_node, enter_node, size_ns, allowed_ns: such rows, of the first operations that have some, each
            (num_violations,), as `hpcpace.metrics.clock_suspects.pair_violations` takes them.
    """

    num_checked: int
    num_negative: int
    num_messages: int
    leads_ns: Mapping[tuple[int, int], int]
    exit_node: Ints
    enter_node: Ints
    size_ns: Ints
    allowed_ns: Floats


def causality_of(evidence: Evidence) -> Causality:
    """Return what the operations say against the clocks."""
    done, matching = evidence.operations, evidence.matching
    first = matching.first
    sizes = np.array([*(len(group.ranks) for group in done.groups), 0], np.int64)
    is_checked = matching.is_matched[first] & synchronises(done.op[first]) & (sizes[done.group[first]] > 1)
    found = contradictions(done, matching, evidence.waits)
    exit_node, enter_node, size_ns, allowed_ns = _violations(evidence)
    return Causality(
        num_checked=int(is_checked.sum()),
        num_negative=int(np.count_nonzero(evidence.waits.negative_ns)),
        num_messages=found.num_messages,
        leads_ns=_leads_ns(evidence, found),
        exit_node=exit_node,
        enter_node=enter_node,
        size_ns=size_ns,
        allowed_ns=allowed_ns,
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
        exit_node=np.concatenate([part.exit_node for part in parts])[:_MAX_VIOLATIONS],
        enter_node=np.concatenate([part.enter_node for part in parts])[:_MAX_VIOLATIONS],
        size_ns=np.concatenate([part.size_ns for part in parts])[:_MAX_VIOLATIONS],
        allowed_ns=np.concatenate([part.allowed_ns for part in parts])[:_MAX_VIOLATIONS],
    )


def clock_figures(timed: TimedTraces, chosen: StepPanel, causality: Causality) -> Clocks:
    """Return how well times of different ranks compare during the chosen steps.

    Args:
        timed: the traces and their clocks.
        chosen: the steps, on each rank's own clock.
        causality: what the operations say.
    """
    traces, clocks, unknown = timed.traces, timed.clocks, timed.unknown_clocks
    mapped = [
        clock.to_reference(chosen.end_ns[index])
        for index, (trace, clock) in enumerate(zip(traces, clocks, strict=True))
        if trace.header.rank not in unknown and not clock.is_reference
    ]
    halfwidth_ns = np.concatenate([times.halfwidth_ns for times in mapped] or [np.zeros(len(chosen))])
    outside = np.concatenate([times.extrapolated for times in mapped] or [np.zeros(len(chosen), np.bool_)])
    residuals_ns = np.concatenate([np.abs(clock.residuals_ns()) for clock in clocks])
    drifts = [
        abs(float(np.diff(clock.offset_ns[[0, -1]])[0] / np.diff(clock.local_ns[[0, -1]])[0])) * _PARTS_PER_MILLION
        for clock in clocks
        if clock.num_samples > 1
    ]
    pairs = pair_violations(causality.exit_node, causality.enter_node, causality.size_ns, causality.allowed_ns)
    verdict = judge(causality.leads_ns)
    hosts = {trace.header.node: trace.header.host for trace in traces}
    is_compared = len(unknown) < len(traces)
    return Clocks(
        num_samples=min(len(np.unique(trace.tables["clock"]["local_ns"])) for trace in traces),
        num_unknown=len(unknown),
        median_halfwidth_ns=float(np.median(halfwidth_ns)) if is_compared else None,
        max_halfwidth_ns=float(halfwidth_ns.max()) if is_compared else None,
        residual_ns=float(residuals_ns.max()) if len(residuals_ns) else None,
        drift_ppm=max(drifts, default=None),
        extrapolated_share=float(outside.mean()) if is_compared else None,
        num_checked=causality.num_checked,
        num_negative=causality.num_negative,
        num_negative_messages=causality.num_messages,
        pairs=tuple(
            HostPair(**vars(pair), exit_host=hosts[pair.exit_node], enter_host=hosts[pair.enter_node]) for pair in pairs
        ),
        num_wrong=verdict.num_wrong,
        num_suspects=len(verdict.suspects),
        suspects=tuple(_named(suspect, hosts) for suspect in verdict.suspects[:_MAX_SUSPECTS]),
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


def _leads_ns(evidence: Evidence, found: Contradictions) -> dict[tuple[int, int], int]:
    done = evidence.operations
    rank = np.searchsorted(evidence.ranks, done.rank[found.rows])
    enter_error_ns, exit_error_ns = np.zeros(len(rank)), np.zeros(len(rank))
    order = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], np.arange(len(evidence.traces) + 1))
    for index in np.flatnonzero(np.diff(bounds)).tolist():
        trace, clock, own = evidence.traces[index], evidence.clocks[index], order[bounds[index] : bounds[index + 1]]
        error_ns = DEVICE_ERROR_NS if ENQUEUE_COLUMN in trace.tables["collectives"] else _ROUNDING_NS
        causes, effects = own[found.is_cause[own]], own[found.is_effect[own]]
        times_ns = np.concatenate([done.enter_ns[found.rows[causes]], done.exit_ns[found.rows[effects]]])
        widths_ns = _halfwidth_ns(clock, times_ns) + error_ns
        enter_error_ns[causes], exit_error_ns[effects] = np.split(widths_ns, [len(causes)])
    node = np.array([trace.header.node for trace in evidence.traces], np.int64)[rank]
    return proven_leads(done, found, node=node, enter_error_ns=enter_error_ns, exit_error_ns=exit_error_ns)


def _violations(evidence: Evidence) -> tuple[Ints, Ints, Ints, Floats]:
    """Return the rows that exit before the last enter, as the last four fields of `Causality`."""
    done, matching = evidence.operations, evidence.matching
    early = np.flatnonzero(evidence.waits.negative_ns)
    violated = np.unique(matching.instance[early])
    place = np.full(len(matching.num_rows), -1)
    place[violated] = np.arange(len(violated))
    early = early[place[matching.instance[early]] >= 0]
    node = np.array([trace.header.node for trace in evidence.traces], np.int64)
    if not len(early):
        return node[:0], node[:0], node[:0], np.zeros(0)
    rows = np.flatnonzero(place[matching.instance] >= 0)
    of = place[matching.instance[rows]]
    last_ns = np.full(len(violated), np.iinfo(np.int64).min)
    np.maximum.at(last_ns, of, done.enter_ns[rows])
    is_last = np.flatnonzero(done.enter_ns[rows] == last_ns[of])[::-1]
    last = np.empty(len(violated), np.int64)
    last[of[is_last]] = rows[is_last]  # of equal enters that of the lowest rank
    last = last[place[matching.instance[early]]]
    exit_rank, enter_rank = (np.searchsorted(evidence.ranks, done.rank[own]) for own in (early, last))
    allowed_ns = _widths_ns(evidence, early, exit_rank) + _widths_ns(evidence, last, enter_rank)
    exit_node, enter_node = node[exit_rank], node[enter_rank]
    # Ranks of one node share a clock; rounding may still add to a violation.
    allowed_ns = np.where(exit_node == enter_node, 0.0, allowed_ns) + 2 * _ROUNDING_NS
    return exit_node, enter_node, evidence.waits.negative_ns[early], allowed_ns


def _widths_ns(evidence: Evidence, rows: Ints, rank: NDArray[np.intp]) -> Floats:
    """Return the half-widths of clocks at the enters of rows, (num_rows,); `rank` indexes the traces."""
    widths_ns, order = np.zeros(len(rows)), np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], np.arange(len(evidence.clocks) + 1))
    for index, clock in enumerate(evidence.clocks):
        own = order[bounds[index] : bounds[index + 1]]
        if len(own):
            widths_ns[own] = _halfwidth_ns(clock, evidence.operations.enter_ns[rows[own]])
    return widths_ns


def _halfwidth_ns(clock: CommonClock, time_ns: Ints) -> Floats:
    """Return the half-widths at times of the common clock: they vary over seconds, so one offset is as good as all."""
    offset_ns = int(clock.offset_ns[0]) if clock.num_samples else 0
    return clock.to_reference(time_ns + offset_ns).halfwidth_ns
