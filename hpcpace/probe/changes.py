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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from hpcpace.core.errors import ProbeError
from hpcpace.core.text import plural, printable
from hpcpace.probe.pair_network import MIN_LATENCY_NS, Way, best_rates, least_latencies
from hpcpace.probe.record import CopiesRecord, NoiseRecord, PairRow, PairsRecord, ProbeRecord, SweepRow

MIN_CHANGE = 0.05
"""A smaller change is none, whatever the noise."""
_MAX_HALFWIDTH = 0.3
"""A comparison that could not have seen 30 % more time says nothing."""
_MAX_LN = 20.0
"""Times that differ by more than a factor of 500 million were not measured, but a file may say so."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that two probes measured.

    Attributes:
        part: of the probe, such as `sweep`.
        name: what it is, such as `all_reduce` or `n1 to n2`.
        num_nodes: hosts that took part, where that distinguishes things of one name; 0 elsewhere.
        kind: what was measured, such as `latency` or `rate`.
        ratio: time after over time before.
        low, high: its interval.
        least: the change that counts, as a share.
        widest: the share of more time that it must have been able to see, in order to say that nothing changed.
    """

    part: str
    name: str
    num_nodes: int = 0
    kind: str
    ratio: float
    low: float
    high: float
    least: float = MIN_CHANGE
    widest: float = _MAX_HALFWIDTH

    @property
    def subject(self) -> str:
        """What it is, in words: `all_reduce over 4 hosts`."""
        return f"{self.name} over {plural(self.num_nodes, 'host')}" if self.num_nodes else self.name

    @property
    def is_slower(self) -> bool:
        """Whether it became slower beyond noise."""
        return self.low > 1 and self.ratio > 1 + self.least

    @property
    def is_faster(self) -> bool:
        """Whether it became faster beyond noise."""
        return self.high < 1 and self.ratio < 1 / (1 + self.least)

    @property
    def is_decided(self) -> bool:
        """Whether something changed, or the interval is narrow enough and near enough to 1 to say that nothing did."""
        if self.is_slower or self.is_faster:
            return True
        small = 1 + min(self.least, MIN_CHANGE)
        stands_out = (self.low > 1 and self.ratio > small) or (self.high < 1 and self.ratio < 1 / small)
        return self.high / self.ratio - 1 < self.widest and not stands_out


def interval(mean: float, variance: float, num_errors: float) -> tuple[float, float, float]:
    """Return ratio, low and high of a `Change`.

    Args:
        mean: ln of time after over time before.
        variance: of that.
        num_errors: standard errors to each side.
    """
    halfwidth = num_errors * math.sqrt(variance)
    ratio, low, high = (
        math.exp(min(max(each, -_MAX_LN), _MAX_LN)) for each in (mean, mean - halfwidth, mean + halfwidth)
    )
    return ratio, low, high


def is_unclear(found: Sequence[Change]) -> bool:
    """Return whether there is nothing to compare, or a part of which no comparison is decided."""
    parts = {one.part for one in found}
    return not parts or bool(parts - {one.part for one in found if one.is_decided})


def outcome_words(found: Sequence[Change]) -> str:
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
        worst = max(slower, key=lambda one: one.ratio)
        more = f", and {len(slower) - 1} more" if len(slower) > 1 else ""
        return (
            f"slower: {worst.subject} takes {100 * (worst.ratio - 1):.0f} % longer "
            f"({worst.kind}, {100 * (worst.low - 1):+.0f} to {100 * (worst.high - 1):+.0f} %){more}{noisy}"
        )
    if is_unclear(found):
        unclear = " and ".join(sorted({one.part for one in found} - {one.part for one in decided}))
        return f"cannot tell: the times of {unclear} vary too much; probe idle hosts, and for longer (--time)"
    if faster:
        return f"not slower: {len(faster)} of {len(found)} comparisons are faster{noisy}"
    widest = max(max(one.high / one.ratio for one in decided) - 1, MIN_CHANGE)
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
_PARTS = ("pairs", "noise", "copies")

Rates = Mapping[Hashable, float]


def host_changes(before: ProbeRecord, after: ProbeRecord) -> list[Change]:
    """Return the change of each pair and direction, core and copy that both probes measured."""
    found: list[Change] = []
    if before.pairs is not None and after.pairs is not None:
        found += _pairs(before.pairs, after.pairs)
    if before.noise is not None and after.noise is not None:
        found += _noise(before.noise, after.noise)
    if before.copies is not None and after.copies is not None:
        found += _copies(before.copies, after.copies)
    return found


def left_out(before: ProbeRecord, after: ProbeRecord) -> list[str]:
    """Return what one probe has and the other lacks, a sentence for each part."""
    sentences = []
    for part in ("sweep", *_PARTS):
        then, now = _keys(before, part), _keys(after, part)
        if bool(then) != bool(now):
            who = "the other probe" if then else "this probe"
            sentences.append(f"{part}: only {who} measured it, so it is not compared")
        elif then and not then & now:
            sentences.append(f"{part}: the probes measured nothing in common, so it is not compared")
        elif then != now:
            sentences.append(f"{part}: {len(then ^ now)} of {len(then | now)} are in one probe only, and not compared")
    return sentences


