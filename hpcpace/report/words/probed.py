"""The transfers of a run next to a probe of its hosts, in words for the terminal and the page alike."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpcpace.core.text import NS_PER_S, format_duration, percent, plural
from hpcpace.diagnosis.network_summary import ProbedFigures, ProbedRow
from hpcpace.report.words.probe import size_words

HEAD = ("operation", "hosts", "ranks", "size", "transfer", "probed", "of probed rate")


def probed_lead(probed: ProbedFigures) -> str:
    """Return what the probe says in one sentence; why it is not used otherwise."""
    if probed.refused:
        return f"{probed.source} is left out: {probed.refused}"
    if probed.achieved is None:
        return f"{probed.source} has no operation between the hosts of this run"
    return f"transfers achieve {percent(probed.achieved)} of the probed rate"


def probed_remarks(probed: ProbedFigures) -> Iterator[str]:
    """Yield where the probe is from, and what it does not say."""
    if probed.refused:
        return
    taken = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(probed.probed_unix_ns / NS_PER_S))
    yield f"{probed.source}, taken {taken}; probed without computation beside it"
    if any(row.is_beyond for row in probed.rows):
        yield "sizes beyond the largest probed one follow the last piece of the law"
    if probed.num_unprobed:
        yield f"{plural(probed.num_unprobed, 'kind')} of operations between hosts were not probed"


def probed_cells(row: ProbedRow) -> tuple[str, ...]:
    """Return the cells of a row, below `HEAD`."""
    return (
        row.op,
        str(row.num_nodes),
        str(row.num_ranks),
        size_words(row.size_bytes),
        format_duration(row.transfer_ns),
        format_duration(row.probed_ns),
        percent(row.achieved),
    )
