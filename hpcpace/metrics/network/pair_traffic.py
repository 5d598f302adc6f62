"""What ranks, or hosts, sent to each other, and how fast while data was outstanding.

The sender's side of a connection knows all of it. Where only the receiver was recorded, bytes are known and rates are
not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.network.flow_tables import Flows
from hpcpace.units import NS_PER_S

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class PairTraffic:
    """Traffic from one rank or node to another, those with most bytes first; (num_pairs,) each.

    Attributes:
        source, destination: rank numbers, or indices of nodes.
        acked_bytes: payload that arrived.
        sent_bytes, retransmitted_bytes: payload sent, repetitions included, and repetitions; 0 where only the receiver
            was recorded.
        busy_ns: time in which data was outstanding; of several connections at a time that of the busiest. 0 where only
            the receiver was recorded.
    """

    source: IntArray
    destination: IntArray
    acked_bytes: IntArray
    sent_bytes: IntArray
    retransmitted_bytes: IntArray
    busy_ns: IntArray

    @property
    def bytes_per_s(self) -> FloatArray:
        """Achieved rate: payload for each second in which data was outstanding; NaN where that is not known."""
        return np.asarray(
            np.divide(
                self.acked_bytes * float(NS_PER_S),
                self.busy_ns,
                out=np.full(len(self.busy_ns), np.nan),
                where=self.busy_ns > 0,
            )
        )


def rank_pairs(flows: Flows, *, begin_ns: int, end_ns: int) -> PairTraffic:
    """Return the traffic between ranks in intervals whose middle is between two times."""
    of = flows.connections
    return _pairs(flows, of.rank, of.peer_rank, _in_window(flows, begin_ns, end_ns))


def node_pairs(flows: Flows, *, begin_ns: int, end_ns: int) -> PairTraffic:
    """Return the traffic between nodes, likewise."""
    of = flows.connections
    return _pairs(flows, of.node, of.peer_node, _in_window(flows, begin_ns, end_ns))


def _in_window(flows: Flows, begin_ns: int, end_ns: int) -> BoolArray:
    middle_ns = flows.begin_ns + (flows.end_ns - flows.begin_ns) // 2
    return np.asarray((middle_ns >= begin_ns) & (middle_ns < end_ns))


def _pairs(flows: Flows, end: IntArray, far_end: IntArray, is_meant: BoolArray) -> PairTraffic:
    """Return sums over the connections of each pair; `end` and `far_end` are those of each connection."""
    source, destination = (np.append(ids, -1)[flows.connection] for ids in (end, far_end))
    rows = np.flatnonzero(is_meant & (source >= 0) & (destination >= 0))
    # What only its receiver has recorded.
    back = rows[~np.isin(destination[rows], end)]
    zero = np.zeros(len(back), np.int64)
    sources = np.concatenate([source[rows], destination[back]])
    destinations = np.concatenate([destination[rows], source[back]])
    base = int(max(sources.max(initial=0), destinations.max(initial=0))) + 1
    pairs, pair = np.unique(sources * base + destinations, return_inverse=True)

    def summed(values: IntArray, of_back: IntArray) -> IntArray:
        total = np.bincount(pair, np.concatenate([values[rows], of_back]), minlength=len(pairs))
        return np.rint(total).astype(np.int64)

    acked_bytes = summed(flows.acked_bytes, flows.received_bytes[back])
    order = np.argsort(-acked_bytes, kind="stable")
    return PairTraffic(
        source=pairs[order] // base,
        destination=pairs[order] % base,
        acked_bytes=acked_bytes[order],
        sent_bytes=summed(flows.sent_bytes, zero)[order],
        retransmitted_bytes=summed(flows.retransmitted_bytes, zero)[order],
        busy_ns=_busy_ns(flows, rows, pair[: len(rows)], len(pairs))[order],
    )


def _busy_ns(flows: Flows, rows: IntArray, pair: IntArray, num_pairs: int) -> IntArray:
    """Return how long each pair was busy: in each second as long as the busiest of its connections, (num_pairs,)."""
    second = (flows.end_ns[rows] - flows.end_ns[rows].min(initial=0)) // NS_PER_S
    num_seconds = int(second.max(initial=0)) + 1
    keys, first, key = np.unique(flows.connection[rows] * num_seconds + second, return_index=True, return_inverse=True)
    of_connection = np.bincount(key, flows.busy_ns[rows], minlength=len(keys))
    cells, cell = np.unique(pair[first] * num_seconds + second[first], return_inverse=True)
    busiest = np.zeros(len(cells))
    np.maximum.at(busiest, cell, of_connection)
    return np.rint(np.bincount(cells // num_seconds, busiest, minlength=num_pairs)).astype(np.int64)
