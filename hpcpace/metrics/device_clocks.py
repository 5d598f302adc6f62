"""The clocks of hosts compared by operations of devices, which show more than samples between hosts do.

A collective ends on all members at about one time, and messages take as long there as back. Samples of a clock are
wrong by microseconds, or by more if something held them up. A step of some milliseconds has dozens of operations, and
that error is in the transfer of each for which the same rank is last.
"""

from __future__ import annotations

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.matching import Matching
from hpcpace.metrics.operations import Operations, is_one_of
from hpcpace.metrics.segments import DEVICE_ERROR_NS
from hpcpace.trace.schema import ExitKind, Op

_TOGETHER = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)
"""Format: the operations that no member leaves long before another; parts of an all_to_all may be uneven."""
_MIN_SEEN = 20
"""Statistics: operations of two hosts that show how their clocks differ."""
_SHORT, _WAITED = 0.1, 1.5
"""Statistics: the share of messages that last no longer than a transfer, and how many times as long those last whose
receivers were waiting."""


def clock_offsets_ns(operations: Operations, matching: Matching, host: Ints) -> Ints:
    """Return by how much the clock of each host is ahead of that of the first one, int64, (num_hosts,).

    The offset of two hosts is the median difference of the mean exits of their collectives; where they have none, half
    of what messages take longer one way than the other (as NTP has it). One that meets the first host only through
    others is compared with these. 0 where too few operations show it.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        host: index of the host of each row's rank, int64, (num_operations,).
    """
    num_hosts = int(host.max(initial=-1)) + 1
    offset_ns, is_known = np.zeros(num_hosts, np.int64), np.zeros(num_hosts, np.bool_)
    is_on_device = np.array([*(group.is_on_device for group in operations.groups), False])
    chosen = is_on_device[operations.group] & matching.is_matched
    if num_hosts < 2 or not chosen.any():
        return offset_ns
    exits = _Exits.of(operations, matching, host, chosen)
    by_messages = _message_offsets_ns(operations, matching, host, chosen)
    waiting, is_known[0] = [0], True
    while waiting:
        hub = waiting.pop(0)
        ahead_ns = {other: ns for (of, other), ns in by_messages.items() if of == hub} | exits.ahead_ns(hub)
        for other, ns in sorted(ahead_ns.items()):
            if not is_known[other]:
                offset_ns[other], is_known[other] = offset_ns[hub] + round(ns), True
                waiting.append(other)
    return offset_ns


@dataclass(frozen=True)
class _Exits:
    """The mean exits of collectives on each host, float64, (num_means,), with the number of each, and of its host."""

    mean_ns: Floats
    instance: Ints
    host: Ints
    num_instances: int

    @classmethod
    def of(cls, operations: Operations, matching: Matching, host: Ints, chosen: Bools) -> _Exits:
        is_seen = is_one_of(operations.op, _TOGETHER) & (operations.exit_kind == ExitKind.COMPLETION)
        rows, num_hosts = np.flatnonzero(chosen & is_seen), int(host.max()) + 1
        exit_ns = (operations.exit_ns[rows] - operations.exit_ns.min()).astype(np.float64)
        cell, index = np.unique(matching.instance[rows] * num_hosts + host[rows], return_inverse=True)
        mean_ns = np.asarray(np.bincount(index, exit_ns) / np.maximum(np.bincount(index), 1), np.float64)
        return cls(mean_ns, cell // num_hosts, cell % num_hosts, len(matching.num_rows))

    def ahead_ns(self, hub: int) -> dict[int, float]:
        """Return by how much others are ahead of one host, of those that enough collectives show."""
        of_hub_ns = np.full(self.num_instances, np.nan)
        is_hub = self.host == hub
        of_hub_ns[self.instance[is_hub]] = self.mean_ns[is_hub]
        ahead_ns = self.mean_ns - of_hub_ns[self.instance]
        met = np.flatnonzero(~np.isnan(ahead_ns) & ~is_hub)
        order = met[np.argsort(self.host[met], kind="stable")]
        names, first = np.unique(self.host[order], return_index=True)
        parts = zip(names.tolist(), np.split(ahead_ns[order], first[1:]), strict=False)
        return {other: float(np.median(seen_ns)) for other, seen_ns in parts if len(seen_ns) >= _MIN_SEEN}


def _message_offsets_ns(
    operations: Operations, matching: Matching, host: Ints, chosen: Bools
) -> dict[tuple[int, int], float]:
    """Return by how much the clock of the second of two hosts is ahead, where messages go both ways between them.

    Only those whose receiver was waiting show how long they take: these last longer for it than the shortest ones.
    """
    sender = np.full(len(matching.num_rows), -1)
    sends = np.flatnonzero(chosen & (operations.op == Op.SEND))
    sender[matching.instance[sends]] = sends
    rows = np.flatnonzero(chosen & (operations.op == Op.RECV) & (sender[matching.instance] >= 0))
    rows = rows[host[rows] != host[sender[matching.instance[rows]]]]
    if not len(rows):
        return {}
    sends = sender[matching.instance[rows]]
    way_ns = operations.exit_ns[rows] - operations.enter_ns[sends]
    lasted_ns = operations.exit_ns[rows] - operations.enter_ns[rows]
    keys = np.stack([host[sends], host[rows], operations.size_bytes[rows]])
    names, index = np.unique(keys, axis=1, return_inverse=True)
    parts = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    usual_ns: dict[tuple[int, ...], float] = {}
    for name, part in zip(names.T.tolist(), parts, strict=True):
        waited = part[lasted_ns[part] > _WAITED * np.quantile(lasted_ns[part], _SHORT) + DEVICE_ERROR_NS]
        if len(waited) >= _MIN_SEEN:
            usual_ns[tuple(name)] = float(np.median(way_ns[waited]))
    found: dict[tuple[int, int], list[float]] = {}
    for (source, target, size), there_ns in usual_ns.items():
        if (target, source, size) in usual_ns:
            found.setdefault((source, target), []).append((there_ns - usual_ns[target, source, size]) / 2)
    return {pair: float(np.median(ahead_ns)) for pair, ahead_ns in found.items()}
