"""A probe after maintenance against one from before: which operations became slower or faster beyond noise.

Noise has two parts: the rounds of each probe differ, and two probes of the same hosts differ by more than that. The
first is measured. The second is assumed, 1.5 % of a rate and 5 % of a latency (one standard deviation of ln time),
unless the sizes of one operation show it to be larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpcpace.errors import ProbeError
from hpcpace.probe.change import Change, interval
from hpcpace.probe.host_changes import host_changes
from hpcpace.probe.record import ProbeRecord, SweepRow
from hpcpace.quoting import printable

BETWEEN_PROBES = {"latency": 0.05, "rate": 0.015}
"""Standard deviation of ln time between two probes of the same hosts, where nothing changed."""
_CONFIDENCE = 3.0
_ROBUST = 1.2533  # standard error of a median over that of a mean, for normal noise
_LEAST_ROUNDS = 2
_MAX_LETTERS = 60


def check_comparable(before: ProbeRecord, after: ProbeRecord) -> None:
    """Refuse probes of other hosts or another world, whose times mean something else.

    Raises:
        ProbeError: with all that differs.
    """
    differences = [
        f"{what} {_shown(one)} then, {_shown(other)} now"
        for what, one, other in (
            ("cluster", before.cluster, after.cluster),
            ("hosts", _names(before), _names(after)),
            ("ranks per host", _counts(before), _counts(after)),
            ("device", f"{before.device} {before.device_name}", f"{after.device} {after.device_name}"),
            ("backend", before.backend, after.backend),
        )
        if one != other
    ]
    if differences:
        raise ProbeError(
            f"the probes are of different worlds ({'; '.join(differences)}): probe the same hosts in the same way, or "
            "compare with --other-hosts"
        )


def changes(before: ProbeRecord, after: ProbeRecord) -> list[Change]:
    """Return the changes of all that both probes measured: operations, then pairs of hosts, noise and copies.

    An operation counts over each number of hosts that both probes have, at sizes that both have.
    """
    return [*_sweep_changes(before, after), *host_changes(before, after)]


def _sweep_changes(before: ProbeRecord, after: ProbeRecord) -> list[Change]:
    then = {(row.op, row.num_nodes, row.size_bytes): row for row in before.sweep}
    pairs: dict[tuple[str, int], list[tuple[SweepRow, SweepRow]]] = {}
    for row in after.sweep:
        key = (row.op, row.num_nodes, row.size_bytes)
        if key in then and min(len(row.rounds_ns), len(then[key].rounds_ns)) >= _LEAST_ROUNDS:
            pairs.setdefault((row.op, row.num_nodes), []).append((then[key], row))
    found = []
    for (op, num_nodes), rows in pairs.items():
        half = (len(rows) + 1) // 2
        for kind, some in (("latency", rows[:half]), ("rate", rows[half:])):
            if some:
                found.append(_change(op, num_nodes, kind, some))
    return found


def _change(op: str, num_nodes: int, kind: str, rows: Sequence[tuple[SweepRow, SweepRow]]) -> Change:
    logs = np.array([math.log(after.p50_ns) - math.log(before.p50_ns) for before, after in rows])
    measured = np.array([_variance(before) + _variance(after) for before, after in rows])
    mean = float(logs.mean())
    # Sizes of one probe share what differs between two probes; so that part does not average out over sizes.
    variance = float(measured.mean()) / len(rows) + 2 * BETWEEN_PROBES[kind] ** 2
    if len(rows) > 1:
        variance = max(variance, float(logs.var(ddof=1)) / len(rows))
    ratio, low, high = interval(mean, variance, _CONFIDENCE)
    return Change(part="sweep", name=op, num_nodes=num_nodes, kind=kind, ratio=ratio, low=low, high=high)


def _variance(row: SweepRow) -> float:
    """Return the squared standard error of ln of the median time, from how its rounds differ."""
    logs = np.log(np.array(row.rounds_ns))
    return float(_ROBUST**2 * logs.var(ddof=1) / len(logs))


def _names(record: ProbeRecord) -> str:
    return ",".join(sorted(host.name for host in record.hosts))


def _counts(record: ProbeRecord) -> str:
    return ",".join(str(count) for count in sorted(len(host.ranks) for host in record.hosts))


def _shown(text: str) -> str:
    short = text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."
    return printable(short) or "unknown"
