"""Judges what a drill leaves with simple, separate code: are traces whole, and does the report count what is lost?

Nothing here calls the metrics behind the report. Each check returns sentences on what does not hold, none where all is
well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, format_duration
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ExitKind, Op
from hpcpace.trace.tables import RankTrace, Table

FLUSH_INTERVAL_S = 1.0
FLUSH_MARGIN_S = 2.0
"""What a flush may come late where several processes share a core."""
REPORT_TITLE = "Missing or cut off"
_COLLECTIVES = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BARRIER)
_MESSAGES = (Op.SEND, Op.RECV)

Key = tuple[Any, ...]
"""The identity of an operation: members and name of its group, both ends for a message, and its number."""


def read_all(attempt: Attempt, num_ranks: int) -> list[RankTrace]:
    """Return every rank's trace, by rank.

    Raises:
        TraceError: one is missing or cannot be read.
    """
    return [read_trace(attempt.trace_file(rank)) for rank in range(num_ranks)]


_TORN = "torn or damaged record; left out"


def check_readable(
    traces: Sequence[RankTrace], ends_ns: Mapping[int, int], offsets_ns: Mapping[str, int], *, begin_ns: int
) -> Iterator[str]:
    """Check that each trace is sound and reaches up to a flush interval before its rank ended.

    A trace that was closed ends with its recording, as after an error in a collective, and the process may live on: it
    must reach the fault.

    Args:
        traces: of all ranks.
        begin_ns: when the fault began, on the machine's clock.
        ends_ns: when each rank's process ended, on the machine's clock.
        offsets_ns: how far each host's clock is ahead of the machine's.
    """
    limit_ns = round((FLUSH_INTERVAL_S + FLUSH_MARGIN_S) * NS_PER_S)
    for trace in traces:
        rank, account = trace.header.rank, trace.tables["account"]
        # A rank that is killed while it writes leaves half of a record, which belongs to no flush.
        torn = () if trace.closed_cleanly else (_TORN,)
        yield from (f"rank {rank}: {problem}" for problem in trace.problems if not problem.endswith(torn))
        if rank not in ends_ns or not len(account):
            yield f"rank {rank}: no end of its process, or no flush in its trace"
            continue
        due_ns = min(begin_ns, ends_ns[rank]) if trace.closed_cleanly else ends_ns[rank]
        gap_ns = due_ns + offsets_ns[trace.header.host] - int(account["time_ns"].max())
        if gap_ns > limit_ns:
            yield f"rank {rank}: its trace ends {format_duration(gap_ns)} before it should"
        num_rows = sum(len(table) for name, table in trace.tables.items() if name != "account")
        # At the end of a recording operations that never completed become rows, some of which were no events.
        num_never = int((trace.tables["collectives"]["exit_kind"] == ExitKind.NEVER).sum())
        num_flushed = int(account["events"].sum())
        # A flush is counted once its rows are written: a rank that is killed in between has more rows than that.
        is_whole = num_rows - num_never <= num_flushed or not trace.closed_cleanly
        if not is_whole or num_flushed > num_rows:
            yield f"rank {rank}: {num_rows} rows can be read, {num_never} of them open, and {num_flushed} were flushed"
        steps = trace.tables["steps"]["step"]
        if not len(steps) or not np.array_equal(steps, np.arange(len(steps))):
            yield f"rank {rank}: its {len(steps)} steps are not all those from 0 on"


def check_whole(traces: Sequence[RankTrace], num_steps: int) -> Iterator[str]:
    """Check that nothing at all is missing: all steps, and as many operations as the rank that does the same work."""
    for trace in traces:
        rank = trace.header.rank
        if not trace.closed_cleanly:
            yield f"rank {rank}: its trace was not closed"
        num_dropped = int(trace.tables["account"]["dropped"].sum())
        if len(trace.tables["steps"]) + num_dropped != num_steps:
            yield f"rank {rank}: {len(trace.tables['steps'])} steps and {num_dropped} dropped rows of {num_steps} steps"
        twin = next(other for other in traces if other.header.pp == trace.header.pp)
        counts = [len(one.tables["collectives"]) for one in (trace, twin)]
        if counts[0] != counts[1]:
            yield f"rank {rank}: {counts[0]} operations, its twin rank {twin.header.rank}: {counts[1]}"


def lost_operations(traces: Sequence[RankTrace]) -> dict[int, int]:
    """Return by rank how many operations others completed with it that its own trace does not have.

    Counted are collectives that nobody leaves before all are in, and messages that were received. A rank that closed
    its trace ended its recording with its last operation; only gaps before that count.
    """
    found = {}
    for trace in traces:
        rank = trace.header.rank
        own = {key for table in (trace.tables["collectives"], trace.open_collectives) for key, _ in _keys(trace, table)}
        shown = {key for other in traces if other is not trace for key in _shown(other, rank)}
        reached: dict[Key, int] = {}
        for key in shown:
            reached[key[:-1]] = max(reached.get(key[:-1], -1), key[-1])
        # A rank that entered one collective has entered those before it, also one that failed on the others.
        failed = {key for other in traces if other is not trace for key in _failed(other, rank)}
        shown |= {key for key in failed if key[-1] <= reached.get(key[:-1], -1)}
        last: dict[Key, int] = {}
        for key in own:
            last[key[:-1]] = max(last.get(key[:-1], -1), key[-1])
        lost = {k for k in shown - own if not trace.closed_cleanly or k[-1] < last.get(k[:-1], -1)}
        if lost:
            found[rank] = len(lost)
    return found


def _shown(trace: RankTrace, rank: int) -> Iterator[Key]:
    """Yield the operations of a rank that another one's completions prove."""
    table = trace.tables["collectives"]
    # One that failed proves nothing: its others need not have entered.
    is_proof = ~np.isin(table["exit_kind"], (ExitKind.NEVER, ExitKind.FAILED))
    for key, op in _keys(trace, table.select(is_proof)):
        members, _, source, target, _ = key
        if (op in _COLLECTIVES and rank in members) or (op == Op.RECV and source == rank != target):
            yield key


