"""The operations of a rank that can be believed: without rows that cannot be, and without those of damaged chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.metrics.contradictions import Contradiction, collectives_contradict
from hpcpace.trace.plausible import implausible, implausible_line
from hpcpace.trace.stream import StoredTable, TooLarge, TraceStream
from hpcpace.trace.tables import RankTrace, Table, join_tables

_CHECKED_COLUMNS = {"op", "enter_ns", "exit_ns", "exit_kind"}


@dataclass(kw_only=True)
class BlockFaults:
    """What is wrong with the rows of one block.

    Attributes:
        num_implausible: rows with impossible values.
        example: one of those.
        contradict: rows that contradict themselves, by how they do.
    """

    num_implausible: int = 0
    example: str = ""
    contradict: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class SoundStream(TraceStream):
    """A stream without implausible rows, and without those of damaged chunks.

    Attributes:
        original: the trace that it streams.
        damaged: why blocks could not be read, by their number.
        faults: what is wrong with rows that were read, by the number of their block: some are read twice.
    """

    original: RankTrace
    damaged: dict[int, str] = field(default_factory=dict)
    faults: dict[int, BlockFaults] = field(default_factory=dict)

    @property
    def nothing(self) -> Table:
        """The table without rows."""
        return self.trace.tables["collectives"].select(slice(0))

    def blocks(self, first: int, stop: int, columns: Sequence[str] | None = None, lead: Table | None = None) -> Table:
        """Return the rows of some blocks as of `TraceStream`, without those that cannot be believed."""
        try:
            rows = super().blocks(first, stop, columns, lead)
        except TraceError as error:
            if stop - first > 1 and not isinstance(error, TooLarge):
                blocks = [self.blocks(number, number + 1, columns) for number in range(first, stop)]
                return join_tables([*([] if lead is None else [lead]), *blocks])
            self.damaged[first] = f"{error}; its rows are left out"
            return self.nothing if lead is None else lead
        if columns is not None and not set(columns) >= _CHECKED_COLUMNS:
            return rows
        return self._without_faults(rows, 0 if lead is None else len(lead), first)

    def _without_faults(self, rows: Table, num_lead: int, first: int) -> Table:
        """Return rows without the implausible ones, and note what is wrong with them and with others.

        Args:
            rows: rows of blocks behind some that were checked before.
            num_lead: number of those.
            first: the block of the first one behind those.
        """
        bad, example = implausible(rows, "collectives")
        for what, is_so in collectives_contradict(rows):
            if is_so.any():
                for number in self._blocks_of(np.flatnonzero(is_so), num_lead, first):
                    self._faults_of(number).contradict[what] += 1
        if not len(bad):
            return rows
        for number in self._blocks_of(np.flatnonzero(bad), num_lead, first):
            self._faults_of(number).num_implausible += 1
            self._faults_of(number).example = self._faults_of(number).example or example
        return rows.select(~bad)

    def _blocks_of(self, rows: NDArray[np.int64], num_lead: int, first: int) -> list[int]:
        """Return the block of each row behind the first `num_lead`."""
        numbers: list[int] = self.blocks_of_rows(first, rows[rows >= num_lead] - num_lead).tolist()
        return numbers

    def _faults_of(self, number: int) -> BlockFaults:
        return self.faults.setdefault(number, BlockFaults())


def sound_stream(trace: RankTrace) -> SoundStream:
    """Return the operations of a trace, be they in memory or on disk, as a stream."""
    table = trace.tables["collectives"]
    if isinstance(table, StoredTable):
        stream = table.stream
        return SoundStream(
            original=trace,
            trace=replace(trace, tables={**trace.tables, "collectives": stream.trace.tables["collectives"]}),
            chunks=stream.chunks,
            identity=stream.identity,
            most_bytes=stream.most_bytes,
        )
    return SoundStream(original=trace, trace=trace, chunks=None)


def problems_of(stream: SoundStream) -> list[str]:
    """Return a sentence for each damaged block of a stream, and one on its implausible rows."""
    said = [stream.damaged[number] for number in sorted(stream.damaged)]
    num_implausible = sum(found.num_implausible for found in stream.faults.values())
    if num_implausible:
        examples = [stream.faults[number].example for number in sorted(stream.faults)]
        example = next(example for example in examples if example)
        path, num_rows = str(stream.trace.path), stream.num_collectives
        said.append(implausible_line(path, "collectives", num_implausible, num_rows, example))
    return said


def contradictions_of(stream: SoundStream) -> list[Contradiction]:
    """Return how rows of a stream contradict themselves."""
    total = sum((found.contradict for found in stream.faults.values()), Counter[str]())
    return [Contradiction("collectives", what, count, stream.num_collectives) for what, count in total.items()]
