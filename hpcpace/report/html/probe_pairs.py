"""The pairs of hosts of a probe on its page: verdicts, a map of rates, latencies that stand out, sums over uplinks."""

from __future__ import annotations

import numpy as np

from hpcpace.core.text import format_duration, percent
from hpcpace.probe.pair_network import best_rates, late_pairs, least_latencies
from hpcpace.probe.record import PairRow, PairsRecord
from hpcpace.report.document import Plot
from hpcpace.report.drawing import binned
from hpcpace.report.html.maps import host_map
from hpcpace.report.html.text import figure, notes, table
from hpcpace.report.words.probe_pairs import (
    bit_rate,
    bit_unit,
    hosts_in_order,
    pairs_heading,
    switch_loads,
    usual_words,
    verdicts,
)

_MOST_HOSTS, _MOST_PAIRS, _MOST_LATE, _MOST_OPEN = 256, 256, 16, 16
_LEAST_IN_MAP = 3

PAIR_HEAD = ("host", "other host", "rate to it", "rate from it", "latency", "median", "p99", "not measured")
LATE_HEAD = ("host", "other host", "latency", "of the usual", "median", "p99")
SWITCH_HEAD = ("switch", "sends", "of its hosts' links", "receives", "of its hosts' links")


def pairs_drawn(pairs: PairsRecord | None) -> list[Plot]:
    """Return the map of rates from host to host; nothing for fewer than three hosts."""
    hosts = hosts_in_order(pairs.rows) if pairs is not None else []
    if pairs is None or len(hosts) < _LEAST_IN_MAP:
        return []
    best = best_rates(pairs.rows)
    per_unit, unit = bit_unit(list(best.values()))
    place = {name: number for number, name in enumerate(hosts)}
    rates = np.full((len(hosts), len(hosts)), np.nan)
    for (source, target), rate in best.items():
        rates[place[source], place[target]] = rate / per_unit
    if not np.isfinite(rates).any():
        return []
    usual = float(np.nanmedian(rates))
    # The slowest of a block is what a reader looks for.
    slowness, by_host, _ = binned(1.0 / np.maximum(rates, 1e-9), _MOST_HOSTS, _MOST_HOSTS)
    thinned = f" Each cell is the slowest of {by_host} by {by_host} hosts." if by_host > 1 else ""
    return [
        host_map(
            hosts,
            1.0 / slowness,
            by_host,
            name="probe-pairs",
            label="Rate from host to host",
            caption=(
                "Best rate from the host of a row to that of a column: blue is the median of "
                f"{bit_rate(usual * per_unit)} or more, orange is slower; empty where it was not measured.{thinned}"
            ),
            unit=unit,
            scale={"zmin": 0, "zmax": usual, "colorscale": "@rate"},
        )
    ]


def pairs_content(pairs: PairsRecord | None, drawn: list[Plot]) -> tuple[str, ...]:
    """Return the section; empty where pairs were not part of the probe.

    Args:
        pairs: what was measured.
        drawn: of `pairs_drawn`.
    """
    if pairs is None:
        return ()
    late = late_pairs(pairs.rows)
    no_late = ["no pair's latency stands out"] if least_latencies(pairs.rows) and not late else []
    return (
        notes([pairs_heading(pairs), *filter(None, [usual_words(pairs)]), *verdicts(pairs), *no_late], has_terms=False),
        *(figure(plot) for plot in drawn),
        _late_table(late, pairs.usual_latency_ns),
        _switch_table(pairs),
        _pairs_table(pairs),
    )


def _late_table(late: list[PairRow], usual_ns: float | None) -> str:
    which = f", the first {_MOST_LATE} of {len(late)}" if len(late) > _MOST_LATE else ""
    rows = [
        (
            row.first,
            row.second,
            _duration(row.least_ns),
            f"{row.least_ns / usual_ns:.1f} times" if row.least_ns and usual_ns else "",
            _duration(row.p50_ns),
            _duration(row.p99_ns),
        )
        for row in late[:_MOST_LATE]
    ]
    caption = f"Latency that stands out: half a round trip of 8 bytes, the least{which}"
    about = [("", f"{row.first} {row.second}") for row in late[:_MOST_LATE]]
    return table(caption, LATE_HEAD, rows, text=(0, 1), about=about)


def _switch_table(pairs: PairsRecord) -> str:
    rows = [
        (
            load.switch,
            bit_rate(load.sent.rate),
            percent(load.sent.rate / load.sent.possible),
            bit_rate(load.received.rate),
            percent(load.received.rate / load.received.possible),
        )
        for load in switch_loads(pairs.bisections)
    ]
    return table("All hosts of a switch at once, with another switch: its best round", SWITCH_HEAD, rows)


def _pairs_table(pairs: PairsRecord) -> str:
    """Return every pair with its best rates and its least latency, the slowest first."""
    best, latency = best_rates(pairs.rows), least_latencies(pairs.rows)
    problems = {_key(row): row.problem for row in pairs.rows if row.problem}
    keys = sorted(
        {_key(row) for row in pairs.rows},
        key=lambda key: (min(best.get(key, 0.0), best.get(key[::-1], 0.0)), key),
    )
    rows = []
    for key in keys[:_MOST_PAIRS]:
        rates = [bit_rate(best[way]) if way in best else "" for way in (key, key[::-1])]
        row = latency.get(key)
        times = [_duration(one) for one in (row.least_ns, row.p50_ns, row.p99_ns)] if row is not None else [""] * 3
        rows.append((*key, *rates, *times, problems.get(key, "")))
    caption = "Best rate and least latency (half a round trip of 8 bytes) of each pair, the slowest first"
    about = [("", " ".join(key)) for key in keys[:_MOST_PAIRS]]
    has_problem = any(row[-1] for row in rows)
    width = len(PAIR_HEAD) if has_problem else len(PAIR_HEAD) - 1
    shown = [row[:width] for row in rows]
    inside = table(caption, PAIR_HEAD[:width], shown, text=(0, 1, 7), about=about)
    if len(keys) <= _MOST_OPEN:
        return inside
    which = f"{len(shown)} of {len(keys)}" if len(keys) > len(shown) else f"All {len(shown)}"
    return f"<details><summary>{which} pairs of hosts in figures</summary>{inside}</details>"


def _key(row: PairRow) -> tuple[str, str]:
    return min(row.first, row.second), max(row.first, row.second)


def _duration(time_ns: float | None) -> str:
    return "" if time_ns is None else format_duration(time_ns)
