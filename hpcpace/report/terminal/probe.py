"""A probe as text: what each operation reached and of what it could, its law, and tables as nccl-tests print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.core.text import format_duration, plural, printable
from hpcpace.probe.changes import Change
from hpcpace.probe.record import ProbeRecord
from hpcpace.report.terminal.probe_hosts import copies_lines, noise_lines
from hpcpace.report.terminal.probe_pairs import pairs_lines
from hpcpace.report.words.probe import (
    change_words,
    changes_shown,
    counts_words,
    grouped,
    network_words,
    rate_words,
    share_words,
    size_words,
    switch_words,
    title_words,
)

_MOST_SKEWS = 3
_MOST_CHANGES = 16


def probe_lines(record: ProbeRecord) -> list[str]:
    """Return a probe in lines of at most 80 characters, but for names and problems."""
    lines = [f"probe of {title_words(record)}"]
    lines += [f"  {hosts}: {network}" for hosts, network in network_words(record)]
    if record.sweep:
        lines += ["", *_summary(record), "", *_tables(record), *_skews(record)]
    if record.pairs is not None:
        lines += ["", *pairs_lines(record.pairs)]
    if record.noise is not None:
        lines += ["", *noise_lines(record.noise)]
    if record.copies is not None:
        lines += ["", *copies_lines(record.copies)]
    lines += [f"! {printable(problem)}" for problem in record.problems]
    return lines


def change_lines(found: Sequence[Change], remarks: Sequence[str], outcome: str) -> list[str]:
    """Return what changed since another probe, the outcome last.

    Args:
        found: all comparisons.
        remarks: what could not be compared, a sentence each.
        outcome: of all.
    """
    head = f"{'':14} hosts  {'':7}  since the other probe"
    rows = [_change_line(change) for change in changes_shown(found, _MOST_CHANGES)]
    lines = [*([head, *rows, ""] if rows else []), *counts_words(found), *map(printable, remarks)]
    return [*lines, printable(outcome)]


def _change_line(change: Change) -> str:
    name, hosts, kind, words = change_words(change)
    return f"{name:14} {hosts:>5}  {kind:7}  {words}" if hosts else f"{name:20}  {kind:7}  {words}"


def _summary(record: ProbeRecord) -> Iterator[str]:
    """Yield one line for each operation and number of hosts."""
    yield f"{'':14} hosts  latency   largest       busbw  of limit  switches at"
    laws = {(law.op, law.num_nodes): law for law in record.laws}
    for rows in grouped(record.sweep):
        largest = rows[-1]
        yield (
            f"{printable(largest.op):14} {largest.num_nodes:5}  {format_duration(rows[0].p50_ns):>7} "
            f"{size_words(largest.size_bytes):>9} {rate_words(largest.busbw):>11} {share_words(largest):>9}  "
            f"{switch_words(laws.get((largest.op, largest.num_nodes)))}"
        ).rstrip()


def _tables(record: ProbeRecord) -> Iterator[str]:
    """Yield a table for each operation over all hosts."""
    most = max(row.num_nodes for row in record.sweep)
    for rows in grouped([row for row in record.sweep if row.num_nodes == most]):
        where = f"{plural(rows[0].num_nodes, 'host')}, {plural(rows[0].num_ranks, 'rank')}"
        yield f"{printable(rows[0].op)}, {where}"
        yield "     size      time     algbw      busbw  of limit       p95       p99   times"
        for row in rows:
            yield (
                f"{size_words(row.size_bytes):>9} {format_duration(row.p50_ns):>9} {rate_words(row.algbw):>9} "
                f"{rate_words(row.busbw):>10} {share_words(row):>9} {format_duration(row.p95_ns):>9} "
                f"{format_duration(row.p99_ns):>9} {row.num_repetitions:7}"
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
