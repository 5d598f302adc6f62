"""Which runs of a history are a series: those of one job that do the same work in one layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcpace.runs.history_row import HistoryRow
from hpcpace.runs.work import usual_batches


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
    """Return names by whose values some works can be told from each other, as few as needed in their order."""
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
