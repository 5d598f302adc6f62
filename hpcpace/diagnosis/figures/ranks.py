"""The figures of each rank and role: parts of the step, excess over the role, communication."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.summary import RankRow, RoleRow
from hpcpace.metrics.operations.communication import RankTotals
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT, Part
from hpcpace.metrics.roles import Excess, WorkExcess
from hpcpace.trace.reader import RankTrace


def rank_figures(
    traces: Sequence[RankTrace],
    parts: NDArray[np.float64],
    totals: RankTotals,
    *,
    excess: WorkExcess | None,
    late: Collection[int] = (),
    host_timed: Collection[int] = (),
    unknown_waits: Collection[int] = (),
) -> tuple[tuple[RankRow, ...], tuple[RoleRow, ...]]:
    """Return a row per rank and per role.

    Args:
        traces: ascending by rank.
        parts: nanoseconds, (num_ranks, num_steps, num_parts).
        totals: of the operations of these steps.
        excess: of own work over the roles; None where own work is not known.
        late: the ranks that the verdict names as late: their excess is marked, and no other.
        host_timed: the ranks whose parts are times of the host, and not shown.
        unknown_waits: the ranks whose waits are not told from transfers.
    """
    num_steps = parts.shape[1]
    mean = parts.mean(axis=1)
    members: dict[str, list[int]] = {}
    for index, trace in enumerate(traces):
        members.setdefault(_role(trace), []).append(index)
    rows = tuple(
        RankRow(
            rank=trace.header.rank,
            host=trace.header.host,
            role=_role(trace),
            step_ns=float(mean[index].sum()),
            **_parts(mean[index], {trace.header.rank}, host_timed, unknown_waits),
            excess=_marked(excess.of_rank(index), is_late=trace.header.rank in late) if excess is not None else None,
            num_operations=float(totals.num_operations[index] / num_steps),
            size_bytes=float(totals.size_bytes[index] / num_steps),
            **_communication(totals, index, num_steps, is_known=trace.header.rank not in unknown_waits),
        )
        for index, trace in enumerate(traces)
    )
    roles = []
    for role, indices in members.items():
        of_role, ranks = mean[indices].mean(axis=0), tuple(traces[index].header.rank for index in indices)
        known = _parts(of_role, set(ranks), host_timed, unknown_waits)
        roles.append(RoleRow(role=role, ranks=ranks, step_ns=float(of_role.sum()), **known))
    return rows, tuple(roles)


def _marked(excess: Excess | None, *, is_late: bool) -> Excess | None:
    return None if excess is None else replace(excess, is_marked=is_late)


def _role(trace: RankTrace) -> str:
    slots = [f"{name}{value}" for name, value in (("pp", trace.header.pp), ("tp", trace.header.tp)) if value >= 0]
    return " ".join(slots) or "all"


class _Parts(TypedDict):
    parts_ns: dict[str, float | None] | None
    shares: dict[str, float | None] | None
    busy_share: float | None


def _parts(
    mean_ns: NDArray[np.float64], ranks: set[int], host_timed: Collection[int], unknown_waits: Collection[int]
) -> _Parts:
    if not ranks.isdisjoint(host_timed):
        return {"parts_ns": None, "shares": None, "busy_share": None}
    shares = relative(mean_ns)
    busy = float(shares[list(BUSY)].sum())
    if not ranks.isdisjoint(unknown_waits):
        return {"parts_ns": _without_waits(mean_ns), "shares": _without_waits(shares), "busy_share": busy}
    return {"parts_ns": {**_named(mean_ns)}, "shares": {**_named(shares)}, "busy_share": busy}


def _without_waits(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the parts with the waits that are known, of some operations only, in the transfers."""
    moved = values.copy()
    moved[list(EXPOSED_TRANSFER)] += values[list(EXPOSED_WAIT)]
    return {**_named(moved), **dict.fromkeys([part.name.lower() for part in EXPOSED_WAIT])}


class _Communication(TypedDict):
    wait_ns: float | None
    transfer_ns: float | None


def _communication(totals: RankTotals, index: int, num_steps: int, *, is_known: bool) -> _Communication:
    if not is_known:
        return {"wait_ns": None, "transfer_ns": None}
    wait_ns, transfer_ns = (float(values[index] / num_steps) for values in (totals.wait_ns, totals.transfer_ns))
    return {"wait_ns": wait_ns, "transfer_ns": transfer_ns}


def _named(values: NDArray[np.float64]) -> dict[str, float]:
    return {part.name.lower(): float(values[part]) for part in Part}


def relative(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values relative to their sum."""
    shares: NDArray[np.float64] = values / max(float(values.sum()), 1.0)
    return shares
