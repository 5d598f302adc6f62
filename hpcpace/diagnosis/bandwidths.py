"""Bandwidths of operations by kind, number of ranks and size, from the transfers that rest on trustworthy clocks."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.plot_data import Bandwidth
from hpcpace.metrics import Floats
from hpcpace.metrics.bandwidth import bus_factors, bytes_per_s
from hpcpace.metrics.links import GroupTransfers
from hpcpace.trace.schema import Op

_MAX_KINDS = 64  # display: rows of the table
_QUANTILES = (0.05, 0.5, 0.95)  # statistics: most steps, without their extremes


def clock_errors_ns(measured: Measured) -> Floats:
    """Return the error of each rank's times by which transfers between hosts are judged, float64, (num_ranks,).

    That is the half-width of its clock, and infinite where that clock may be wrong.
    """
    clocks = measured.clocks
    wrong = {suspect.node for suspect in clocks.suspects}
    are_all = clocks.num_suspects > len(wrong)
    nodes = (trace.header.node for trace in measured.timed.traces)
    return np.where([are_all or node in wrong for node in nodes], np.inf, measured.halfwidth_ns)


def bandwidths(measured: Measured) -> tuple[Bandwidth, ...]:
    """Return what operations achieve, by kind, number of ranks and size; of very many, those that take longest.

    Transfers within the error of two clocks are left out, as everywhere.
    """
    found = defaultdict[tuple[str, int, int], list[Floats]](list)
    errors_ns = dict(zip(measured.timed.ranks, clock_errors_ns(measured).tolist(), strict=True))
    nodes = {trace.header.rank: trace.header.node for trace in measured.timed.traces}
    for group in measured.operations.transfers:
        if len(group.members) > 1 and group.size_bytes > 0:
            sound_ns = _beyond_error(group, errors_ns, nodes)
            if len(sound_ns):
                found[group.op, len(group.members), group.size_bytes].append(sound_ns)
    longest = sorted(found.items(), key=lambda item: -sum(float(part.sum()) for part in item[1]))[:_MAX_KINDS]
    return tuple(_bandwidth(*kind, np.concatenate(parts)) for kind, parts in sorted(longest, key=lambda item: item[0]))


def _beyond_error(group: GroupTransfers, errors_ns: dict[int, float], nodes: dict[int, int]) -> Floats:
    """Return the transfers of a group that are longer than their error, float64, (num_known,)."""
    members = [rank for rank in group.members if rank in nodes]
    is_one_host = len({nodes[rank] for rank in members}) == 1
    error_ns = 0.0 if is_one_host else 2 * max((errors_ns[rank] for rank in members), default=np.inf)
    return group.transfer_ns[group.transfer_ns > error_ns]


def _bandwidth(op: str, group_size: int, size_bytes: int, transfer_ns: Floats) -> Bandwidth:
    rates = bytes_per_s(np.full(len(transfer_ns), size_bytes), transfer_ns)
    low, median, high = np.quantile(rates, _QUANTILES).tolist()
    code = Op.__members__.get(op.upper())
    factor = np.nan if code is None else float(bus_factors(np.array([code], np.uint8), np.array([group_size]))[0])
    return Bandwidth(
        op=op,
        group_size=group_size,
        size_bytes=size_bytes,
        low=low,
        median=median,
        high=high,
        bus_factor=factor if np.isfinite(factor) else None,
    )
