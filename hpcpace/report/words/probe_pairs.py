"""The pairs of a probe in words and in order, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcpace.core.text import format_duration, format_rate, percent, plural, printable
from hpcpace.probe.record import BisectionRow, PairRow, PairsRecord


@dataclass(frozen=True, kw_only=True)
class SwitchLoad:
    """What the hosts of one switch sent and received, all at once, each with its best partner.

    Attributes:
        switch: its name.
        sent, received: the best sums.
    """

    switch: str
    sent: BisectionRow
    received: BisectionRow


def pairs_heading(pairs: PairsRecord) -> str:
    """Return how many pairs were measured, over what; that none was otherwise."""
    if not pairs.rows:
        return "pairs of hosts: not measured"
    num_pairs = len({frozenset((row.first, row.second)) for row in pairs.rows})
    return f"pairs of hosts: {plural(num_pairs, 'pair')} over {printable(pairs.carrier)}"


def usual_words(pairs: PairsRecord) -> str:
    """Return what a link usually carries; empty if nothing was measured."""
    if pairs.usual is None:
        return ""
    share = "" if pairs.usual_of_limit is None else f", {percent(pairs.usual_of_limit)} of the line rate"
    latency = "" if pairs.usual_latency_ns is None else f", latency {format_duration(pairs.usual_latency_ns)}"
    return f"a link usually carries {bit_rate(pairs.usual)}{share}{latency}"


def verdicts(pairs: PairsRecord) -> list[str]:
    """Return a sentence for each slow link, or that there is none, and why not everything could be told."""
    found = [printable(finding.words) for finding in pairs.findings]
    if pairs.rows and not pairs.findings:
        found.append("no link is slower than the others")
    return [*found, *([printable(pairs.note)] if pairs.note else [])]


def hosts_in_order(rows: Sequence[PairRow]) -> list[str]:
    """Return the hosts of some pairs, n10 after n9."""
    return sorted({name for row in rows for name in (row.first, row.second)}, key=_by_number)


def switch_loads(bisections: Sequence[BisectionRow]) -> list[SwitchLoad]:
    """Return what each switch that both sent and received did at its best, leaf10 after leaf9."""
    sent: dict[str, BisectionRow] = {}
    received: dict[str, BisectionRow] = {}
    for row in sorted(bisections, key=lambda each: each.rate):
        sent[row.source] = received[row.target] = row
    return [
        SwitchLoad(switch=switch, sent=sent[switch], received=received[switch])
        for switch in sorted(sent.keys() & received.keys(), key=_by_number)
    ]


def bit_rate(bytes_per_s: float) -> str:
    """Return a rate of bytes as networks are named, in bits: `9.4 Gb/s`."""
    return format_rate(8 * bytes_per_s)


def bit_unit(rates: Sequence[float]) -> tuple[float, str]:
    """Return by what to divide rates of bytes so that they have three or four digits, and their unit in bits."""
    return (1e9 / 8, "Gb/s") if max(rates, default=0.0) * 8 >= 1e10 else (1e6 / 8, "Mb/s")


def _by_number(name: str) -> tuple[str, int, str]:
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name
