"""What a step consists of, as rows that add up to its mean exactly, so that differences of runs do, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from hpcpace.runs.measured import MeasuredRun
from hpcpace.runs.operations import Operation, operation_names, operation_of

_COMPUTATION = ("forward", "backward", "optimizer")
_OWN = {"data": "waiting for data", "gc": "garbage collection", "host": "device idle for its host", "other": "no phase"}
_APART = {"pace": "held back by pacing", "checkpoint": "checkpoints", "eval": "evaluations"}
_WAITS, _TRANSFERS = ("wait", "sync_wait"), ("transfer", "sync_transfer")
_MOST_CAUSES = 5
_LEAST_NS = 1.0  # clocks count whole ones; what is left of sums of floats is less
_Name = TypeVar("_Name")


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part of the mean step of both groups, means over their runs.

    Attributes:
        kind: own work, exposed wait, transfer, other.
        name: of the part.
        before_ns, after_ns: nanoseconds per step.
    """

    kind: str
    name: str
    before_ns: float
    after_ns: float

    @property
    def change_ns(self) -> float:
        """By how much it is longer in B."""
        return self.after_ns - self.before_ns


def part_rows(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[PartRow]:
    """Return the parts of the mean step in two groups of runs; empty where a run's parts are not known.

    Where waits are not known in any run, as those for a rank without a trace, they look like transfers, so that both
    are one part.

    Args:
        before, after: the groups.
    """
    if any(rank.parts_ns is None for run in (*before, *after) for rank in run.ranks) or not all(
        run.ranks for run in (*before, *after)
    ):
        return []
    are_told = all(run.are_waits_known for run in (*before, *after))
    why = "without all ranks" if any(run.num_missing for run in (*before, *after)) else "where they match nothing"
    untold = "" if are_told else f"waits and transfers, not told apart {why}"
    operations = operation_names(before, after)
    sides = [_mean([_parts(run, untold, operations) for run in group]) for group in (before, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    rows = [
        PartRow(
            kind=kind, name=name, before_ns=sides[0].get((kind, name), 0.0), after_ns=sides[1].get((kind, name), 0.0)
        )
        for kind, name in names
    ]
    return _merged([row for row in rows if max(abs(row.before_ns), abs(row.after_ns)) >= _LEAST_NS])


def _parts(run: MeasuredRun, untold: str, operations: Mapping[Operation, str]) -> dict[tuple[str, str], float]:
    """Return the parts of a run by kind and name; `untold` names waits and transfers together, or is empty."""
    mean = _mean([dict(rank.parts_ns or {}) for rank in run.ranks])
    step_ns = sum(mean.values())
    found = {("own work", "computation"): sum(mean.get(name, 0.0) for name in _COMPUTATION)}
    found |= {("own work", words): mean.get(name, 0.0) for name, words in _OWN.items()}
    waits_ns, transfers_ns = (sum(mean.get(name, 0.0) for name in names) for names in (_WAITS, _TRANSFERS))
    if not untold:
        found |= _by_cause(run, waits_ns) | _by_operation(run, transfers_ns, operations)
    else:
        found["other", untold] = waits_ns + transfers_ns
    found |= {("other", words): mean.get(name, 0.0) for name, words in _APART.items()}
    found["other", "gaps"] = run.mean_ns - step_ns  # time between steps is in no part
    return found


def _by_cause(run: MeasuredRun, exposed_ns: float) -> dict[tuple[str, str], float]:
    """Return the exposed wait by the host at which it began."""
    caused: dict[str, float] = {}
    for rank in run.ranks:
        caused[rank.host] = caused.get(rank.host, 0.0) + rank.caused_wait_ns
    total = sum(caused.values())
    share = min(exposed_ns / total, 1.0) if total else 0.0
    found = {("exposed wait", f"for {host}"): value * share for host, value in caused.items()}
    return found | {("exposed wait", "not traced to a host"): max(exposed_ns - total * share, 0.0)}


def _by_operation(
    run: MeasuredRun, exposed_ns: float, operations: Mapping[Operation, str]
) -> dict[tuple[str, str], float]:
    """Return the exposed transfer by operation, shared out by how long their transfers are, exposed or not."""
    lengths: dict[str, float] = {}
    for kind in run.transfers:
        name = operations[operation_of(kind, run)]
        lengths[name] = lengths.get(name, 0.0) + kind.transfer_ns
    total = sum(lengths.values())
    if not total:
        return {("transfer", "of unknown operations"): exposed_ns}
    return {("transfer", name): exposed_ns * value / total for name, value in lengths.items()}


def _mean(tables: Sequence[Mapping[_Name, float]]) -> dict[_Name, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: fmean(table.get(name, 0.0) for table in tables) for name in names}


def _merged(rows: Sequence[PartRow]) -> list[PartRow]:
    """Return the rows with hosts that hardly changed as one."""
    waits = [row for row in rows if _is_of_host(row)]
    ordered = sorted(waits, key=lambda row: -abs(row.change_ns))
    kept, merged = ordered[:_MOST_CAUSES], ordered[_MOST_CAUSES:]
    others = [row for row in rows if not _is_of_host(row)]
    if merged:
        kept.append(_sum("exposed wait", f"for {len(merged)} other hosts", merged))
    first = [row for row in others if row.kind == "own work"]
    return [*first, *kept, *(row for row in others if row.kind != "own work")]


def _is_of_host(row: PartRow) -> bool:
    return row.kind == "exposed wait" and row.name.startswith("for ")


def _sum(kind: str, name: str, rows: Iterable[PartRow]) -> PartRow:
    rows = list(rows)
    return PartRow(
        kind=kind,
        name=name,
        before_ns=sum(row.before_ns for row in rows),
        after_ns=sum(row.after_ns for row in rows),
    )
