"""Two probes compared: what became slower or faster beyond noise, as time after over time before.

A probe measures pairs, cores and copies once or a few times, so what two probes of the same hosts differ by cannot be
taken from it and is assumed, as one standard deviation of ln time in each probe: see `ASSUMED`. Where a part has many
comparisons, the interval is as wide as it must be for the part to raise a false alarm as seldom as one comparison at
three standard errors.

Noise of an operation has two parts: the rounds of each probe differ, and two probes of the same hosts differ by more
than that. The first is measured. The second is assumed, 1.5 % of a rate and 5 % of a latency (one standard deviation of
ln time), unless the sizes of one operation show it to be larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from hpcpace.core.change import Outcome, TimeChange, fact_changes, whole_interval
from hpcpace.core.errors import ProbeError
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable
from hpcpace.probe.pair_network import MIN_LATENCY_NS, best_rates, least_latencies
from hpcpace.probe.record import PairRow, ProbeRecord, SweepRow

MIN_CHANGE = 0.05
"""Smaller changes are ignored, whatever the noise."""
_MAX_HALFWIDTH = 0.3
"""A comparison that could not have seen 30 % more time says nothing."""
_MAX_LN = 20.0
"""Times that differ by more than a factor of 500 million were not measured, but a file may say so."""


@dataclass(frozen=True, kw_only=True)
class ProbeChange(TimeChange):
    """One thing that two probes measured, by its time.

    Attributes:
        part: of the probe, such as `sweep`.
        name: what it is, such as `all_reduce` or `n1 to n2`.
        num_nodes: hosts that took part, where that distinguishes things of one name; 0 elsewhere.
        kind: what was measured, such as `latency` or `rate`.
        least: the change that counts, as a share.
        widest: the share of more time that it must have been able to see, in order to say that nothing changed.
    """

    part: str
    name: str
    num_nodes: int = 0
    kind: str
    least: float = MIN_CHANGE
    widest: float = _MAX_HALFWIDTH

    @property
    def subject(self) -> str:
        """What it is, in words: `all_reduce over 4 hosts`."""
        return f"{self.name} over {plural(self.num_nodes, 'host')}" if self.num_nodes else self.name

    @property
    def is_slower(self) -> bool:
        """Whether it became slower beyond noise."""
        return self.outcome(self.least) is Outcome.SLOWER

    @property
    def is_faster(self) -> bool:
        """Whether it became faster beyond noise."""
        return self.outcome(self.least) is Outcome.FASTER

    @property
    def is_decided(self) -> bool:
        """Whether something changed, or the interval is narrow enough and near enough to 1 to say that nothing did."""
        if self.is_slower or self.is_faster:
            return True
        stands_out = self.outcome(min(self.least, MIN_CHANGE)) is not Outcome.SAME
        return self.visible_share < self.widest and not stands_out

    @property
    def visible_share(self) -> float:
        """The share of more time that it could have seen."""
        return math.expm1(self.high - self.value)


def interval(mean: float, variance: float, num_errors: float) -> tuple[float, float, float]:
    """Return value, low and high of a `Change`.

    Args:
        mean: ln of time after over time before.
        variance: of that.
        num_errors: standard errors to each side.
    """
    halfwidth = num_errors * math.sqrt(variance)
    value, low, high = (min(max(each, -_MAX_LN), _MAX_LN) for each in (mean, mean - halfwidth, mean + halfwidth))
    return value, low, high


def is_unclear(found: Sequence[ProbeChange]) -> bool:
    """Return whether there is nothing to compare, or a part of which no comparison is decided."""
    parts = {one.part for one in found}
    return not parts or bool(parts - {one.part for one in found if one.is_decided})


def outcome_words(found: Sequence[ProbeChange]) -> str:
    """Return one sentence on all changes, without a full stop."""
    slower, faster = [one for one in found if one.is_slower], [one for one in found if one.is_faster]
    decided = [one for one in found if one.is_decided]
    if not found:
        return (
            "cannot tell: the probes have no operation and size in common that both measured in two rounds, and no "
            "pair, core or copy"
        )
    if not decided:
        return "cannot tell: times vary too much; probe idle hosts, and for longer (--time)"
    noisy = f"; {len(found) - len(decided)} vary too much to tell" if len(decided) < len(found) else ""
    if slower:
        worst = max(slower, key=lambda one: one.value)
        more = f", and {len(slower) - 1} more" if len(slower) > 1 else ""
        return (
            f"slower: {worst.subject} takes {100 * worst.share:.0f} % longer "
            f"({worst.kind}, {whole_interval(worst)}){more}{noisy}"
        )
    if is_unclear(found):
        unclear = " and ".join(sorted({one.part for one in found} - {one.part for one in decided}))
        return f"cannot tell: the times of {unclear} vary too much; probe idle hosts, and for longer (--time)"
    if faster:
        return f"not slower: {len(faster)} of {len(found)} comparisons are faster{noisy}"
    widest = max(*(one.visible_share for one in decided), MIN_CHANGE)
    return f"not slower: nothing changed; it could have seen {100 * widest:.0f} %{noisy}"


ASSUMED = {"rate": 0.03, "latency": 0.05, "uplinks": 0.03, "noise": 0.003, "memory": 0.03, "device": 0.02}
"""Standard deviation of ln time between two probes of the same hosts, where nothing changed; assumed, not measured."""
OF_NOISE = 0.25
"""What noise itself differs by from time to time, as a share of what the core lost before; assumed."""
MIN_NOISE = 0.01
"""A core that loses less than 1 % of its time more is not noisier."""
MIN_ONCE = 0.5
"""A pair that was measured once may have been disturbed, which costs a third of the rate, so half more time."""
_WIDEST_LATENCY = 1.0

Key = tuple[Any, ...]
Values = Mapping[Key, float]


def _same(_: ProbeRecord, __: Key, ___: float) -> float:
    return MIN_CHANGE


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Things that a part of a probe measures once or a few times.

    Attributes:
        part, kind: as of `Change`.
        values: rates of them in a record, or times; empty without the part.
        name: of one, by its key.
        is_time: whether the values are times.
        least: the change that counts, by the later record, the key and the value before.
        widest: as of `Change`.
    """

    part: str
    kind: str
    values: Callable[[ProbeRecord], Values]
    name: str
    is_time: bool = False
    least: Callable[[ProbeRecord, Key, float], float] = _same
    widest: float = _MAX_HALFWIDTH

    def changes(self, before: ProbeRecord, after: ProbeRecord) -> Iterator[ProbeChange]:
        """Yield the change of all that both have and is above 0."""
        then, now = self.values(before), self.values(after)
        common = [key for key in now if then.get(key, 0.0) > 0 < now[key]]
        for key in common:
            mean = (math.log(now[key]) - math.log(then[key])) * (1 if self.is_time else -1)
            deviation = ASSUMED[self.kind] + (OF_NOISE * (1 - then[key]) if self.part == "noise" else 0.0)
            value, low, high = interval(mean, 2 * deviation**2, _num_errors(len(common)))
            yield ProbeChange(
                part=self.part,
                name=printable(self.name.format(*key)),
                kind=self.kind,
                least=self.least(after, key, then[key]),
                widest=self.widest,
                value=value,
                low=low,
                high=high,
            )


