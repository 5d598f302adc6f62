"""Keep the traces of one run: a file of another run, or of another start, must not be taken for one of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcpace.trace.tables import RankTrace

_MOST_NAMED = 16


def of_one_run(
    traces: Sequence[RankTrace], *, run_id: str = "", attempt: int = -1
) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that belong together, ascending by rank, and a sentence about each of the others.

    Run and attempt are the same on all ranks of a start; the majority of traces decides.

    Args:
        traces: of different ranks.
        run_id: decides if two runs have equally many traces.
        attempt: decides then, too.

    Returns:
        No traces at all if nothing decides between two runs.
    """
    counts = Counter(_start_of(trace) for trace in traces)
    if not counts:
        return [], []
    liking = {start: (count, start[1] == attempt, start[0] == run_id) for start, count in counts.items()}
    first, *others = sorted(counts, key=lambda start: liking[start], reverse=True)
    if others and liking[others[0]] == liking[first]:
        names = " and ".join(map(_name, (first, others[0])))
        return [], [f"as many traces are of {names}: move those of one of them away"]
    kept = [trace for trace in traces if _start_of(trace) == first]
    left = [trace for trace in traces if _start_of(trace) != first]
    said = [f"{trace.path} is of {_name(_start_of(trace))}, not of {_name(first)}; it is left out" for trace in left]
    if len(said) > _MOST_NAMED:
        said[_MOST_NAMED:] = [f"{len(said) - _MOST_NAMED} more traces are not of this run and are left out"]
    return sorted(kept, key=lambda trace: trace.header.rank), said


def _start_of(trace: RankTrace) -> tuple[str, int]:
    return trace.header.run_id, trace.header.attempt


def _name(start: tuple[str, int]) -> str:
    run_id, attempt = start
    return f"run {run_id!r}, attempt {attempt}"
