"""Whether collectives take longer when their ranks arrive together, or apart: transfer against skew, by kind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.summary import SensitivityRow
from hpcpace.metrics.grouped import grouped_medians
from hpcpace.metrics.jitter.bound_switches import collective_sensitivity
from hpcpace.metrics.lateness.segments import LocalWork
from hpcpace.metrics.operations.communication import op_name
from hpcpace.metrics.operations.dependence import synchronises

_MOST_ROWS = 4
_Z = float(ndtri(0.975))


def sensitivity_figures(measured: Measured) -> tuple[SensitivityRow, ...]:
    """Return how transfers depend on skew, for the kinds and sizes of collectives that take most time.

    Skew is the largest less the smallest of what its ranks worked before an operation beyond the usual of their role
    there, which needs no common clock; transfer is the largest of its ranks, which does. Interval: slope and 1.96
    standard errors on either side.

    Returns:
        None of them where there are no operations, own work is not known, or too few collectives have a skew beyond the
        clocks' error.
    """
    close_up = measured.close_up
    if close_up is None or measured.host_timed:
        return ()
    evidence = close_up.evidence
    done, matching = evidence.operations, evidence.matching
    mask = synchronises(done.op) & matching.is_matched & close_up.work.is_known & (done.group_size > 1)
    rows = matching.order[mask[matching.order]]
    if not len(rows):
        return ()
    starts = np.flatnonzero(np.diff(matching.instance[rows], prepend=-1))
    delay_ns, first = _beyond_usual(close_up.work, rows), rows[starts]
    skew_ns = np.maximum.reduceat(delay_ns, starts) - np.minimum.reduceat(delay_ns, starts)
    transfer_ns = np.maximum.reduceat(evidence.waits.transfer_ns[rows], starts).astype(np.float64)
    error_ns = _clock_error_ns(measured)
    _, size = np.unique(done.size_bytes[first], return_inverse=True)
    key = (size * (int(done.group_size[first].max()) + 1) + done.group_size[first]) << 8 | done.op[first]
    place = done.group[first] * close_up.work.num_positions + close_up.work.position[first]
    _, example, kind = np.unique(key, return_index=True, return_inverse=True)
    total_ns = np.bincount(kind, weights=transfer_ns)
    found = []
    for number in total_ns.argsort()[::-1].tolist():
        of_kind = np.flatnonzero(kind == number)
        of_kind = of_kind[np.argsort(done.enter_ns[first[of_kind]], kind="stable")]
        slope = collective_sensitivity(transfer_ns[of_kind], skew_ns[of_kind], error_ns, place[of_kind])
        if slope is None:
            continue
        row = first[example[number]]
        half_width = _Z * slope.standard_error
        found.append(
            SensitivityRow(
                op=op_name(int(done.op[row])),
                group_size=int(done.group_size[row]),
                size_bytes=int(done.size_bytes[row]),
                slope=slope.slope,
                interval=(slope.slope - half_width, slope.slope + half_width),
                num_operations=slope.num_operations,
            )
        )
        if len(found) == _MOST_ROWS:
            break
    return tuple(found)


def _beyond_usual(work: LocalWork, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return own work before operations less the median of their role and position, over ranks and steps.

    One reference for all ranks of a role: medians of the others, as blame takes them, would make the skew too wide.
    """
    value = work.work_ns[rows].astype(np.float64)
    cell = work.role[rows] * work.num_positions + work.position[rows]
    usual = grouped_medians(cell, value, int(cell.max()) + 1)
    beyond: NDArray[np.float64] = value - usual[cell]
    return beyond


def _clock_error_ns(measured: Measured) -> float:
    """Return the largest over ranks of the median half-width: an operation's error is that of its worst clock."""
    halfwidths: list[NDArray[np.float64]] = [
        clock.to_reference(end_ns).halfwidth_ns
        for clock, end_ns in zip(measured.timed.clocks, measured.chosen.end_ns, strict=True)
    ]
    return max(float(np.median(halfwidth_ns)) for halfwidth_ns in halfwidths)
