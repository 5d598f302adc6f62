"""The last operations of a rank's trace, and of which channel each is, read from its end without the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.hang.views import Channel
from hpcpace.metrics.operations import ProcessGroup
from hpcpace.trace.schema import ExitKind, Op
from hpcpace.trace.stream import StoredTable
from hpcpace.trace.tables import RankTrace, Table, join_tables

_COLUMNS = ("step", "group", "seq", "op", "bytes", "peer", "enter_ns", "exit_ns", "exit_kind")
_LEAST_ROWS = 2048
_UNKNOWN = -1

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LastOperations:
    """The last operations of a rank, finished and open ones.

    Attributes:
        trace: of the rank.
        group_of: index of each of its groups among those of the job, by its number in the trace.
        rows: columns of the table `collectives`.
        channels: what `channel` indexes.
        channel: of each row, int64, (num_rows,); -1 where the trace does not name its group or its peer.
        first_block: the block of the table from which on its rows are here.
        is_damaged: whether rows before them cannot be read.
    """

    trace: RankTrace
    group_of: Mapping[int, int]
    rows: Table
    channels: tuple[Channel, ...]
    channel: Int64s
    first_block: int
    is_damaged: bool = False

    @property
    def rank(self) -> int:
        """The rank."""
        return self.trace.header.rank

    @property
    def unfinished(self) -> set[Channel]:
        """The channels of operations that never finished, or that failed."""
        never = np.isin(self.rows["exit_kind"], (ExitKind.NEVER, ExitKind.FAILED)) & (self.channel != _UNKNOWN)
        return {self.channels[channel] for channel in np.unique(self.channel[never]).tolist()}


def last_operations(trace: RankTrace, group_of: Mapping[int, int]) -> LastOperations:
    """Return the last operations of a rank; `group_of` as of `LastOperations`."""
    table = trace.tables["collectives"]
    rows, first, is_damaged = _columns(table) if not isinstance(table, StoredTable) else None, 0, False
    if isinstance(table, StoredTable):
        first = table.stream.num_blocks - 1
        rows = table.stream.blocks(first, first + 1, _COLUMNS)
        while len(rows) < _LEAST_ROWS and first > 0 and not is_damaged:
            try:
                rows = join_tables([table.stream.blocks(first - 1, first, _COLUMNS), rows])
                first -= 1
            except TraceError:
                is_damaged = True
    assert rows is not None
    rows = join_tables([rows, _columns(trace.open_collectives)])
    channels, channel = _channels(rows, trace.header.rank, group_of)
    return LastOperations(
        trace=trace,
        group_of=group_of,
        rows=rows,
        channels=channels,
        channel=channel,
        first_block=first,
        is_damaged=is_damaged,
    )


def with_missing_channels(found: Sequence[LastOperations], groups: Sequence[ProcessGroup]) -> list[LastOperations]:
    """Return the last operations of all ranks, with earlier ones of channels in which others have not finished.

    Of an operation that is rarely called, such as a barrier, the last one may be long ago; without it, it would not be
    known how many a rank has entered.
    """
    unfinished = {channel for one in found for channel in one.unfinished}
    return [_reaching_back(one, _of_rank(unfinished, one.rank, groups) - set(one.channels)) for one in found]


def _of_rank(channels: Collection[Channel], rank: int, groups: Sequence[ProcessGroup]) -> set[Channel]:
    return {
        channel
        for channel in channels
        if rank in (channel.source, channel.destination)
        or (channel.source == _UNKNOWN and rank in groups[channel.group].ranks)
    }


def _reaching_back(found: LastOperations, missing: set[Channel]) -> LastOperations:
    """Return operations with the last earlier ones of some channels that have none among them."""
    table = found.trace.tables["collectives"]
    if not missing or not isinstance(table, StoredTable):
        return found
    parts, first, is_damaged = [found.rows], found.first_block, found.is_damaged
    while missing and first > 0 and not is_damaged:
        first -= 1
        try:
            rows = table.stream.blocks(first, first + 1, _COLUMNS)
        except TraceError:
            is_damaged = True
            break
        channels, channel = _channels(rows, found.rank, found.group_of)
        wanted = [index for index, one in enumerate(channels) if one in missing]
        parts.insert(0, rows.select(np.isin(channel, wanted)))
        missing = missing - set(channels)
    rows = join_tables(parts)
    channels, channel = _channels(rows, found.rank, found.group_of)
    return LastOperations(
        trace=found.trace,
        group_of=found.group_of,
        rows=rows,
        channels=channels,
        channel=channel,
        first_block=first,
        is_damaged=is_damaged,
    )


def _columns(table: Table) -> Table:
    return Table({name: table[name] for name in _COLUMNS})


def _channels(rows: Table, rank: int, group_of: Mapping[int, int]) -> tuple[tuple[Channel, ...], Int64s]:
    """Return the channels of a rank's operations, and which one each row is of, -1 for none."""
    op, peer = np.asarray(rows["op"], np.int64), np.asarray(rows["peer"], np.int64)
    is_message = (op == Op.SEND) | (op == Op.RECV)
    keys = np.stack(
        [np.asarray(rows["group"], np.int64), np.where(is_message, op, _UNKNOWN), np.where(is_message, peer, _UNKNOWN)]
    )
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    channels: dict[Channel, int] = {}
    number = np.full(kinds.shape[1], _UNKNOWN, np.int64)
    for index, (own_group, kind, other) in enumerate(kinds.T.tolist()):
        group = group_of.get(own_group)
        if group is None or (kind != _UNKNOWN and other < 0):
            continue
        ends = {Op.SEND: (rank, other), Op.RECV: (other, rank)}.get(kind, (_UNKNOWN, _UNKNOWN))
        number[index] = channels.setdefault(Channel(group, *ends), len(channels))
    return tuple(channels), number[which.reshape(-1)]
