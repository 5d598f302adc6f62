"""NCCL's RAS as a second witness: the processes it lost, and the calls of each rank.

What `ncclras -f json` prints, from NCCL 2.28.7 on (src/ras/client_support.cc). Up to 2.28.9 a comma is missing behind
the device of a rank that does not answer; that comma alone is put in. RAS counts ranks by communicator. Global ranks
are those of a communicator of all ranks, and others are known by host and process from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.text import printable, rank_list, shortened
from hpcpace.hang.views import JobView, RankView
from hpcpace.runs.imports.input_files import Table, is_whole, json_value, list_of, number_of, table_of, text_of

_MAX_BYTES = 64 << 20
_MAX_RANKS = 1 << 20
_MAX_OPS = 32
"""Operations that ranks of a communicator count; NCCL has a dozen."""
_MAX_LINES = 6
_MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*"status":)')
_DEAD = "NCCL RAS considers it dead"


@dataclass(frozen=True, kw_only=True)
class RasRank:
    """A rank of a communicator: its process, what is wrong with it, and how often it called each operation."""

    rank: int
    process: tuple[str, int]
    is_missing: bool
    is_dead: bool
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RasReport:
    """A report of RAS: version of NCCL, when it was made, and for each communicator its size and ranks."""

    version: str
    timestamp: str
    communicators: tuple[tuple[int, tuple[RasRank, ...]], ...]


def read_ras(path: Path) -> RasReport:
    """Read a report of RAS.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        data = read_file(path, most_bytes=_MAX_BYTES)
        return _report(table_of(json_value(_MISSING_COMMA.sub(rb"\1,\2", data)), "it"))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(
            f"{path} is no report of NCCL RAS ({printable(str(error))[:120]}); write one with ncclras -f json"
        ) from error


def with_witness(job: JobView, ras: RasReport) -> tuple[JobView, tuple[str, ...]]:
    """Return what is known of a job with what RAS saw, and that in words.

    A process that RAS considers dead has gone. Its counts are told, and decide nothing: they do not say which operation
    of a communicator a rank is in.
    """
    ranks_of = _processes(job, ras)
    if not ranks_of:
        size = len(job.ranks)
        return job, (f"NCCL RAS has no communicator of all {size} ranks, so that its ranks are not known here",)
    dead: set[int] = set()
    silent: set[int] = set()
    lines: list[str] = []
    for size, members in ras.communicators:
        for one in members:
            if one.is_missing and one.process in ranks_of:
                (dead if one.is_dead else silent).add(ranks_of[one.process])
        lines += list(_behind(size, members, ranks_of))
    ranks = {rank: _dead(view) if rank in dead else view for rank, view in job.ranks.items()}
    told = [
        *([f"NCCL RAS ({ras.version}) considers {rank_list(sorted(dead))} dead"] if dead else []),
        *([f"NCCL RAS ({ras.version}) gets no answer of {rank_list(sorted(silent - dead))}"] if silent - dead else []),
        *list(dict.fromkeys(lines))[:_MAX_LINES],
    ]
    nothing = f"NCCL RAS ({ras.version}): all ranks answer, and have called equally many operations"
    return replace(job, ranks=ranks), tuple(told) or (nothing,)


def _dead(view: RankView) -> RankView:
    if view.is_recorded:
        return replace(view, is_gone=True, end=view.end or _DEAD)
    return replace(view, is_recorded=True, is_complete=False, is_gone=True, end=_DEAD)


def _processes(job: JobView, ras: RasReport) -> dict[tuple[str, int], int]:
    """Return the global rank of each process, from a communicator of all ranks."""
    for size, members in ras.communicators:
        if size == len(job.ranks):
            return {one.process: one.rank for one in members if one.rank in job.ranks and one.process[1] >= 0}
    return {}


def _behind(size: int, members: tuple[RasRank, ...], ranks_of: Mapping[tuple[str, int], int]) -> Iterator[str]:
    """Yield which ranks of a communicator have called an operation fewer times than others."""
    present = [one for one in members if not one.is_missing and one.process in ranks_of]
    for op in sorted({op for one in present for op in one.counts}):
        counts = {ranks_of[one.process]: one.counts.get(op, 0) for one in present}
        most = max(counts.values())
        behind = sorted(rank for rank, count in counts.items() if count < most)
        if behind and 2 * len(behind) <= len(counts):
            least = min(counts.values())
            has = "has" if len(behind) == 1 else "have"
            yield (
                f"NCCL RAS: of a communicator of {size} ranks, {rank_list(behind)} {has} called {op} {least} times,"
                f" others {most} times"
            )


def _report(content: Table) -> RasReport:
    communicators = []
    for one in list_of(content.get("communicators"), "communicators"):
        communicator = table_of(one, "a communicator")
        present = [_rank(rank, is_missing=False) for rank in list_of(communicator.get("ranks"), "ranks")]
        missing = [_rank(rank, is_missing=True) for rank in list_of(communicator.get("missing_ranks"), "missing_ranks")]
        if len({op for rank in present for op in rank.counts}) > _MAX_OPS:
            raise ValueError(f"a communicator has more than {_MAX_OPS} operations")
        communicators.append((number_of(communicator, "size", highest=_MAX_RANKS), (*present, *missing)))
    return RasReport(
        version=shortened(text_of(content, "nccl_version"), max_letters=20),
        timestamp=shortened(text_of(content, "timestamp"), max_letters=30),
        communicators=tuple(communicators),
    )


def _rank(content: Any, *, is_missing: bool) -> RasRank:
    rank = table_of(content, "a rank")
    counts = {} if is_missing else table_of(rank.get("collective_counts"), "collective_counts")
    if len(counts) > _MAX_OPS or not all(map(is_whole, counts.values())):
        raise ValueError(f"a count of operations is no number, or there are more than {_MAX_OPS}")
    return RasRank(
        rank=number_of(rank, "rank", highest=_MAX_RANKS),
        process=(text_of(rank, "host"), number_of(rank, "pid", lowest=-1, highest=1 << 32)),
        is_missing=is_missing,
        is_dead=is_missing and table_of(rank.get("status"), "status").get("considered_dead") is True,
        counts={shortened(op, max_letters=40): count for op, count in counts.items()},
    )
