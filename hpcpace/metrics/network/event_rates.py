"""Errors, drops, pauses, congestion marks and retransmissions, held against what the other hosts of the job have.

None of these counters is evidence by itself: a healthy fabric pauses and marks, and drops a little. What one host has
more of than the others by far is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.network.flow_tables import Flows, InterfaceUse
from hpcpace.metrics.roles import others_median

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

KINDS = ("errors", "drops", "pauses", "marks")
"""The counters of interfaces, in the order of `interface_events`."""

_LEAST_EVENTS, _LEAST_RATIO, _DEVIATIONS = 10, 3.0, 5.0


def interface_events(use: InterfaceUse, *, begin_ns: int, end_ns: int) -> IntArray:
    """Return the events of each interface in intervals whose middle is between two times, (4, num_interfaces)."""
    middle_ns = use.begin_ns + (use.end_ns - use.begin_ns) // 2
    rows = np.flatnonzero((middle_ns >= begin_ns) & (middle_ns < end_ns))
    counters = (use.errors, use.drops, use.pauses, use.marks)
    counts = [np.bincount(use.interface[rows], values[rows], minlength=len(use.names)) for values in counters]
    return np.rint(np.array(counts)).astype(np.int64)


def retransmitted(flows: Flows, num_nodes: int, *, begin_ns: int, end_ns: int) -> tuple[IntArray, IntArray]:
    """Return the bytes that each node sent and those that it sent again, in such intervals, (num_nodes,) each."""
    middle_ns = flows.begin_ns + (flows.end_ns - flows.begin_ns) // 2
    node = np.append(flows.connections.node, -1)[flows.connection]
    rows = np.flatnonzero((middle_ns >= begin_ns) & (middle_ns < end_ns) & (node >= 0))
    sent, again = (
        np.rint(np.bincount(node[rows], values[rows], minlength=num_nodes)).astype(np.int64)
        for values in (flows.sent_bytes, flows.retransmitted_bytes)
    )
    return sent, again


def usual_rate(counts: NDArray[np.number], exposures: NDArray[np.number]) -> FloatArray:
    """Return the median rate of the other hosts for each host, NaN where there is no other, (num_hosts,).

    Args:
        counts: events of each host.
        exposures: what they are counted over, such as seconds or packets; hosts with 0 are left out.
    """
    found = np.full(len(counts), np.nan)
    rows = np.flatnonzero(exposures > 0)
    if len(rows) > 1:
        found[rows] = others_median(np.asarray(counts[rows] / exposures[rows], np.float64)[:, None])[:, 0]
    return found


def is_raised(counts: NDArray[np.number], exposures: NDArray[np.number]) -> BoolArray:
    """Return which hosts have far more events than the others: 10, 3 times as many, and beyond what chance adds.

    Args:
        counts, exposures: as of `usual_rate`, (num_hosts,).
    """
    expected = usual_rate(counts, exposures) * exposures
    beyond = expected + _DEVIATIONS * np.sqrt(np.maximum(expected, 0.0))
    least = np.maximum(np.maximum(beyond, _LEAST_RATIO * expected), _LEAST_EVENTS)
    return np.asarray(np.isfinite(expected) & (counts >= least))
