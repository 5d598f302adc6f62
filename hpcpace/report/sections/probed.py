"""The transfers of a run next to a probe of its hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpcpace.core.text import NS_PER_S, format_duration, percent, plural
from hpcpace.diagnosis.network_summary import ProbedFigures
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.document import Notes, Section, Table

_MAX_ROWS = 8


def probed_section(summary: Summary) -> Section:
    """Return transfers next to the probe; empty without one."""
    probed = summary.probe
    if probed is None:
        return Section("Next to the probe", ())
    rows = [
        (
            row.op,
            str(row.num_nodes),
            str(row.num_ranks),
            size_words(row.size_bytes),
            format_duration(row.transfer_ns),
            format_duration(row.probed_ns),
            percent(row.achieved),
        )
        for row in probed.rows
    ]
    head = ("operation", "hosts", "ranks", "size", "transfer", "probed", "of probed rate")
    return Section(
        "Next to the probe",
        (
            Notes([_lead(probed)]),
            Table(head, rows, limits=(_MAX_ROWS, 0), which="most costly"),
            Notes(list(_remarks(probed))),
        ),
    )


def _lead(probed: ProbedFigures) -> str:
    """Return what the probe says in one sentence; why it is not used otherwise."""
    if probed.refused:
        return f"{probed.source} is left out: {probed.refused}"
    if probed.achieved is None:
        return f"{probed.source} has no operation between the hosts of this run"
    return f"transfers achieve {percent(probed.achieved)} of the probed rate"


def _remarks(probed: ProbedFigures) -> Iterator[str]:
    """Yield where the probe is from, and what it does not say."""
    if probed.refused:
        return
    taken = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(probed.probed_unix_ns / NS_PER_S))
    yield f"{probed.source}, taken {taken}; probed without computation beside it"
    if any(row.is_beyond for row in probed.rows):
        yield "sizes beyond the largest probed one follow the last piece of the law"
    if probed.num_unprobed:
        yield f"{plural(probed.num_unprobed, 'kind')} of operations between hosts were not probed"


def size_words(size_bytes: float) -> str:
    """Return a size of a message in powers of 1024, as they are chosen: `64 B`, `16 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1023.5:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"