def _failed(trace: RankTrace, rank: int) -> Iterator[Key]:
    """Yield the collectives of a rank that failed on another one."""
    table = trace.tables["collectives"]
    for key, op in _keys(trace, table.select(table["exit_kind"] == ExitKind.FAILED)):
        if op in _COLLECTIVES and rank in key[0]:
            yield key


def _keys(trace: RankTrace, table: Table) -> Iterator[tuple[Key, Op]]:
    groups: dict[int, tuple[list[int], bytes]] = {}
    columns = (trace.tables["groups"][name].tolist() for name in ("id", "rank", "name"))
    for number, rank, name in zip(*columns, strict=True):
        groups.setdefault(number, ([], name))[0].append(rank)
    me = trace.header.rank
    for number, seq, op, peer in zip(*(table[name].tolist() for name in ("group", "seq", "op", "peer")), strict=True):
        members, name = groups[number]
        ends = (-1, -1) if op not in _MESSAGES else (me, peer) if op == Op.SEND else (peer, me)
        yield (tuple(sorted(set(members))), name, *ends, seq), Op(op)


def check_counted(traces: Sequence[RankTrace], summary: Mapping[str, Any]) -> Iterator[str]:
    """Check that the report counts exactly the operations that are lost."""
    lost = lost_operations(traces)
    ranks = summary["cut_off"]["ranks"]
    counted = {rank["rank"]: rank["num_lost_operations"] for rank in ranks if rank["num_lost_operations"]}
    if counted != lost:
        yield f"lost operations by rank are {lost}, and the report counts {counted}"
    dropped = sum(int(trace.tables["account"]["dropped"].sum()) for trace in traces)
    if summary["tracing"]["num_dropped"] != dropped:
        yield f"{dropped} rows were dropped, and the report counts {summary['tracing']['num_dropped']}"


def num_counted(summary: Mapping[str, Any]) -> int:
    """Return the lost records that a report counts: lost operations of all ranks, and rows that were dropped."""
    lost = sum(rank["num_lost_operations"] for rank in summary["cut_off"]["ranks"])
    return int(lost + summary["tracing"]["num_dropped"])


def missing_lines(log: str) -> list[str]:
    """Return what the report in a job's log says to be missing, each sentence on one line."""
    _, found, rest = log.rpartition(REPORT_TITLE)
    if not found:
        return []
    return [" ".join(part.split()) for part in re.split(r"^- ", rest.partition("\n\n")[0], flags=re.MULTILINE)[1:]]


def check_named(log: str, traces: Sequence[RankTrace], victims: Sequence[int]) -> Iterator[str]:
    """Check that the report in the log names every rank whose trace was not closed, with its host.

    One of the victims is cut off at least: of several, one may see another end first, and close its trace.
    """
    lines = missing_lines(log)
    if all(traces[rank].closed_cleanly for rank in victims):
        yield f"ranks {list(victims)} were to be cut off, and their traces are closed"
    for trace in traces:
        name = f"rank {trace.header.rank} on {trace.header.host}"
        named = any(line.startswith("not closed") and re.search(rf"\b{name}\b", line) for line in lines)
        if not trace.closed_cleanly and not named:
            yield f"the report does not name {name}: {lines}"


def longest_step_ns(traces: Sequence[RankTrace], begin_ns: int, offsets_ns: Mapping[str, int]) -> int:
    """Return the longest time between two ends of steps of any rank, from a moment of the machine's clock on."""
    longest = 0
    for trace in traces:
        ends_ns = np.asarray(trace.tables["steps"]["end_ns"], np.int64) - offsets_ns[trace.header.host]
        longest = max(longest, int(np.diff(ends_ns)[ends_ns[1:] > begin_ns].max(initial=0)))
    return longest
