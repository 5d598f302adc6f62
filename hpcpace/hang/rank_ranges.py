"""Lists of ranks as short texts, in their order: `0-7`, `0-12:4,1`; a group of 16,384 ranks has a few bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcpace.trace.header import MOST_RANKS

_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, `first-last` or `first-last:distance`, in the order given."""
    parts, index = [], 0
    while index < len(ranks):
        distance = ranks[index + 1] - ranks[index] if index + 1 < len(ranks) else 0
        end = index + 1
        while distance > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == distance:
            end += 1
        if end - index < 3:  # two alone may each begin another range
            end = index + 1
        parts.append(_range(ranks[index], ranks[end - 1], distance))
        index = end
    return ",".join(parts)


def _range(first: int, last: int, distance: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if distance == 1 else f"{first}-{last}:{distance}"


def ranks_of(text: str, *, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Return the ranks of a text that `rank_ranges` has made.

    Raises:
        ValueError: it is no such text, has more than `most` ranks, or one that no job has.
    """
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part[:20]!r} is no range of ranks")
        first = int(found[1])
        added = range(first, int(found[2] or first) + 1, int(found[3] or 1) or 1)
        if added.stop > MOST_RANKS or len(ranks) + len(added) > most:
            raise ValueError(f"{part!r} goes beyond {MOST_RANKS} ranks of a job or {most} of a list")
        ranks.extend(added)
    return tuple(ranks)
