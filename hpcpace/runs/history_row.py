"""One line of a history: a run with its speed and that of its hosts; and lines of one series.

A series has the runs of one job that do the same work in one layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import fmean, median
from typing import Annotated

from msgspec import Meta

from hpcpace.core.codec import Count, Text
from hpcpace.runs.changes import compared_work, usual_batches
from hpcpace.runs.measured import MeasuredRun

# Bounds of what an index may say: exponentials and differences of these stay finite.
_Speed = Annotated[float, Meta(gt=0, lt=1e300)]
_LogRatio = Annotated[float, Meta(gt=-20, lt=20)]
_LogTime = Annotated[float, Meta(gt=-50, lt=50)]
_Hosts = Annotated[tuple[Text, ...], Meta(max_length=100_000)]


@dataclass(frozen=True, kw_only=True)
class HistoryRow:
    """One run.

    Attributes:
        run: its path below the folder.
        begun_unix_ns: when it began; 0 where unknown.
        job: name of its job.
        kind: its layout: world, mesh and type of numbers.
        work: what was trained on what, by name: runs with other values cannot be compared.
        samples_per_step: the global batch; 0 where unknown.
        identity: what no other run has, and a copy has, too; empty where unknown.
        p50_ns, mean_ns: median and mean step time.
        samples_per_s: throughput; None where unknown.
        samples_unit: of that and of the batch.
        num_ranks, num_nodes: of the job; 0 where unknown.
        hosts: where it ran.
        slowness: by host, logarithm of own work over the median of the other hosts of its role in the run; of hosts
            that compare.
        own_work: by host, logarithm of the own work of a rank a step, in ns.
        first_host: of rank 0; empty where unknown.
        mode: of its verdict; empty where unknown.
    """

    run: Text
    begun_unix_ns: Count
    job: Text
    kind: Text
    p50_ns: _Speed
    mean_ns: _Speed
    work: Mapping[Text, Text] = field(default_factory=dict)
    samples_per_step: Annotated[float, Meta(ge=0, lt=1e300)] = 0.0
    identity: Text = ""
    samples_per_s: _Speed | None = None
    samples_unit: Text = ""
    num_ranks: Count = 0
    num_nodes: Count = 0
    hosts: _Hosts = ()
    slowness: Mapping[Text, _LogRatio] = field(default_factory=dict)
    own_work: Mapping[Text, _LogTime] = field(default_factory=dict)
    first_host: Text = ""
    mode: Text = ""


def row_of(measured: MeasuredRun, run: str, begun_unix_ns: int) -> HistoryRow:
    """Return the line of a run.

    Args:
        measured: the run.
        run: its path below the folder.
        begun_unix_ns: when it began; 0 where unknown.
    """
    parts = (f"{measured.world_size} ranks", measured.mesh, measured.conditions.dtype)
    own = _own_work(measured)
    return HistoryRow(
        run=run,
        begun_unix_ns=begun_unix_ns,
        job=measured.conditions.job_name or "unnamed",
        kind=", ".join(filter(None, parts)),
        work={**compared_work(measured), "emulation": measured.emulation or "none"},
        samples_per_step=measured.samples_per_step,
        identity=measured.identity,
        p50_ns=measured.p50_ns,
        mean_ns=measured.mean_ns,
        samples_per_s=measured.samples_per_s,
        samples_unit=measured.samples_unit,
        num_ranks=measured.world_size,
        num_nodes=len(set(measured.hosts)),
        hosts=tuple(sorted(set(measured.hosts))),
        slowness=_slowness(own),
        own_work={host: round(fmean(of_host.values()), 6) for host, of_host in own.items()},
        first_host=next((rank.host for rank in measured.ranks if rank.rank == 0), ""),
        mode=measured.mode,
    )


def _own_work(measured: MeasuredRun) -> dict[str, dict[str, float]]:
    """Return the mean logarithm of own work by host and role; empty where that of a rank is not known."""
    found: dict[str, dict[str, list[float]]] = {}
    for rank in measured.ranks:
        if rank.work_ns is None or rank.work_ns <= 0:
            return {}
        found.setdefault(rank.host, {}).setdefault(rank.role, []).append(log(rank.work_ns))
    return {host: {role: fmean(values) for role, values in of_host.items()} for host, of_host in found.items()}


def _slowness(own: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return how much longer each host takes than the others of its roles; of two, nobody knows which is unusual."""
    found = {}
    for host, of_host in own.items():
        others = [[own[other][role] for other in own if other != host and role in own[other]] for role in of_host]
        if min(map(len, others)) > 1:
            beyond = [value - median(of_role) for value, of_role in zip(of_host.values(), others, strict=True)]
            found[host] = round(fmean(beyond), 6)
    return found


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs whose step times can be compared, in the order that they were given in.

    Attributes:
        job: of all of them.
        kind: their layout and batch, and what sets their work apart from that of others in this layout.
    """

    job: str
    kind: str
    rows: tuple[HistoryRow, ...]


def grouped(rows: Iterable[HistoryRow]) -> list[Group]:
    """Return the series of some runs."""
    by_layout: dict[tuple[str, str, str], list[HistoryRow]] = {}
    for row in rows:
        by_layout.setdefault((row.job, row.kind, row.samples_unit), []).append(row)
    return [
        Group(job=job, kind=", ".join(filter(None, (kind, _batch(batch, unit), told))), rows=tuple(alike))
        for (job, kind, unit), of_layout in by_layout.items()
        for batch, of_batch in _by_batch(of_layout).items()
        for told, alike in _by_work(of_batch)
    ]


def without_a_place(rows: Iterable[HistoryRow]) -> list[HistoryRow]:
    """Return the runs without a date that are in a series with runs that have one."""
    return [
        row
        for group in grouped(rows)
        if any(one.begun_unix_ns for one in group.rows)
        for row in group.rows
        if not row.begun_unix_ns
    ]


def _batch(batch: float, unit: str) -> str:
    if not batch:
        return ""
    return f"{batch:g} {unit}" if unit else f"batch {batch:g}"


def _by_batch(rows: Sequence[HistoryRow]) -> dict[float, list[HistoryRow]]:
    usual = usual_batches(row.samples_per_step for row in rows)
    found: dict[float, list[HistoryRow]] = {}
    for row in rows:
        found.setdefault(usual[row.samples_per_step], []).append(row)
    return found


def _by_work(rows: Sequence[HistoryRow]) -> Iterator[tuple[str, list[HistoryRow]]]:
    """Yield what sets the work of runs apart, and the runs; names that one of two runs does not record do not.

    A run that agrees with several is taken to the one that came last.
    """
    works: list[dict[str, str]] = []
    found: list[list[HistoryRow]] = []
    known: dict[frozenset[tuple[str, str]], int] = {}
    for row in rows:
        same = frozenset(row.work.items())
        if same not in known:
            agrees = [
                at for at, work in enumerate(works) if all(work.get(name, value) == value for name, value in same)
            ]
            if not agrees:
                works.append({})
                found.append([])
            known[same] = agrees[-1] if agrees else len(works) - 1
            works[known[same]] |= row.work
        found[known[same]].append(row)
    names = _telling(works)
    for work, alike in zip(works, found, strict=True):
        yield ", ".join(f"{name} {work[name]}" for name in names if name in work), alike


def _telling(works: Sequence[Mapping[str, str]]) -> list[str]:
    """Return names by whose values some works can be distinguished, as few as needed in their order."""
    names: list[str] = []
    num_told = 1
    for name in sorted({name for work in works for name in work}):
        if num_told == len(works):
            break
        num = len({tuple(work.get(one) for one in (*names, name)) for work in works})
        if num > num_told:
            names.append(name)
            num_told = num
    return names
