"""Whether `hpcpace compare` is right about pairs of runs whose truth is known, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.metrics.resampling import share_of
from hpcpace.runs.compare import Outcome, compare
from hpcpace.runs.load import load_runs
from hpcpace.runs.measured import MeasuredRun


@dataclass(frozen=True, kw_only=True)
class JudgedPair:
    """One pair.

    Attributes:
        share: by how much B is slower, as found.
        is_called: whether it was called slower or faster.
        is_slower: whether it was called slower.
        named: the hosts or ranks that were named.
        is_placed: whether the slower host, or the slower rank, was named and no other; False of A/A pairs.
    """

    share: float
    is_called: bool
    is_slower: bool
    named: tuple[str, ...]
    is_placed: bool


def judge_pair(before: Sequence[Path], after: Sequence[Path], slower: str = "") -> JudgedPair:
    """Compare two groups of runs with the defaults of the command.

    Args:
        before, after: the runs, one or more a side.
        slower: host or rank that is slower in the second group; empty of an A/A pair.

    Raises:
        ValueError: a run cannot be loaded.
    """
    runs = load_runs([*before, *after])
    measured = [run.measured for run in runs if run.measured is not None]
    if len(measured) < len(runs):
        raise ValueError("; ".join(run.problem for run in runs if run.measured is None))
    return judge_groups(measured[: len(before)], measured[len(before) :], slower)


def judge_groups(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], slower: str = "") -> JudgedPair:
    """Compare two groups of runs that were loaded; arguments as of `judge_pair`."""
    found = compare(before, after)
    named = tuple(row.name for row in found.places.named) if found.places is not None else ()
    hosts = {name.rpartition(" on ")[2] for name in named}
    return JudgedPair(
        share=found.share,
        is_called=found.outcome is not Outcome.SAME,
        is_slower=found.outcome is Outcome.SLOWER,
        named=named,
        is_placed=bool(slower) and {slower} in (hosts, set(named)),
    )


def score_lines(
    same: Sequence[JudgedPair], slow: Sequence[JudgedPair], *, what: str = "a 5 % slower host", place: str = "host"
) -> list[str]:
    """Return the result as lines; `what` the second runs of `slow` have, and at which kind of place, if at one."""
    called, named = sum(pair.is_called for pair in same), sum(bool(pair.named) for pair in same)
    found, placed = sum(pair.is_slower for pair in slow), sum(pair.is_placed for pair in slow)
    rows = (
        ("A/A pairs called different", called, len(same)),
        ("A/A pairs with a place named", named, len(same)),
        (f"pairs with {what} found slower", found, len(slow)),
        *([(f"the {place} named, and no other", placed, len(slow))] if place else []),
    )
    return [
        f"{row}: {count} of {total}, {share_of(count, total).as_percent(is_change=False)}"
        for row, count, total in rows
        if total
    ]
