"""Flight Recorder dumps as the state of a job: its groups and calls, and its last second.

Collectives have the same number on all members of a group. Messages have not: torch counts all messages of a process
in a group together. Between two ranks they are counted from the first one where both records go back to it; else from
the first collective that both ranks called, and else from the oldest message that has not finished.

PyTorch keeps the last operations alone. One that it has overwritten counts as finished only if a later one of its group
has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_US, plural
from hpcpace.hang.views import Call, Channel, GroupView, JobView, RankView
from hpcpace.runs.imports.dumps import Dumps
from hpcpace.runs.imports.flight_recorder import Dump, Entry

_SOURCE = "Flight Recorder dumps"
_MIN_FINISHED, _MAX_FINISHED = 64, 1 << 18
"""Finished operations that are compared: of each rank at least, and of all ranks of a job together."""
_MAX_MEMBERS = 1 << 22
"""Of all groups of a job together, with those that are likely: ten groups in each of 16,384 ranks have a twentieth."""
_DEFAULT = "default_pg"
_Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DumpGroups:
    """The process groups of a job.

    Attributes:
        views: each once, as `JobView` has them.
        ordered: the members of each, ascending: so torch counts the ends of messages.
        index: of each rank, the place in `views` of its groups, by name.
    """

    views: tuple[GroupView, ...]
    ordered: tuple[tuple[int, ...], ...]
    index: Mapping[int, Mapping[str, int]]


def job_view(dumps: Dumps) -> JobView:
    """Return what dumps show of a job: `now_ns` is the last time in any of them."""
    groups = groups_of(dumps)
    begins = _begins(dumps, groups)
    # Otherwise they are of unfinished operations alone (TORCH_INCLUDE_ONLY_ACTIVE), and the others have finished.
    have_finished = any(not entry.is_open for dump in dumps.by_rank.values() for entry in dump.entries)
    num_kept = max(_MIN_FINISHED, _MAX_FINISHED // max(1, len(dumps.by_rank)))
    ranks = {
        rank: (
            _rank_view(rank, dumps.by_rank[rank], groups, begins, num_kept, have_finished=have_finished)
            if rank in dumps.by_rank and dumps.by_rank[rank].is_counted
            else RankView(rank=rank, is_recorded=False)
        )
        for rank in range(dumps.world_size)
    }
    uncounted = (rank for rank, dump in dumps.by_rank.items() if not dump.is_counted)
    unplaced = tuple(rank for rank in uncounted if any(entry.is_open for entry in dumps.by_rank[rank].entries))
    return JobView(
        groups=groups.views, ranks=ranks, now_ns=last_ns(dumps), source=_SOURCE, is_dated=True, unplaced=unplaced
    )


def last_ns(dumps: Dumps) -> int:
    """Return the last time that the dumps know of, Unix nanoseconds; 0 for none."""
    entries = (entry for dump in dumps.by_rank.values() for entry in dump.entries)
    return max((max(entry.created_ns, entry.completed_ns or 0) for entry in entries), default=0)


def first_ns(dumps: Dumps) -> int:
    """Return the first time that the dumps know of, Unix nanoseconds; 0 for none."""
    return min((entry.created_ns for dump in dumps.by_rank.values() for entry in dump.entries), default=0)


def groups_of(dumps: Dumps) -> DumpGroups:
    """Return the process groups of a job, each once.

    Raises:
        TraceError: they have more members than those of any job.
    """
    described: dict[_Key, str] = {}
    of_rank: dict[int, dict[str, _Key]] = {}
    for rank, dump in sorted(dumps.by_rank.items()):
        of_rank[rank] = {}
        for group in dump.groups.values():
            if group.ranks and group.name:
                of_rank[rank][group.name] = key = (group.name, group.ranks)
                described[key] = group.description
    unsaid = _unsaid_members(dumps, of_rank)
    said = {entry.group: entry.description for dump in dumps.by_rank.values() for entry in dump.entries}
    for rank, named in unsaid.items():
        for name, ranks in named.items():
            of_rank[rank][name] = key = (name, ranks)
            described[key] = said[name]
    keys = list(dict.fromkeys(key for named_keys in of_rank.values() for key in named_keys.values()))
    place = {key: number for number, key in enumerate(keys)}
    names = _names(keys, described)
    return DumpGroups(
        views=tuple(GroupView(name=name, members=key[1]) for key, name in zip(keys, names, strict=True)),
        ordered=tuple(tuple(sorted(ranks)) for _, ranks in keys),
        index={rank: {name: place[key] for name, key in named.items()} for rank, named in of_rank.items()},
    )


def _unsaid_members(dumps: Dumps, of_rank: Mapping[int, Mapping[str, _Key]]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the likely members of groups of which no dump says who is in them.

    Whoever called something in it is a member. So may be any rank without a dump.
    """
    callers: dict[str, set[int]] = {}
    default: set[str] = set()
    for rank, dump in dumps.by_rank.items():
        for entry in dump.entries:
            if entry.group not in of_rank[rank]:
                callers.setdefault(entry.group, set()).add(rank)
                default |= {entry.group} if entry.description == _DEFAULT else set()
    found: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in dumps.by_rank}
    everyone, missing = tuple(range(dumps.world_size)), set(dumps.missing)
    num_members = 0
    for name, ranks in callers.items():
        likely = everyone if name in default else tuple(sorted(ranks | missing))
        num_members += len(likely)
        if num_members > _MAX_MEMBERS:
            raise TraceError(
                f"the dumps do not say who is in {plural(len(callers), 'group')}, and {plural(len(missing), 'rank')} "
                "without a dump may be in each; bring the dumps of all ranks"
            )
        for rank in dumps.by_rank.keys() & set(likely):
            if name not in of_rank[rank]:
                found[rank][name] = likely
    return found


