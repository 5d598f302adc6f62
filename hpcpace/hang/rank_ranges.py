"""Lists of ranks as short texts, in their order: `0-7`, `0-12:4,1`; a group of 16,384 ranks has a few bytes."""

from __future__ import annotations

from collections.abc import Sequence


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
