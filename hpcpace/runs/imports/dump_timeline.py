"""The last second of a job, from its Flight Recorder dumps: as a file for Perfetto, and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.core.text import NS_PER_US
from hpcpace.runs.imports.dump_view import groups_of, last_ns
from hpcpace.runs.imports.dumps import Dumps
from hpcpace.runs.imports.flight_recorder import Entry


@dataclass(frozen=True, kw_only=True)
class LastOfRank:
    """The end of a rank's record.

    Attributes:
        num_finished, num_open: its operations of the last time, and those that never finished.
        stands_in: the oldest one that did not finish, as `op number of group`; empty if all have.
        since_ns: from when that was called to the end of all records.
    """

    rank: int
    num_finished: int
    num_open: int
    stands_in: str
    since_ns: int | None


def last_of_ranks(dumps: Dumps, span_ns: int) -> list[LastOfRank]:
    """Return the end of each rank's record; operations that ended more than `span_ns` before the last are left out."""
    groups, end_ns = groups_of(dumps), last_ns(dumps)
    rows = []
    for rank, dump in sorted(dumps.by_rank.items()):
        kept = [entry for entry in dump.entries if _is_late(entry, end_ns - span_ns)]
        opened = [entry for entry in kept if entry.is_open]
        first = opened[0] if opened else None
        place = groups.index[rank][first.group] if first else 0
        rows.append(
            LastOfRank(
                rank=rank,
                num_finished=len(kept) - len(opened),
                num_open=len(opened),
                stands_in=f"{_called(first, groups.ordered[place])} of {groups.views[place].name}" if first else "",
                since_ns=end_ns - first.created_ns if first else None,
            )
        )
    return rows


def chrome_trace(dumps: Dumps, span_ns: int) -> dict[str, Any]:
    """Return the end of a job in Chrome's trace format, which Perfetto opens: a process a rank, a track a group.

    What did not finish lasts to the end of the records, and is called `(open)`. Where the dump does not say when an
    operation ended, as with gloo, only its call is shown.
    """
    groups, end_ns = groups_of(dumps), last_ns(dumps)
    begin_ns = end_ns - span_ns
    events: list[dict[str, Any]] = []
    for rank, dump in sorted(dumps.by_rank.items()):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        kept = [entry for entry in dump.entries if _is_late(entry, begin_ns)]
        places = groups.index[rank]
        for place in sorted({places[entry.group] for entry in kept}):
            events.append(_track(rank, place, groups.views[place].name))
        for entry in kept:
            name = _called(entry, groups.ordered[places[entry.group]])
            events.append(_event(rank, places[entry.group], name, entry, begin_ns, end_ns))
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"begin_unix_ns": str(begin_ns)}}


def _track(rank: int, group: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": group + 1, "args": {"name": name}}


def _event(rank: int, group: int, name: str, entry: Entry, begin_ns: int, end_ns: int) -> dict[str, Any]:
    start_ns = max(entry.started_ns or entry.created_ns, begin_ns)
    until_ns = end_ns if entry.is_open else entry.completed_ns
    event = {
        "name": f"{name} (open)" if entry.is_open else name,
        "cat": entry.backend or "unknown",
        "pid": rank,
        "tid": group + 1,
        "ts": (start_ns - begin_ns) / NS_PER_US,
        "args": {"bytes": entry.size_bytes, "called by": entry.where, "finished": not entry.is_open},
    }
    if until_ns is None:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": max(until_ns - start_ns, 0) / NS_PER_US}


def _called(entry: Entry, ordered: Sequence[int]) -> str:
    """Return an operation with its number, or a message with the rank at its other end."""
    if not entry.is_message:
        return f"{entry.op} {entry.seq}"
    place, word = (entry.destination, "to") if entry.op == "send" else (entry.source, "from")
    return f"{entry.op} {word} rank {ordered[place]}" if place < len(ordered) else entry.op


def _is_late(entry: Entry, begin_ns: int) -> bool:
    return entry.is_open or max(entry.created_ns, entry.completed_ns or 0) >= begin_ns