def _names(keys: list[_Key], described: Mapping[_Key, str]) -> list[str]:
    """Return a name for each group that no other has: its description where that is enough."""
    plain = [described.get(key, "") for key in keys]
    plain = [key[0] if name in ("", "undefined") else name for key, name in zip(keys, plain, strict=True)]
    counts = Counter(plain)
    return [name if counts[name] == 1 else f"{name} {key[0]}" for key, name in zip(keys, plain, strict=True)]


@dataclass(kw_only=True)
class _Order:
    """What one rank called, by the place of its entry: its collectives, and its messages by channel."""

    collectives: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: dict[Channel, list[int]] = field(default_factory=dict)


def _channel(entry: Entry, groups: DumpGroups, rank: int) -> Channel | None:
    """Return the channel of an entry; None for messages of others, or beyond their group."""
    place = groups.index[rank][entry.group]
    if not entry.is_message:
        return None if entry.is_p2p else Channel(place)
    ordered = groups.ordered[place]
    if max(entry.source, entry.destination) >= len(ordered):
        return None
    channel = Channel(place, ordered[entry.source], ordered[entry.destination])
    return channel if rank in (channel.source, channel.destination) else None


_Begins = dict[tuple[int, Channel], int]


def _begins(dumps: Dumps, groups: DumpGroups) -> _Begins:
    """Return, by rank and channel, the entry from which messages are counted; nothing where that is not known.

    Between two collectives that two ranks call, one sends as many messages as the other one receives.
    """
    orders: dict[int, _Order] = {}
    for rank, dump in dumps.by_rank.items():
        if not any(entry.is_message for entry in dump.entries):
            continue
        orders[rank] = order = _Order()
        for at, entry in enumerate(dump.entries):
            if (channel := _channel(entry, groups, rank)) is None:
                continue
            if not entry.is_message:
                order.collectives.setdefault((channel.group, entry.seq), at)
                continue
            order.messages.setdefault(channel, []).append(at)
    begins: _Begins = {}
    for channel in dict.fromkeys(channel for order in orders.values() for channel in order.messages):
        ends = channel.source, channel.destination
        if not all(rank in orders for rank in ends):
            continue
        if all(dumps.by_rank[rank].is_from_start for rank in ends):
            begins |= {(rank, channel): 0 for rank in ends}
        else:
            begins |= _common_begin(channel, dumps, orders)
    return begins


def _common_begin(channel: Channel, dumps: Dumps, orders: Mapping[int, _Order]) -> _Begins:
    """Return, for both ends of a channel, the place of the first collective that both called, if the others agree."""
    ends = channel.source, channel.destination
    first, second = (orders[rank].collectives for rank in ends)
    common = [key for key in first if key in second]
    if not common:
        return {}
    marks = [np.array([orders[rank].collectives[key] for key in common]) for rank in ends]
    sent = [np.searchsorted(orders[rank].messages.get(channel, []), at) for rank, at in zip(ends, marks, strict=True)]
    is_agreed = bool((np.diff(marks[1]) > 0).all()) and np.array_equal(sent[0] - sent[0][0], sent[1] - sent[1][0])
    begins = {(rank, channel): int(at[0]) for rank, at in zip(ends, marks, strict=True)}
    is_open_before = any(
        dumps.by_rank[rank].entries[at].is_open
        for rank in ends
        for at in orders[rank].messages.get(channel, [])
        if at < begins[rank, channel]
    )
    return begins if is_agreed and not is_open_before else {}


