"""Sizes, rates and hosts of a probe in words, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.core.text import format_bytes, plural, printable
from hpcpace.probe.changes import Change
from hpcpace.probe.record import LatencyLaw, ProbeRecord, SweepRow

_MOST_HOSTS = 6


def size_words(size_bytes: float) -> str:
    """Return a size of a message in powers of 1024, as they are chosen: `64 B`, `16 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1023.5:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def rate_words(bytes_per_s: float) -> str:
    """Return a rate as nccl-tests count it, in bytes: `1.23 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def share_words(row: SweepRow) -> str:
    """Return which share of what the hosts' networks allow an operation reached; empty if that is unknown."""
    return "" if row.limit is None else f"{100 * row.busbw / row.limit:.0f} %"


def title_words(record: ProbeRecord) -> str:
    """Return who was probed, over what, and how long it took."""
    devices = printable(record.device_name) or {"cpu": "CPUs"}.get(record.device, record.device)
    return (
        f"{plural(len(record.hosts), 'host')}, {plural(record.num_ranks, 'rank')}: {printable(record.backend)} on "
        f"{devices}, {record.took_s:.0f} s"
    )


def network_words(record: ProbeRecord) -> Iterator[tuple[str, str]]:
    """Yield hosts that have the same network, and what it is: `n1, n2` and `eth0, 10 Gb/s`."""
    networks = dict.fromkeys((host.rate_words, host.interfaces) for host in record.hosts)
    for words, interfaces in networks:
        names = [host.name for host in record.hosts if (host.rate_words, host.interfaces) == (words, interfaces)]
        shown = ", ".join(map(printable, names[:_MOST_HOSTS])) + (" ..." if len(names) > _MOST_HOSTS else "")
        yield shown, ", ".join(filter(None, (printable(",".join(interfaces)), printable(words))))


def allowed_words(rows: Sequence[SweepRow], record: ProbeRecord) -> str:
    """Return what the largest size reached of what the hosts' networks allow; empty if that is unknown.

    For example `all_reduce: busbw 41 % of what 2 x 200 Gb/s allow`.
    """
    largest = rows[-1]
    if largest.limit is None:
        return ""
    slowest = min(record.hosts, key=lambda host: host.limit or 0.0)
    return f"{largest.op}: busbw {share_words(largest)} of what {printable(slowest.rate_words)} allow"


def switch_words(law: LatencyLaw | None) -> str:
    """Return the sizes at which a law switches; empty without any."""
    return "" if law is None else ", ".join(size_words(piece.from_bytes) for piece in law.pieces[1:])


def grouped(rows: Sequence[SweepRow]) -> list[list[SweepRow]]:
    """Return rows by operation and number of hosts, in their order."""
    found: dict[tuple[str, int], list[SweepRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.num_nodes), []).append(row)
    return list(found.values())


def change_words(change: Change) -> tuple[str, str, str, str]:
    """Return an operation or another thing, its number of hosts, what changed, and by how much with the interval."""
    state = (
        "slower"
        if change.is_slower
        else "faster"
        if change.is_faster
        else "unchanged"
        if change.is_decided
        else "cannot tell"
    )
    percent = 100 * (change.ratio - 1)
    interval = f"{100 * (change.low - 1):+.0f} to {100 * (change.high - 1):+.0f} %"
    hosts = str(change.num_nodes) if change.num_nodes else ""
    return change.name, hosts, change.kind, f"{state}: time {percent:+.1f} % ({interval})"


def changes_shown(changes: Sequence[Change], most: int) -> list[Change]:
    """Return the comparisons of operations, and of all others those that changed or cannot tell, the worst first."""
    sweep = [one for one in changes if one.part == "sweep"]
    others = [one for one in changes if one.part != "sweep" and (one.is_slower or one.is_faster or not one.is_decided)]
    others.sort(key=lambda one: (not one.is_slower, not one.is_faster, -one.ratio))
    return [*sweep, *others[:most]]


def counts_words(changes: Sequence[Change]) -> list[str]:
    """Return for each part besides the sweep how many comparisons there were, and what they say."""
    lines = []
    for part in dict.fromkeys(one.part for one in changes if one.part != "sweep"):
        own = [one for one in changes if one.part == part]
        numbers = {
            "slower": sum(one.is_slower for one in own),
            "faster": sum(one.is_faster for one in own),
            "unclear": sum(not one.is_decided for one in own),
        }
        said = [f"{number} {word}" for word, number in numbers.items() if number] or ["nothing changed"]
        lines.append(f"{part}: {plural(len(own), 'comparison')}, {', '.join(said)}")
    return lines
