"""A probe after maintenance against one from before: which operations became slower or faster beyond noise.

Noise has two parts: the rounds of each probe differ, and two probes of the same hosts differ by more than that. The
first is measured. The second is assumed, 1.5 % of a rate and 5 % of a latency (one standard deviation of ln time),
unless the sizes of one operation show it to be larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.errors import ProbeError
from hpcpace.probe.record import ProbeRecord, SweepRow
from hpcpace.wording import plural

LEAST_CHANGE = 0.05
"""A smaller change is none, whatever the noise."""
BETWEEN_PROBES = {"latency": 0.05, "rate": 0.015}
"""Standard deviation of ln time between two probes of the same hosts, where nothing changed."""
_CONFIDENCE = 3.0
_MOST_HALFWIDTH = 0.3
"""A comparison that could not have seen 30 % more time says nothing."""
_ROBUST = 1.2533  # standard error of a median over that of a mean, for normal noise
_LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Change:
    """One operation over one number of hosts, of small or of large sizes.

    Attributes:
        op, num_nodes: which.
        kind: `latency` of the smaller half of the sizes, or `rate` of the larger half.
        ratio: time after over time before, the geometric mean over the sizes.
        low, high: its interval, three standard errors to each side.
        num_sizes: common sizes that it rests on.
    """

    op: str
    num_nodes: int
    kind: str
    ratio: float
    low: float
    high: float
    num_sizes: int

    @property
    def is_slower(self) -> bool:
        """Whether it became slower beyond noise."""
        return self.low > 1 and self.ratio > 1 + LEAST_CHANGE

    @property
    def is_faster(self) -> bool:
        """Whether it became faster beyond noise."""
        return self.high < 1 and self.ratio < 1 / (1 + LEAST_CHANGE)

    @property
    def is_decided(self) -> bool:
        """Whether the interval is narrow enough to say that nothing changed, or something did."""
        return self.is_slower or self.is_faster or self.high / self.ratio - 1 < _MOST_HALFWIDTH


def check_comparable(before: ProbeRecord, after: ProbeRecord) -> None:
    """Refuse probes of other hosts or another world, whose times mean something else.

    Raises:
        ProbeError: with all that differs.
    """
    differences = [
        f"{what} {_shown(one)} then, {_shown(other)} now"
        for what, one, other in (
            ("cluster", before.cluster, after.cluster),
            ("hosts", sorted(host.name for host in before.hosts), sorted(host.name for host in after.hosts)),
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
    """Return the change of each operation over each number of hosts that both probes have, at sizes that both have."""
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
    logs = np.array([math.log(after.p50_ns / before.p50_ns) for before, after in rows])
    measured = np.array([_variance(before) + _variance(after) for before, after in rows])
    mean = float(logs.mean())
    # Sizes of one probe share what differs between two probes; so that part does not average out over sizes.
    variance = float(measured.mean()) / len(rows) + 2 * BETWEEN_PROBES[kind] ** 2
    if len(rows) > 1:
        variance = max(variance, float(logs.var(ddof=1)) / len(rows))
    halfwidth = _CONFIDENCE * math.sqrt(variance)
    return Change(
        op=op,
        num_nodes=num_nodes,
        kind=kind,
        ratio=math.exp(mean),
        low=math.exp(mean - halfwidth),
        high=math.exp(mean + halfwidth),
        num_sizes=len(rows),
    )


def _variance(row: SweepRow) -> float:
    """Return the squared standard error of ln of the median time, from how its rounds differ."""
    logs = np.log(np.array(row.rounds_ns))
    return float(_ROBUST**2 * logs.var(ddof=1) / len(logs))


def outcome_words(found: Sequence[Change]) -> str:
    """Return one sentence on all changes, without a full stop."""
    slower, faster = [one for one in found if one.is_slower], [one for one in found if one.is_faster]
    decided = [one for one in found if one.is_decided]
    if not found:
        return "cannot tell: the probes have no operation and size in common that both measured in two rounds"
    if not decided:
        return "cannot tell: times vary too much; probe idle hosts, and for longer (--time)"
    noisy = f"; {len(found) - len(decided)} vary too much to tell" if len(decided) < len(found) else ""
    if slower:
        worst = max(slower, key=lambda one: one.ratio)
        more = f", and {len(slower) - 1} more" if len(slower) > 1 else ""
        return (
            f"slower: {worst.op} over {plural(worst.num_nodes, 'host')} takes {100 * (worst.ratio - 1):.0f} % longer "
            f"({worst.kind}, {100 * (worst.low - 1):+.0f} to {100 * (worst.high - 1):+.0f} %){more}{noisy}"
        )
    if faster:
        return f"not slower: {len(faster)} of {len(found)} comparisons are faster{noisy}"
    widest = max(max(one.high / one.ratio for one in decided) - 1, LEAST_CHANGE)
    return f"not slower: nothing changed; it could have seen {100 * widest:.0f} %{noisy}"


def _counts(record: ProbeRecord) -> list[int]:
    return sorted(len(host.ranks) for host in record.hosts)


def _shown(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text[:60] + "..." if len(text) > 60 else text) or "unknown"