def host_changes(before: ProbeRecord, after: ProbeRecord) -> list[ProbeChange]:
    """Return the change of each pair and direction, core and copy that both probes measured."""
    return [change for compared in _COMPARED for change in compared.changes(before, after)]


def left_out(before: ProbeRecord, after: ProbeRecord) -> list[str]:
    """Return what one probe has and the other lacks, a sentence for each part."""
    sentences = []
    for part in ("sweep", "pairs", "noise", "copies"):
        then, now = _keys(before, part), _keys(after, part)
        if bool(then) != bool(now):
            who = "the other probe" if then else "this probe"
            sentences.append(f"{part}: only {who} measured it, so it is not compared")
        elif then and not then & now:
            sentences.append(f"{part}: the probes measured nothing in common, so it is not compared")
        elif then != now:
            sentences.append(f"{part}: {len(then ^ now)} of {len(then | now)} are in one probe only, and not compared")
    return sentences


def _keys(record: ProbeRecord, part: str) -> set[Key]:
    if part == "sweep":
        return {(row.op, row.num_nodes, row.size_bytes) for row in record.sweep}
    compared = [one for one in _COMPARED if one.part == part and one.kind not in ("latency", "uplinks")]
    return {key for one in compared for key in one.values(record)}


def _apart(record: ProbeRecord) -> list[PairRow]:
    """Return what was measured alone: a pair that shares a link with others reaches what these leave."""
    return [row for row in record.pairs.rows if row.is_apart] if record.pairs else []


def _least_of_rate(after: ProbeRecord, way: Key, _: float) -> float:
    times = sum({row.first, row.second} == set(way) for row in _apart(after))
    return MIN_CHANGE if times > 1 else MIN_ONCE


def _least_of_latency(_: ProbeRecord, __: Key, before_ns: float) -> float:
    return max(MIN_CHANGE, MIN_LATENCY_NS / before_ns)


def _latencies(record: ProbeRecord) -> Values:
    return {way: row.least_ns or 0.0 for way, row in least_latencies(_apart(record)).items()}


def _sums(record: ProbeRecord) -> Values:
    best: dict[Key, float] = {}
    for row in record.pairs.bisections if record.pairs else ():
        key = (row.source, row.target, row.num_pairs)
        best[key] = max(row.rate, best.get(key, 0.0))
    return best


def _work(record: ProbeRecord) -> Values:
    """Return the share of its time that each core works: equal work takes the longer the more detours cost."""
    cores = record.noise.cores if record.noise else ()
    return {(core.host, core.cpu): max(1 - core.figures.share, 0.01) for core in cores}


def _memory(record: ProbeRecord) -> Values:
    rows = record.copies.memory if record.copies else ()
    return {(row.host, row.numa_node, row.num_threads): row.rate for row in rows}


