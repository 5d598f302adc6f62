"""Keep the traces of one run: a file of another run, or of another start, must not be taken for one of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcpace.core.text import rank_list
from hpcpace.trace.tables import RankTrace

Start = tuple[str, int]
"""A run and the number of its attempt."""


def of_one_run(
    traces: Sequence[RankTrace], *, run_id: str = "", attempt: int = -1, packs: Mapping[int, Path] | None = None
) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that belong together, ascending by rank, and a sentence about each of the others.

    Run and attempt are the same on all ranks of a start; the majority of traces decides.

    Args:
        traces: of different ranks.
        run_id: decides if two runs have equally many traces.
        attempt: decides then, too.
        packs: the file that the trace of a rank was read from, if it is not the rank's own.

    Returns:
        No traces at all if nothing decides between two runs.
    """
    counts = Counter(start_of(trace) for trace in traces)
    if not counts:
        return [], []
    liking = {start: (count, start[1] == attempt, start[0] == run_id) for start, count in counts.items()}
    first, *others = sorted(counts, key=lambda start: liking[start], reverse=True)
    if others and liking[others[0]] == liking[first]:
        names = " and ".join(map(_name, (first, others[0])))
        return [], [f"as many traces are of {names}: move those of one of them away"]
    kept = [trace for trace in traces if start_of(trace) == first]
    left = [trace for trace in traces if start_of(trace) != first]
    said = [
        f"{place} is of {_name(start)}, not of {_name(first)}; it is left out" for place, start in _places(left, packs)
    ]
    return sorted(kept, key=lambda trace: trace.header.rank), said


def _places(traces: Sequence[RankTrace], packs: Mapping[int, Path] | None) -> list[tuple[str, Start]]:
    """Return each file that traces are in, with the ranks of a pack, and what they are of."""
    places: list[tuple[str, Start]] = []
    packed: dict[tuple[Path, Start], list[int]] = {}
    for trace in traces:
        path = (packs or {}).get(trace.header.rank)
        if path is None:
            places.append((str(trace.path), start_of(trace)))
        else:
            packed.setdefault((path, start_of(trace)), []).append(trace.header.rank)
    return [*((f"{path} with {rank_list(sorted(ranks))}", start) for (path, start), ranks in packed.items()), *places]


def start_of(trace: RankTrace) -> Start:
    """Return the run and the attempt that a trace is of."""
    return trace.header.run_id, trace.header.attempt


def _name(start: Start) -> str:
    run_id, attempt = start
    return f"run {run_id!r}, attempt {attempt}"
