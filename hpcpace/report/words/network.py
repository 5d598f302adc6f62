"""The network in words, on a terminal and on the page alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from hpcpace.core.text import format_bytes, format_rate, listed, printable
from hpcpace.diagnosis.network_summary import DirectionUse, HostRetransmissions, InterfaceRow, NetworkFigures, PairRow

NONE = "-"
FOREIGN = (
    "foreign: bytes that no TCP connection of this job's ranks carried; other jobs, but also files, checkpoints and "
    "MPI of this one"
)
_LEAST_SHARE = 1e-5
_ZEROS = re.compile(r"\.0+ ")
_NOUNS = {"errors": "frames with errors", "drops": "dropped frames", "pauses": "pauses", "marks": "congestion marks"}
_MOST_NAMES = 4
_SLOW_RATIO, _LONG, _MUCH = 2.0, 0.5, 0.1


def interface_name(row: InterfaceRow) -> str:
    """Return `n4 eth0`."""
    return f"{row.host} {row.interface}"


def line_rate(row: InterfaceRow) -> str:
    """Return the line rate, with a mark where tc set it; `?` where it is not known."""
    if row.line_rate_bps is None:
        return "?"
    return _ZEROS.sub(" ", format_rate(row.line_rate_bps)) + ("*" if row.rate_source == "tc" else "")


def share(value: float | None) -> str:
    """Return a share in percent with two digits; a dash where it is not known."""
    if value is None:
        return NONE
    return f"{100 * value:.0f} %" if value >= 0.0995 or value < _LEAST_SHARE else f"{100 * value:.2g} %"


def use_cells(use: DirectionUse) -> tuple[str, str]:
    """Return mean and peak of a direction: of the line rate, or in bit/s where that is not known."""
    if use.utilisation is None or use.peak_utilisation is None:
        return format_rate(use.mean_bps), format_rate(use.peak_bps)
    return share(use.utilisation), share(use.peak_utilisation)


def foreign_cell(use: DirectionUse) -> str:
    """Return foreign traffic: of the line rate, or of the bytes where that is not known."""
    return share(use.foreign_share if use.foreign_utilisation is None else use.foreign_utilisation)


def pair_cells(row: PairRow) -> tuple[str, ...]:
    """Return bytes, rate, busy share and retransmitted share of a pair."""
    rate = NONE if row.rate_bps is None else format_rate(row.rate_bps)
    return format_bytes(row.bytes_per_step), rate, share(row.busy_share), share(row.retransmitted_share)


def end_name(rank: int, host: str) -> str:
    """Return `3 n2`."""
    return f"{rank} {host}".rstrip()


def network_notes(network: NetworkFigures) -> list[str]:
    """Return what a reader must know of the network, one sentence each, the most telling first."""
    found = [sentence for row in network.interfaces for sentence in _foreign_sentences(row)]
    found = [*_limited(found, "interfaces have foreign traffic"), *_raised_sentences(network)]
    found += _slow_pair(network)
    if any(use.foreign_share is not None for row in network.interfaces for use in (row.sent, row.received)):
        found.append(FOREIGN)
    return [*found, *_unknown_sentences(network)]


def _foreign_sentences(row: InterfaceRow) -> Iterable[str]:
    for name, use in (("sent", row.sent), ("received", row.received)):
        if not use.is_foreign or use.foreign_bps is None or use.foreign_share is None:
            continue
        part = use.foreign_utilisation if use.foreign_utilisation is not None else use.foreign_share
        whole = "line rate" if use.foreign_utilisation is not None else "bytes"
        of_it = f"{share(part)} of the {whole} of {printable(interface_name(row))}"
        yield f"{of_it} was foreign traffic: it {name} {format_rate(use.foreign_bps)} that was not this job's"


def _raised_sentences(network: NetworkFigures) -> list[str]:
    found = []
    for row in network.interfaces:
        counts = [f"{getattr(row, kind)} {_NOUNS[kind]}" for kind in row.raised]
        if counts:
            found.append(f"{printable(interface_name(row))} had {listed(counts)}, far more than the other hosts")
    for host in network.retransmissions:
        if host.is_raised:
            found.append(f"{printable(host.host)} {_again(host)}")
    return _limited(found, "counters are far above those of the other hosts")


def _again(host: HostRetransmissions) -> str:
    usual = "" if host.usual_share is None else f", the others {100 * host.usual_share:.2g} %"
    return f"sent {100 * host.share:.2g} % of its bytes again{usual}"


def _slow_pair(network: NetworkFigures) -> list[str]:
    """Return the slowest of the pairs that are busy for half of the time, where it is far below the median."""
    most = max((row.bytes_per_step for row in network.pairs), default=0.0)
    timed = [
        (row.rate_bps, row)
        for row in network.pairs
        if row.rate_bps and (row.busy_share or 0.0) >= _LONG and row.bytes_per_step >= _MUCH * most
    ]
    if not timed or not network.median_rate_bps:
        return []
    rate_bps, row = min(timed, key=lambda pair: pair[0])
    if rate_bps * _SLOW_RATIO > network.median_rate_bps:
        return []
    ends = f"rank {row.source} on {printable(row.source_host)} to rank {row.destination}"
    return [
        f"slowest pair: {ends} on {printable(row.destination_host)} with {format_rate(rate_bps)}, sending for "
        f"{share(row.busy_share)} of the time; the median of pairs is {format_rate(network.median_rate_bps)}"
    ]


def _unknown_sentences(network: NetworkFigures) -> list[str]:
    found = []
    if any(row.rate_source == "tc" for row in network.interfaces):
        found.append("*: tc shapes what is sent to this rate; what is received is shown as a share of the same")
    no_rate = [interface_name(row) for row in network.interfaces if row.line_rate_bps is None]
    if no_rate:
        found.append(
            f"the line rate of {_names(no_rate)} is not known (virtual interfaces report none): mean and peak are in "
            "bit/s, foreign traffic is a share of the bytes"
        )
    reasons = Counter(row.why_unknown for row in network.interfaces if row.why_unknown)
    for reason, _ in reasons.most_common():
        names = [interface_name(row) for row in network.interfaces if row.why_unknown == reason]
        which = "" if len(names) == len(network.interfaces) else f" of {_names(names)}"
        found.append(f"foreign traffic{which} is not known: {reason}")
    return found


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(printable(name) for name in names[:_MOST_NAMES]) + more


def _limited(sentences: list[str], noun: str) -> list[str]:
    more = len(sentences) - _MOST_NAMES
    return [*sentences[:_MOST_NAMES], *([f"{more} more {noun}"] if more > 0 else [])]