def _devices(record: ProbeRecord) -> Values:
    found: dict[Key, float] = {}
    for row in record.copies.devices if record.copies else ():
        place = (row.host, row.device, row.numa_node, "pinned" if row.is_pinned else "not pinned")
        found |= {(*place, "to it"): row.to_device, (*place, "from it"): row.from_device}
    return found


_COMPARED = (
    _Compared(
        part="pairs",
        kind="rate",
        values=lambda record: best_rates(_apart(record)),
        name="{} to {}",
        least=_least_of_rate,
    ),
    _Compared(
        part="pairs",
        kind="latency",
        values=_latencies,
        name="{} and {}",
        is_time=True,
        least=_least_of_latency,
        widest=_WIDEST_LATENCY,
    ),
    _Compared(part="pairs", kind="uplinks", values=_sums, name="all of {} to {}"),
    _Compared(part="noise", kind="noise", values=_work, name="{} core {}", least=lambda *_: MIN_NOISE),
    _Compared(part="copies", kind="memory", values=_memory, name="{} NUMA node {}"),
    _Compared(part="copies", kind="device", values=_devices, name="{} GPU {} NUMA node {} {} {}"),
)


def _num_errors(num_comparisons: int) -> float:
    """Return how many standard errors so many comparisons need for one false alarm as seldom as one at three."""
    normal = NormalDist()
    return max(_CONFIDENCE, -normal.inv_cdf(normal.cdf(-_CONFIDENCE) / max(num_comparisons, 1)))


BETWEEN_PROBES = {"latency": 0.05, "rate": 0.015}
"""Standard deviation of ln time between two probes of the same hosts, where nothing changed."""
_CONFIDENCE = 3.0
_ROBUST = 1.2533  # standard error of a median over that of a mean, for normal noise
_MIN_ROUNDS = 2
_MAX_LETTERS = 60


def check_comparable(before: ProbeRecord, after: ProbeRecord) -> None:
    """Refuse probes of other hosts or another world, whose times mean something else.

    Raises:
        ProbeError: with all that differs.
    """
    found = fact_changes("", _world(before), _world(after), words=_shown)
    if differences := [f"{one.name} {one.before} then, {one.after} now" for one in found]:
        raise ProbeError(
            f"the probes are of different worlds ({'; '.join(differences)}): probe the same hosts in the same way, or "
            "compare with --other-hosts"
        )


def changes(before: ProbeRecord, after: ProbeRecord) -> list[ProbeChange]:
    """Return the changes of all that both probes measured: operations, then pairs of hosts, noise and copies.

    An operation counts over each number of hosts that both probes have, at sizes that both have.
    """
    return [*_sweep_changes(before, after), *host_changes(before, after)]


def _sweep_changes(before: ProbeRecord, after: ProbeRecord) -> list[ProbeChange]:
    then = {(row.op, row.num_nodes, row.size_bytes): row for row in before.sweep}
    pairs: dict[tuple[str, int], list[tuple[SweepRow, SweepRow]]] = {}
    for row in after.sweep:
        key = (row.op, row.num_nodes, row.size_bytes)
        if key in then and min(len(row.rounds_ns), len(then[key].rounds_ns)) >= _MIN_ROUNDS:
            pairs.setdefault((row.op, row.num_nodes), []).append((then[key], row))
    found = []
    for (op, num_nodes), rows in pairs.items():
        half = (len(rows) + 1) // 2
        for kind, some in (("latency", rows[:half]), ("rate", rows[half:])):
            if some:
                found.append(_change(op, num_nodes, kind, some))
    return found


def _change(op: str, num_nodes: int, kind: str, rows: Sequence[tuple[SweepRow, SweepRow]]) -> ProbeChange:
    logs = np.array([math.log(after.p50_ns) - math.log(before.p50_ns) for before, after in rows])
    measured = np.array([_variance(before) + _variance(after) for before, after in rows])
    mean = float(logs.mean())
    # Sizes of one probe share what differs between two probes; so that part does not average out over sizes.
    variance = float(measured.mean()) / len(rows) + 2 * BETWEEN_PROBES[kind] ** 2
    if len(rows) > 1:
        variance = max(variance, float(logs.var(ddof=1)) / len(rows))
    value, low, high = interval(mean, variance, _CONFIDENCE)
    return ProbeChange(part="sweep", name=op, num_nodes=num_nodes, kind=kind, value=value, low=low, high=high)


def _variance(row: SweepRow) -> float:
    """Return the squared standard error of ln of the median time, from how its rounds differ."""
    logs = np.log(np.array(row.rounds_ns))
    return float(_ROBUST**2 * logs.var(ddof=1) / len(logs))


def _world(record: ProbeRecord) -> dict[str, str]:
    return {
        "cluster": record.cluster,
        "hosts": ",".join(sorted(host.name for host in record.hosts)),
        "ranks per host": ",".join(str(count) for count in sorted(len(host.ranks) for host in record.hosts)),
        "device": f"{record.device} {record.device_name}",
        "backend": record.backend,
    }


def _shown(text: str) -> str:
    short = text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."
    return printable(short) or "unknown"