def _rank_view(
    rank: int, dump: Dump, groups: DumpGroups, begins: _Begins, num_kept: int, *, have_finished: bool
) -> RankView:
    places = groups.index[rank]
    calls: dict[tuple[Channel, int], Call] = {}
    entered: dict[Channel, int] = {}
    counts: dict[Channel, int] = {}
    sites: dict[tuple[str, ...], tuple[str, ...]] = {}
    for at, entry in enumerate(dump.entries):
        if (channel := _channel(entry, groups, rank)) is None:
            continue
        seq, is_aligned = entry.seq, True
        if entry.is_message:
            begin = begins.get((rank, channel))
            if (not entry.is_open) if begin is None else at < begin:
                continue
            seq, is_aligned = counts.get(channel, 0), begin is not None
            counts[channel] = seq + 1
        call = Call(
            channel=channel,
            seq=seq,
            op=entry.op,
            size_bytes=entry.size_bytes,
            part_bytes=entry.part_bytes,
            dtype=entry.dtype,
            entered_ns=entry.created_ns,
            is_open=entry.is_open,
            is_aligned=is_aligned,
            where=entry.where,
            site=_site(entry.frames, sites),
        )
        if (known := calls.get((channel, seq))) is not None:
            # Two calls that torch put together as one; of what it did with both, only the first is said.
            call = replace(known, size_bytes=-1, part_bytes=-1, dtype="", is_open=known.is_open or call.is_open)
        calls[channel, seq] = call
        entered[channel] = max(entered.get(channel, 0), seq + 1)
    is_complete = _add_enqueued(dump, groups, places, entered)
    completed, has_lost = _completed(dump, places, entered, calls.values(), have_finished=have_finished)
    finished = [key for key, call in calls.items() if not call.is_open]
    for key in finished[:-num_kept]:
        del calls[key]
    return RankView(
        rank=rank,
        entered=entered,
        completed=completed,
        calls=tuple(calls.values()),
        is_complete=is_complete and not has_lost,
    )


def _completed(
    dump: Dump,
    places: Mapping[str, int],
    entered: Mapping[Channel, int],
    calls: Collection[Call],
    *,
    have_finished: bool,
) -> tuple[dict[Channel, int], bool]:
    """Return how many collectives of each group are known to have finished, and whether an open one was overwritten.

    In dumps that have finished operations, one that is missing may have been overwritten while it was open.
    """
    if dump.is_from_start:
        return {}, False
    finished = {channel: 0 for channel in entered if channel.source < 0} if have_finished else {}
    oldest = dict(entered)
    for call in calls:
        oldest[call.channel] = min(oldest[call.channel], call.seq)
        if not call.is_open and call.channel.source < 0:
            finished[call.channel] = max(finished[call.channel], call.seq + 1)
    has_lost = False
    numbers = _numbers(dump)
    with_messages = {entry.group for entry in dump.entries if entry.is_p2p}
    for name, place in places.items():
        channel, last = Channel(place), dump.completed.get(numbers.get(name, -1), -1)
        if channel in entered and name not in with_messages and last >= 0:
            finished[channel] = max(finished.get(channel, 0), last + 1)
            has_lost |= finished[channel] < oldest[channel]
    return finished, has_lost


def _site(frames: tuple[str, ...], known: dict[tuple[str, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """Return frames with the last folder of each file alone: hosts may have one program in different places."""
    if frames not in known:
        known[frames] = tuple("/".join(frame.rsplit("/", 2)[-2:]) for frame in frames)
    return known[frames]


def _add_enqueued(dump: Dump, groups: DumpGroups, places: Mapping[str, int], entered: dict[Channel, int]) -> bool:
    """Add what the status of groups says was called; return whether it is known of all groups of the rank.

    A dump of unfinished operations has no entry of a group in which all are over.
    """
    silent = {name: place for name, place in places.items() if Channel(place) not in entered}
    with_messages = {entry.group for entry in dump.entries if entry.is_p2p}
    if dump.is_from_start or any(entry.backend == "gloo" for entry in dump.entries):
        return True
    numbers = _numbers(dump)
    is_complete = True
    for name, place in silent.items():
        last = dump.enqueued.get(numbers.get(name, -1))
        if last is None or name in with_messages:
            is_complete = is_complete and name in with_messages
        elif last >= 0:
            entered[Channel(place)] = last + 1
    return is_complete


def _numbers(dump: Dump) -> dict[str, int]:
    """Return the number of each group in its process, by its name.

    Entries say it of their group. The others are known if the names are numbers, which torch gives in the same order.
    """
    known = {entry.group: entry.group_id for entry in dump.entries}
    names = [name for name in dump.groups if name.isdecimal()]
    if len(names) != len(dump.groups) or len(names) != len(dump.enqueued):
        return known
    inferred = dict(zip(sorted(names, key=int), sorted(dump.enqueued), strict=True))
    return inferred if known.items() <= inferred.items() else known


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
            said = {"name": groups.views[place].name}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": place + 1, "args": said})
        for entry in kept:
            name = _called(entry, groups.ordered[places[entry.group]])
            events.append(_event(rank, places[entry.group], name, entry, begin_ns, end_ns))
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"begin_unix_ns": str(begin_ns)}}


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
