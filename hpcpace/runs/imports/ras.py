"""NCCL's RAS as a second witness: the processes it lost, and the calls of each rank.

What `ncclras -f json` prints, from NCCL 2.28.7 on (src/ras/client_support.cc). Up to 2.28.9 a comma is missing behind
the device of a rank that does not answer; that comma alone is put in. RAS counts ranks by communicator. Global ranks
are those of a communicator of all ranks, and others are known by host and process from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcpace.core.codec import convert
from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.text import printable, rank_list, shortened
from hpcpace.hang.views import JobView, RankView
from hpcpace.runs.imports.input_files import Name, WholeNumber, json_value

_MAX_BYTES = 64 << 20
_MAX_RANKS = 1 << 20
_MAX_OPS = 32
"""Operations that ranks of a communicator count; NCCL has a dozen."""
_MAX_LINES = 6
_MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*"status":)')
_DEAD = "NCCL RAS considers it dead"


class RasProcess(msgspec.Struct, frozen=True):
    """A rank of a communicator."""

    rank: Annotated[int, Meta(ge=0, le=_MAX_RANKS)]
    host: Name
    pid: Annotated[int, Meta(ge=-1, le=1 << 32)]

    @property
    def process(self) -> tuple[str, int]:
        """What is the same for one process in all communicators."""
        return self.host, self.pid


class RasRank(RasProcess, frozen=True):
    """A rank that answers, and how often it called each operation."""

    collective_counts: Annotated[dict[str, WholeNumber], Meta(max_length=_MAX_OPS)]


class RasStatus(msgspec.Struct, frozen=True):
    """Whether RAS takes a rank for dead."""

    considered_dead: bool = False


class RasMissingRank(RasProcess, frozen=True):
    """A rank that does not answer."""

    status: RasStatus


class RasCommunicator(msgspec.Struct, frozen=True):
    """A communicator with its ranks."""

    size: Annotated[int, Meta(ge=0, le=_MAX_RANKS)]
    ranks: tuple[RasRank, ...]
    missing_ranks: tuple[RasMissingRank, ...]


class RasReport(msgspec.Struct, frozen=True):
    """A report of RAS by a version of NCCL."""

    nccl_version: Name
    communicators: tuple[RasCommunicator, ...]


def read_ras(path: Path) -> RasReport:
    """Read a report of RAS.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        data = read_file(path, most_bytes=_MAX_BYTES)
        report = convert(json_value(_MISSING_COMMA.sub(rb"\1,\2", data)), RasReport)
        for communicator in report.communicators:
            if len({op for one in communicator.ranks for op in one.collective_counts}) > _MAX_OPS:
                raise ValueError(f"a communicator has more than {_MAX_OPS} operations")
        return report
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(
            f"{path} is no report of NCCL RAS ({printable(str(error))[:160]}); write one with ncclras -f json"
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
    for communicator in ras.communicators:
        for one in communicator.missing_ranks:
            if one.process in ranks_of:
                (dead if one.status.considered_dead else silent).add(ranks_of[one.process])
        lines += _behind(communicator, ranks_of)
    by = f"NCCL RAS ({shortened(ras.nccl_version, max_letters=20)})"
    ranks = {rank: _dead(view) if rank in dead else view for rank, view in job.ranks.items()}
    told = [
        *([f"{by} considers {rank_list(sorted(dead))} dead"] if dead else []),
        *([f"{by} gets no answer of {rank_list(sorted(silent - dead))}"] if silent - dead else []),
        *list(dict.fromkeys(lines))[:_MAX_LINES],
    ]
    nothing = f"{by}: all ranks answer, and have called equally many operations"
    return replace(job, ranks=ranks), tuple(told) or (nothing,)


def _dead(view: RankView) -> RankView:
    if view.is_recorded:
        return replace(view, is_gone=True, end=view.end or _DEAD)
    return replace(view, is_recorded=True, is_complete=False, is_gone=True, end=_DEAD)


def _processes(job: JobView, ras: RasReport) -> dict[tuple[str, int], int]:
    """Return the global rank of each process, from a communicator of all ranks."""
    for one in ras.communicators:
        if one.size == len(job.ranks):
            members = (*one.ranks, *one.missing_ranks)
            return {each.process: each.rank for each in members if each.rank in job.ranks and each.pid >= 0}
    return {}


def _behind(communicator: RasCommunicator, ranks_of: Mapping[tuple[str, int], int]) -> Iterator[str]:
    """Yield which ranks of a communicator have called an operation fewer times than others."""
    present = [one for one in communicator.ranks if one.process in ranks_of]
    for op in sorted({op for one in present for op in one.collective_counts}):
        counts = {ranks_of[one.process]: one.collective_counts.get(op, 0) for one in present}
        most = max(counts.values())
        behind = sorted(rank for rank, count in counts.items() if count < most)
        if behind and 2 * len(behind) <= len(counts):
            least = min(counts.values())
            has = "has" if len(behind) == 1 else "have"
            yield (
                f"NCCL RAS: of a communicator of {communicator.size} ranks, {rank_list(behind)} {has} called"
                f" {shortened(op, max_letters=40)} {least} times, others {most} times"
            )
