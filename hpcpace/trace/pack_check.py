"""Read all of a pack back, in bounded memory, and tell whether it holds what the ranks' own files held."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.trace.chunks import DamagedColumn
from hpcpace.trace.pack_index import PackIndex, collectives_of, groups_of
from hpcpace.trace.pack_schema import OF_RANKS, OPEN, RankDigest
from hpcpace.trace.packed_rows import ChunkCache, read_rows
from hpcpace.trace.tables import Table

_ROWS_AT_ONCE = 1 << 20


def check_pack(pack: PackIndex, descriptor: int, expected: Mapping[int, bytes]) -> None:
    """Check that a pack reads without a problem and holds exactly what the ranks' own files held.

    Args:
        pack: what is in it.
        descriptor: the open pack.
        expected: the digest of each rank's own file.

    Raises:
        TraceError: it does not.
    """
    if pack.problems:
        raise TraceError(pack.problems[0])
    found = digests_of(pack, descriptor)
    if found != dict(expected):
        wrong = [rank for rank in expected if found.get(rank) != expected[rank]]
        raise TraceError(f"{pack.path} does not hold what the file of rank {wrong[0] if wrong else '?'} held")


def digests_of(pack: PackIndex, descriptor: int) -> dict[int, bytes]:
    """Return the digest of each rank of a pack.

    Raises:
        TraceError: a part is damaged.
    """
    digests = [
        RankDigest(header, closed=bool(closed))
        for header, closed in zip(pack.headers, pack.ranks["closed"].tolist(), strict=True)
    ]
    try:
        for name in (*OF_RANKS, OPEN):
            _add_table(pack, descriptor, name, digests)
        groups = groups_of(pack, descriptor)
        for place, digest in enumerate(digests):
            digest.add("groups", groups.table(place))
        _add_collectives(pack, descriptor, digests)
    except DamagedColumn as error:
        raise TraceError(f"{pack.path} is damaged: {error}") from error
    return {rank: digest.hex() for rank, digest in zip(pack.numbers, digests, strict=True)}


def _add_table(pack: PackIndex, descriptor: int, name: str, digests: list[RankDigest]) -> None:
    if name not in pack.chunks:
        raise DamagedColumn(f"table {name}")
    ends = np.cumsum(pack.ranks[f"num_{name}"]).tolist()
    for first, rows in _rows(pack, descriptor, name):
        for digest, begin, end in zip(digests, [0, *ends], ends, strict=False):
            own = slice(max(begin - first, 0), max(min(end - first, len(rows)), 0))
            if own.start < own.stop:
                digest.add(name, rows.select(own))


def _rows(pack: PackIndex, descriptor: int, name: str) -> Iterator[tuple[int, Table]]:
    """Yield pieces of a table, each with the number of its first row."""
    chunks = pack.chunks[name]
    bounds = [*range(0, chunks.num_rows, _ROWS_AT_ONCE), chunks.num_rows]
    for first, stop in itertools.pairwise(bounds):
        rows, damaged = read_rows(descriptor, chunks, first, stop)
        if damaged:
            raise DamagedColumn(f"rows of {name}")
        yield first, rows


def _add_collectives(pack: PackIndex, descriptor: int, digests: list[RankDigest]) -> None:
    collectives = collectives_of(pack, descriptor, partial(os.dup, descriptor), ChunkCache())
    for block in range(collectives.num_blocks):
        rows, damaged = collectives.read_blocks(block, block + 1)
        if damaged:
            raise DamagedColumn("rows of collectives")
        ends = np.cumsum(collectives.counts[block]).tolist()
        for digest, begin, end in zip(digests, [0, *ends], ends, strict=False):
            digest.add("collectives", rows.select(slice(begin, end)))
