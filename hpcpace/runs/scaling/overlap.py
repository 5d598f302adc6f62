"""Transfers that are hidden behind work today, and what of them is exposed on more units.

Hidden transfers are in no step time, and cost nothing until they take longer than the work beside them. Of the
transfers T of a phase, H are hidden: a share h of them while there is plenty of work, and at most a part u of the work
W from the first of them on,

    H = ((h T)^-q + (u W)^-q)^(-1/q), exposed: T - H,

with q large where all of them share one queue and end together, and small where each has its own work to hide behind.
h, u and q are those that explain all sizes, each draw other ones, the likelier ones more often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcpace.core.text import format_duration, listed, plural
from hpcpace.metrics.overlap import LEAST_HIDDEN
from hpcpace.runs.scaling.forms import NUM_DRAWS, TINY, Candidates, FloatArray, drawn, parts_of_all, sums
from hpcpace.runs.scaling.sizes import Series, Size

# As of all transfers, and with what comes on top of a ring where switches are shared.
_TRANSFER = sums("several, ring, log, root, hops, ring + hops, log + hops, ring + log")
_ON_ONE = (
    *_TRANSFER,
    *sums("constant, constant + ring, constant + log, constant + root, constant + hops, constant + ring + hops"),
)
_EXPOSED_ERROR, _OF_TRANSFER_ERROR, _TRANSFER_ERROR = 0.05, 0.01, 0.02  # relative, of single runs
_SHARES = 1 - np.geomspace(0.002, 0.9, 28)  # h
_PARTS = 1 - 0.4 * np.linspace(0.0, 1.0, 12) ** 2  # u: near 1 more likely, since little of a phase hides nothing
_EXPONENTS = np.array([1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 12.0])  # q
_GRID = np.array([column.ravel() for column in np.meshgrid(_SHARES, _PARTS, _EXPONENTS, indexing="ij")])


@dataclass(frozen=True, kw_only=True)
class PhaseTransfers:
    """Transfers of one phase that work may hide, at all sizes of a series, nanoseconds of a step, each (num_sizes,).

    Attributes:
        phase: its name; empty for what begins in none.
        transfer_ns, exposed_ns: all, and what of them blocks.
        window_ns: the work that can hide them.
    """

    phase: str
    transfer_ns: FloatArray
    exposed_ns: FloatArray
    window_ns: FloatArray

    @property
    def hidden_ns(self) -> float:
        """What of them is hidden at the largest size."""
        return float(self.transfer_ns[-1] - self.exposed_ns[-1])


def phases_of(series: Series) -> list[PhaseTransfers] | None:
    """Return the transfers that work hides, phase by phase; None where a run does not say what is hidden.

    Kinds of which never a tenth is hidden are left out: they block today, as on any number of units.
    """
    if any(sample.overlap is None for size in series.sizes for sample in size.samples):
        return None
    tables = [_means(size) for size in series.sizes]
    kinds = sorted({kind for table in tables for kind in table})
    hidden = [
        kind for kind in kinds if any(one[kind][1] < (1 - LEAST_HIDDEN) * one[kind][0] for one in tables if kind in one)
    ]
    none = np.zeros(3)
    found = []
    for phase in sorted({kind[0] for kind in hidden}):
        own = [[table.get(kind, none) for kind in hidden if kind[0] == phase] for table in tables]
        values = np.array([[*np.sum([row[:2] for row in rows], axis=0), max(row[2] for row in rows)] for rows in own])
        found.append(
            PhaseTransfers(phase=phase, transfer_ns=values[:, 0], exposed_ns=values[:, 1], window_ns=values[:, 2])
        )
    return found


def _means(size: Size) -> dict[tuple[str, str, bool], FloatArray]:
    """Return transfers, their exposed part and the work beside them by phase, operation and reach; means of repeats."""
    found: dict[tuple[str, str, bool], FloatArray] = {}
    for sample in size.samples:
        for row in sample.overlap or ():
            values = np.array([row.transfer_ns, min(row.exposed_ns, row.transfer_ns), row.window_ns])
            kind = (row.phase, row.op, row.is_across)
            found[kind] = found.get(kind, np.zeros(3)) + values / len(size.samples)
    return found


def exposed(
    series: Series,
    of: PhaseTransfers,
    errors: FloatArray,
    targets: FloatArray,
    work: FloatArray,
    generator: np.random.Generator,
) -> FloatArray:
    """Return draws of what a phase exposes at the targets, (num_draws, num_points).

    Each draw goes on from what the largest size exposes.

    Args:
        series: of which it is a phase.
        of: the phase.
        errors: relative, of the speeds of the sizes, (num_sizes,).
        targets: sizes asked for, (num_points,).
        work: draws of the work at the targets, relative to that of the largest size, (num_draws, num_points).
        generator: of the draws.
    """
    n = np.array([size.num_units for size in series.sizes], np.float64)
    forms = _forms(of)
    points = np.append(targets, n[-1])
    transfer, _ = drawn(n, of.transfer_ns, np.hypot(errors, _TRANSFER_ERROR), forms, points, generator, TINY)
    shares, parts, exponents = _chosen(of, errors, generator)
    window = of.window_ns[-1] * np.column_stack([work, np.ones(NUM_DRAWS)])
    hidden = _hidden(transfer, window, shares, parts, exponents)
    if of.hidden_ns > of.window_ns[-1]:
        # It goes on beyond the end of its phase, where more work hides it: how much more could is not known.
        hidden = np.minimum(shares * transfer, of.hidden_ns)
    found = transfer - hidden
    return np.asarray(np.maximum(found[:, :-1] + of.exposed_ns[-1] - found[:, -1:], 0.0))


def _forms(of: PhaseTransfers) -> Candidates:
    return _ON_ONE if of.transfer_ns[0] > LEAST_HIDDEN * of.transfer_ns[-1] else _TRANSFER


def _hidden(
    transfer: FloatArray, window: FloatArray, shares: FloatArray, parts: FloatArray, exponents: FloatArray
) -> FloatArray:
    """Return the hidden part of transfers; arguments broadcast against each other."""
    plenty, scarce = np.maximum(shares * transfer, TINY), np.maximum(parts * window, TINY)
    least, most = np.minimum(plenty, scarce), np.maximum(plenty, scarce)
    return np.asarray(least * (1 + (least / most) ** exponents) ** (-1 / exponents))


def _chosen(
    of: PhaseTransfers, errors: FloatArray, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return draws of h, u and q, each (num_draws, 1), by how well they explain what the sizes expose."""
    used = np.flatnonzero((of.transfer_ns > 0) & (of.window_ns > 0))
    grid = _GRID[:, :, np.newaxis]
    transfer, measured = of.transfer_ns[used], of.exposed_ns[used]
    sigma = np.hypot(np.hypot(errors[used], _EXPOSED_ERROR) * measured, _OF_TRANSFER_ERROR * transfer) + TINY
    modelled = transfer - _hidden(transfer, of.window_ns[used], *grid)
    misfit = (((modelled - measured) / sigma) ** 2).sum(axis=1)
    misfit /= max(float(misfit.min(initial=np.inf)) / max(len(used) - 1, 1), 1.0) if len(used) else 1.0
    weights = np.exp(-0.5 * (misfit - misfit.min()))
    chosen = generator.choice(len(weights), size=NUM_DRAWS, p=weights / weights.sum())
    shares, parts, exponents = _GRID[:, chosen, np.newaxis]
    return shares, parts, exponents


def words_of(phases: list[PhaseTransfers] | None, series: Series) -> str:
    """Return what is hidden at the largest size, and how much could be; or that it cannot be seen."""
    if phases is None:
        return (
            "communication hidden behind work cannot be seen in these runs: what of it a larger size exposes is in no "
            "prediction"
        )
    told = [
        f"{format_duration(one.hidden_ns)} of {format_duration(float(one.transfer_ns[-1]))} of transfers of the "
        f"{one.phase or 'step'} are hidden"
        + (f", at most {format_duration(float(one.window_ns[-1]))} can be" if one.window_ns[-1] > one.hidden_ns else "")
        for one in phases
        if one.transfer_ns[-1] > 0
    ]
    if not told:
        return "no transfers are hidden behind work"
    return f"on {plural(series.sizes[-1].num_units, series.unit)} {listed(told)}"


def rest_of(series: Series, phases: list[PhaseTransfers]) -> FloatArray:
    """Return the exposed transfers of all sizes without those of some phases, (num_sizes,)."""
    of_all = np.array([parts_of_all(size)["transfer"] for size in series.sizes])
    return np.asarray(np.maximum(of_all - np.sum([one.exposed_ns for one in phases], axis=0), 0.0))