def _keys(record: ProbeRecord, part: str) -> set[Hashable]:
    if part == "sweep":
        return {(row.op, row.num_nodes, row.size_bytes) for row in record.sweep}
    if part == "pairs":
        return set(best_rates(_apart(record.pairs))) if record.pairs is not None else set()
    if part == "noise":
        return {(core.host, core.cpu) for core in record.noise.cores} if record.noise is not None else set()
    return {*_memory(record.copies), *_devices(record.copies)} if record.copies is not None else set()


def _apart(pairs: PairsRecord) -> list[PairRow]:
    """Return what was measured alone: a pair that shares a link with others reaches what these leave."""
    return [row for row in pairs.rows if row.is_apart]


def _pairs(before: PairsRecord, after: PairsRecord) -> Iterator[Change]:
    then, now = _apart(before), _apart(after)
    times: dict[Way, int] = {}
    for row in now:
        for way in ((row.first, row.second), (row.second, row.first)):
            times[way] = times.get(way, 0) + 1
    yield from _compared(
        "pairs",
        "rate",
        best_rates(then),
        best_rates(now),
        lambda way: f"{way[0]} to {way[1]}",
        least=lambda way, _: MIN_CHANGE if times[way] > 1 else MIN_ONCE,
    )
    yield from _compared(
        "pairs",
        "latency",
        _latencies(then),
        _latencies(now),
        lambda way: f"{way[0]} and {way[1]}",
        least=lambda _, before_ns: max(MIN_CHANGE, MIN_LATENCY_NS / before_ns),
        is_time=True,
        widest=_WIDEST_LATENCY,
    )
    yield from _compared("pairs", "uplinks", _sums(before), _sums(after), lambda way: f"all of {way[0]} to {way[1]}")


def _latencies(rows: Sequence[PairRow]) -> dict[Way, float]:
    return {way: row.least_ns or 0.0 for way, row in least_latencies(rows).items()}


def _sums(pairs: PairsRecord) -> Rates:
    best: dict[Hashable, float] = {}
    for row in pairs.bisections:
        key = (row.source, row.target, row.num_pairs)
        best[key] = max(row.rate, best.get(key, 0.0))
    return best


def _noise(before: NoiseRecord, after: NoiseRecord) -> Iterator[Change]:
    """Yield how much longer equal work takes on each core by what detours cost."""
    then, now = ({(core.host, core.cpu): core.figures.share for core in noise.cores} for noise in (before, after))
    common = [key for key in now if key in then]
    for key in common:
        deviation = ASSUMED["noise"] + OF_NOISE * then[key]
        mean = math.log(max(1 - then[key], 0.01) / max(1 - now[key], 0.01))
        ratio, low, high = interval(mean, 2 * deviation**2, _num_errors(len(common)))
        name = printable(f"{key[0]} core {key[1]}")
        yield Change(part="noise", name=name, kind="noise", least=MIN_NOISE, ratio=ratio, low=low, high=high)


def _copies(before: CopiesRecord, after: CopiesRecord) -> Iterator[Change]:
    yield from _compared(
        "copies", "memory", _memory(before), _memory(after), lambda key: f"{key[0]} NUMA node {key[1]}"
    )
    yield from _compared(
        "copies",
        "device",
        _devices(before),
        _devices(after),
        lambda key: f"{key[0]} GPU {key[1]} NUMA node {key[2]} {'pinned' if key[3] else 'not pinned'} {key[4]}",
    )


def _memory(copies: CopiesRecord) -> Rates:
    return {(row.host, row.numa_node, row.num_threads): row.rate for row in copies.memory}


def _devices(copies: CopiesRecord) -> Rates:
    found: dict[Hashable, float] = {}
    for row in copies.devices:
        place = (row.host, row.device, row.numa_node, row.is_pinned)
        found[(*place, "to it")], found[(*place, "from it")] = row.to_device, row.from_device
    return found


def _compared(
    part: str,
    kind: str,
    before: Mapping[Any, float],
    after: Mapping[Any, float],
    name: Callable[[Any], str],
    *,
    least: Callable[[Any, float], float] = lambda _key, _before: MIN_CHANGE,
    is_time: bool = False,
    widest: float = 0.3,
) -> Iterator[Change]:
    """Yield the changes of what both have and is above 0: rates, or times if `is_time`."""
    common = [key for key in after if before.get(key, 0.0) > 0 < after[key]]
    for key in common:
        mean = (math.log(after[key]) - math.log(before[key])) * (1 if is_time else -1)
        ratio, low, high = interval(mean, 2 * ASSUMED[kind] ** 2, _num_errors(len(common)))
        yield Change(
            part=part,
            name=printable(name(key)),
            kind=kind,
            least=least(key, before[key]),
            widest=widest,
            ratio=ratio,
            low=low,
            high=high,
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
        if key in then and min(len(row.rounds_ns), len(then[key].rounds_ns)) >= _MIN_ROUNDS:
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
