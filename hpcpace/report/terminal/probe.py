"""A probe as text: what each operation reached and of what it could, its law, and tables as nccl-tests print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.probe.record import LatencyLaw, ProbeRecord, SweepRow
from hpcpace.quoting import printable
from hpcpace.report.terminal.probe_pairs import pairs_lines
from hpcpace.units import format_bytes, format_duration
from hpcpace.wording import plural

_MOST_HOSTS = 6
_MOST_SKEWS = 3


def probe_lines(record: ProbeRecord) -> list[str]:
    """Return a probe in lines of at most 80 characters."""
    lines = [*_heading(record), ""]
    if record.sweep:
        lines += [*_summary(record), "", *_tables(record)]
        lines += _skews(record)
    if record.pairs is not None:
        lines += ["", *pairs_lines(record.pairs)]
    lines += [f"! {printable(problem)}" for problem in record.problems]
    return lines


def _heading(record: ProbeRecord) -> Iterator[str]:
    devices = printable(record.device_name) or {"cpu": "CPUs"}.get(record.device, record.device)
    yield (
        f"probe of {plural(len(record.hosts), 'host')}, {plural(record.num_ranks, 'rank')}: {record.backend} on "
        f"{devices}, {record.took_s:.0f} s"
    )
    rates = dict.fromkeys((host.rate_words, ",".join(host.interfaces)) for host in record.hosts)
    for words, interfaces in rates:
        names = [
            host.name for host in record.hosts if (host.rate_words, ",".join(host.interfaces)) == (words, interfaces)
        ]
        shown = ", ".join(map(printable, names[:_MOST_HOSTS])) + (" ..." if len(names) > _MOST_HOSTS else "")
        yield f"  {shown}: {printable(interfaces) or 'no interface'}, {printable(words)}"


def _summary(record: ProbeRecord) -> Iterator[str]:
    """Yield one line for each operation and number of hosts."""
    yield f"{'':14} hosts  latency   largest       busbw  of limit  switches at"
    laws = {(law.op, law.num_nodes): law for law in record.laws}
    for rows in _grouped(record.sweep):
        largest = rows[-1]
        law = laws.get((largest.op, largest.num_nodes))
        yield (
            f"{largest.op:14} {largest.num_nodes:5}  {format_duration(rows[0].p50_ns):>7} "
            f"{size_words(largest.size_bytes):>9} {rate_words(largest.busbw):>11} {share_words(largest):>9}  "
            f"{_switches(law)}"
        ).rstrip()


def _switches(law: LatencyLaw | None) -> str:
    return "" if law is None else ", ".join(size_words(piece.from_bytes) for piece in law.pieces[1:])


def _tables(record: ProbeRecord) -> Iterator[str]:
    """Yield a table for each operation over all hosts."""
    most = max(row.num_nodes for row in record.sweep)
    for rows in _grouped([row for row in record.sweep if row.num_nodes == most]):
        where = f"{plural(rows[0].num_nodes, 'host')}, {plural(rows[0].num_ranks, 'rank')}"
        yield f"{rows[0].op}, {where}"
        yield "     size      time     algbw      busbw    of limit       p95       p99  times"
        for row in rows:
            yield (
                f"{size_words(row.size_bytes):>9} {format_duration(row.p50_ns):>9} {rate_words(row.algbw):>9} "
                f"{rate_words(row.busbw):>10}  {share_words(row):>10} {format_duration(row.p95_ns):>9} "
                f"{format_duration(row.p99_ns):>9} {row.num_repetitions:6}"
            )
        yield ""


def _skews(record: ProbeRecord) -> Iterator[str]:
    """Yield the ranks that add the most by themselves between two operations."""
    latest = sorted(record.skews, key=lambda skew: -skew.mean_ns)[:_MOST_SKEWS]
    shown = [
        f"rank {skew.rank} on {printable(skew.host)}: {format_duration(skew.mean_ns)}, p99 "
        f"{format_duration(skew.p99_ns)}"
        for skew in latest
        if skew.mean_ns > 0
    ]
    if shown:
        yield "own skew, over the median of all ranks between two operations:"
        yield from (f"  {text}" for text in shown)


def _grouped(rows: Sequence[SweepRow]) -> list[list[SweepRow]]:
    keys = dict.fromkeys((row.op, row.num_nodes) for row in rows)
    return [[row for row in rows if (row.op, row.num_nodes) == key] for key in keys]


def size_words(size_bytes: float) -> str:
    """Return a size of a message in powers of 1024, as they are chosen: `64 B`, `16 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def rate_words(bytes_per_s: float) -> str:
    """Return a rate as nccl-tests count it, in bytes: `1.23 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def share_words(row: SweepRow) -> str:
    """Return which share of what the hosts' networks allow an operation reached; empty if that is unknown."""
    return "" if row.limit is None else f"{100 * row.busbw / row.limit:.0f} %"
