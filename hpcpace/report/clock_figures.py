"""The figures of the common clock: its certified bound, its measured error, and what causality says against it."""

from __future__ import annotations

import numpy as np

from hpcpace.metrics.clock import CausalityCheck, CommonClock, check_causality
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import is_synchronising
from hpcpace.report.evidence import Evidence
from hpcpace.report.summary import Clocks

_MOST_VIOLATIONS_SIZED = 100_000


def clock_figures(evidence: Evidence, chosen: StepPanel) -> Clocks:
    """Return how well times of different ranks compare during the chosen steps."""
    traces, clocks, unknown = evidence.traces, evidence.clocks, evidence.unknown_clocks
    done, matching = evidence.operations, evidence.matching
    mapped = [
        clock.to_reference(chosen.end_ns[index])
        for index, (trace, clock) in enumerate(zip(traces, clocks, strict=True))
        if trace.header.rank not in unknown and not clock.is_reference
    ]
    halfwidth_ns = np.concatenate([times.halfwidth_ns for times in mapped] or [np.zeros(len(chosen))])
    outside = np.concatenate([times.extrapolated for times in mapped] or [np.zeros(len(chosen), np.bool_)])
    residuals_ns = np.concatenate([np.abs(clock.residuals_ns()) for clock in clocks])
    drifts = [
        abs(float(np.diff(clock.offset_ns[[0, -1]])[0] / np.diff(clock.local_ns[[0, -1]])[0])) * 1e6
        for clock in clocks
        if clock.num_samples > 1
    ]
    checked = np.unique(matching.instance[matching.is_matched & is_synchronising(done) & (done.group_size > 1)])
    check = _causality(evidence)
    is_compared = len(unknown) < len(traces)
    return Clocks(
        num_samples=min(len(np.unique(trace.tables["clock"]["local_ns"])) for trace in traces),
        num_unknown=len(unknown),
        median_halfwidth_ns=float(np.median(halfwidth_ns)) if is_compared else None,
        max_halfwidth_ns=float(halfwidth_ns.max()) if is_compared else None,
        residual_ns=float(residuals_ns.max()) if len(residuals_ns) else None,
        drift_ppm=max(drifts, default=None),
        extrapolated_share=float(outside.mean()) if is_compared else None,
        num_checked=len(checked),
        num_negative=int((evidence.waits.negative_ns > 0).sum()),
        pairs=check.pairs,
    )


def _causality(evidence: Evidence) -> CausalityCheck:
    """Size the violations: only operations that have one are laid out as a matrix of operations and ranks."""
    done, matching = evidence.operations, evidence.matching
    violated = np.unique(matching.instance[evidence.waits.negative_ns > 0])[:_MOST_VIOLATIONS_SIZED]
    rows = np.flatnonzero(np.isin(matching.instance, violated))
    at = (np.searchsorted(violated, matching.instance[rows]), np.searchsorted(evidence.ranks, done.rank[rows]))
    shape = (len(violated), len(evidence.ranks))
    enter_ns, exit_ns = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    present, halfwidth_ns = np.zeros(shape, np.bool_), np.zeros(shape)
    enter_ns[at], exit_ns[at], present[at] = done.enter_ns[rows], done.exit_ns[rows], True
    for index, clock in enumerate(evidence.clocks):
        # Half-widths vary over seconds, so that the offset between the two clocks does not matter here.
        halfwidth_ns[:, index] = clock.to_reference(enter_ns[:, index] + _mean_offset_ns(clock)).halfwidth_ns
    return check_causality(enter_ns, exit_ns, halfwidth_ns, [trace.header.node for trace in evidence.traces], present)


def _mean_offset_ns(clock: CommonClock) -> int:
    return int(clock.offset_ns[0]) if clock.num_samples else 0
