"""How the steps of a run were found, and what speaks against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpcpace.metrics.step_pattern import Alternation
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import EventKind
from hpcpace.units import format_duration
from hpcpace.wording import listed, percent, plural, rank_list

_MOST_COUNTS = 3
_SEE = "see --step-from"
_IRREGULAR_SHARE = 0.05


def step_sources(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Return how the traces say that steps were found, the way of most ranks first; empty where they do not say it."""
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        if text := _last_source(trace)[1]:
            ranks.setdefault(text, []).append(trace.header.rank)
    ways = sorted(ranks, key=lambda text: -len(ranks[text]))
    return tuple(ways) if len(ways) < 2 else tuple(f"{text} ({rank_list(ranks[text])})" for text in ways)


def step_warnings(
    traces: Sequence[RankTrace], pattern: Alternation | None, num_short: int, num_used: int
) -> tuple[str, ...]:
    """Return what is implausible about how steps were counted, one sentence each.

    Args:
        traces: all readable traces of the attempt.
        pattern: how steps alternate.
        num_short: steps that are far shorter than the others on all ranks.
        num_used: steps used.
    """
    found = [_alternating(pattern)] if pattern is not None else []
    if num_short and pattern is None:
        found.append(
            f"{num_short} of {num_used} steps take less than a fifth of the usual time on all ranks: what is counted "
            f"as a step may be part of one; {_SEE}"
        )
    if (uneven := _uneven_counts(traces)) is not None:
        found.append(f"ranks recorded different numbers of steps ({uneven}): they may not count the same; {_SEE}")
    irregular = max((_last_source(trace)[0] / max(len(trace.tables["steps"]), 1) for trace in traces), default=0.0)
    if irregular >= _IRREGULAR_SHARE:
        found.append(f"updates out of order, {percent(irregular)} of the steps: some may be miscounted; {_SEE}")
    return tuple(found)


def _alternating(pattern: Alternation) -> str:
    lengths = f"between {format_duration(pattern.short_ns)} and {format_duration(pattern.long_ns)} on all ranks"
    if pattern.period == 2:
        return f"steps alternate {lengths}: what is counted as a step may be half of one; {_SEE}"
    which = f"{pattern.num_short} of every {pattern.period} are short"
    return f"steps alternate {lengths}, {which}: what is counted as a step may be part of one; {_SEE}"


def _uneven_counts(traces: Sequence[RankTrace]) -> str | None:
    """Return the numbers of steps of ranks whose traces are complete, in words; None if they are alike."""
    whole = [trace for trace in traces if trace.closed_cleanly and not trace.tables["account"]["dropped"].any()]
    counts = {trace.header.rank: len(np.unique(trace.tables["steps"]["step"])) for trace in whole}
    if not counts or max(counts.values()) - min(counts.values()) <= 1:
        return None
    return _counts_in_words(counts)


def _counts_in_words(counts: Mapping[int, int]) -> str:
    ranks: dict[int, list[int]] = {}
    for rank, count in counts.items():
        ranks.setdefault(count, []).append(rank)
    ways = sorted(ranks.items(), key=lambda item: -len(item[1]))
    more = [plural(len(ways) - _MOST_COUNTS, "further number")] if ways[_MOST_COUNTS:] else []
    return listed([*(f"{count} on {rank_list(of)}" for count, of in ways[:_MOST_COUNTS]), *more])


def _last_source(trace: RankTrace) -> tuple[int, str]:
    """Return the number of updates out of order and the text of the last row on how steps were found."""
    events = trace.tables.get("events")
    rows = np.flatnonzero(events["kind"] == EventKind.STEP_SOURCE) if events is not None else np.zeros(0, np.int64)
    if events is None or not len(rows):
        return 0, ""
    return int(events["code"][rows[-1]]), bytes(events["text"][rows[-1]]).decode(errors="replace").rstrip("\0")
