"""Pairs of hosts, noise and copies of a probe after maintenance against those of one from before.

A probe measures each of these once or a few times, so what two probes of the same hosts differ by cannot be taken from
it and is assumed, as one standard deviation of ln time in each probe: see `ASSUMED`. Where a part has many comparisons,
the interval is as wide as it must be for the part to raise a false alarm as seldom as one comparison at three standard
errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from hpcpace.probe.change import LEAST_CHANGE, Change, interval
from hpcpace.probe.copies_record import CopiesRecord
from hpcpace.probe.noise_record import NoiseRecord
from hpcpace.probe.pair_best import Way, best_rates, least_latencies
from hpcpace.probe.pair_record import PairRow, PairsRecord
from hpcpace.probe.pair_results import LEAST_LATENCY_NS
from hpcpace.probe.record import ProbeRecord
from hpcpace.quoting import printable

ASSUMED = {"rate": 0.03, "latency": 0.05, "uplinks": 0.03, "noise": 0.003, "memory": 0.03, "device": 0.02}
"""Standard deviation of ln time between two probes of the same hosts, where nothing changed; assumed, not measured."""
OF_NOISE = 0.25
"""What noise itself differs by from time to time, as a share of what the core lost before; assumed."""
LEAST_NOISE = 0.01
"""A core that loses less than 1 % of its time more is not noisier."""
LEAST_ONCE = 0.5
"""A pair that was measured once may have been disturbed, which costs a third of the rate, so half more time."""
_WIDEST_LATENCY = 1.0
_CONFIDENCE = 3.0
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
        least=lambda way, _: LEAST_CHANGE if times[way] > 1 else LEAST_ONCE,
    )
    yield from _compared(
        "pairs",
        "latency",
        _latencies(then),
        _latencies(now),
        lambda way: f"{way[0]} and {way[1]}",
        least=lambda _, before_ns: max(LEAST_CHANGE, LEAST_LATENCY_NS / before_ns),
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
        yield Change(part="noise", name=name, kind="noise", least=LEAST_NOISE, ratio=ratio, low=low, high=high)


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
    least: Callable[[Any, float], float] = lambda _key, _before: LEAST_CHANGE,
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
