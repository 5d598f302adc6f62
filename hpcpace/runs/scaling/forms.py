"""The functions of the number of units that a term of the law may consist of, and transfers hidden behind work.

A term is a sum of few functions with coefficients of at least 0, by least squares of relative errors (Lawson & Hanson
1974, chapter 23). Each draw of a bootstrap takes one of the candidates, those that explain the data in few functions
more often (weights exp(-BIC / 2), Schwarz 1978).

Hidden transfers are in no step time, and cost nothing until they take longer than the work beside them. Of the
transfers T of a phase, H are hidden: a share h of them while there is plenty of work, and at most a part u of the work
W from the first of them on,

    H = ((h T)^-q + (u W)^-q)^(-1/q), exposed: T - H,

with q large where all of them share one queue and end together, and small where each has its own work to hide behind.
h, u and q are those that explain all sizes, each draw other ones, the likelier ones more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, listed, percent, plural
from hpcpace.metrics.communication import LEAST_HIDDEN
from hpcpace.metrics.special import nonnegative_least_squares
from hpcpace.runs.scaling.sizes import Series, Size


def parts_at(size: Size) -> dict[str, float]:
    """Return the parts of a measured size; `total` alone where they are not known."""
    return dict(size.parts_ns or {"total": size.mean("step_ns") or 0.0})


def parts_of_all(size: Size) -> dict[str, float]:
    """Return the parts of a size, with the work that its fastest rank has, too, and the rest of it as imbalance."""
    parts = parts_at(size)
    beyond_ns = parts["work"] * (1 - (size.mean("least_work") or 1.0))
    return {**parts, "work": parts["work"] - beyond_ns, "imbalance": parts["imbalance"] + beyond_ns}


FloatArray = NDArray[np.float64]
Candidates = tuple[tuple[str, ...], ...]
FUNCTIONS: dict[str, tuple[str, Callable[[FloatArray], FloatArray]]] = {
    "constant": ("constant", np.ones_like),
    "shared": ("1/n", lambda n: 1 / n),
    "ring": ("(n - 1)/n, as a ring", lambda n: (n - 1) / n),
    "several": ("the same from two on", lambda n: np.asarray(n > 1, np.float64)),
    "log": ("log n, as a tree", np.log2),
    "root": ("sqrt n, as a mesh", lambda n: np.sqrt(n) - 1),
    "hops": ("n - 1, as hops", lambda n: n - 1),
}
"""Functions of the number of units, in words: what does not depend on it; what is divided among the units; the volume
of a ring; what comes with the second unit, and no other; the depth of a tree; the diameter of a square mesh, without
that of one unit; and the hops of a ring."""

NUM_DRAWS = 400
TINY = 1e-12
_MAX_FUNCTIONS = 3


def sums(text: str) -> Candidates:
    """Return sums of functions, such as those of `constant, constant + log`."""
    return tuple(tuple(one.split(" + ")) for one in text.split(", "))


def drawn(
    n: FloatArray,
    values: FloatArray,
    errors: FloatArray,
    candidates: Candidates,
    targets: FloatArray,
    generator: np.random.Generator,
    floor: float = 0.0,
) -> tuple[FloatArray, str]:
    """Return draws of a term at the targets, (num_draws, num_points), and its form in words.

    Where even the best form is further from the values than their errors allow, the errors count as larger by that
    much (the ratio of Birge 1932).

    Args:
        n: sizes, (num_sizes,).
        values: of the term, (num_sizes,).
        errors: relative, (num_sizes,).
        candidates: names of `FUNCTIONS` of which the term may consist, as of `sums`.
        targets: sizes asked for, (num_points,).
        generator: of the bootstrap.
        floor: smallest error that counts, in the unit of the values.
    """
    sigma = np.maximum(values * errors, max(floor, float(values.max(initial=0.0)) * 1e-6, TINY))
    usable = [
        basis
        for basis in candidates
        if len(basis) <= min(_MAX_FUNCTIONS, len(n)) and np.linalg.matrix_rank(_matrix(basis, n)) == len(basis)
    ] or [candidates[0]]
    fits = [_fitted(basis, n, values, sigma) for basis in usable]
    misfits, sizes = np.array([misfit for _, misfit in fits]), np.array([len(basis) for basis in usable])
    best = int((misfits + sizes * np.log(len(n))).argmin())
    birge = max(float(misfits[best]) / max(len(n) - int(sizes[best]), 1), 1.0)
    scores = misfits / birge + sizes * np.log(len(n))
    weights = np.exp(-0.5 * (scores - scores.min()))
    chosen = generator.choice(len(usable), size=NUM_DRAWS, p=weights / weights.sum())
    draws = np.empty((NUM_DRAWS, len(targets)))
    for row, which in enumerate(chosen.tolist()):
        noisy = values + np.sqrt(birge) * sigma * generator.standard_normal(len(n))
        coefficients, _ = _fitted(usable[which], n, noisy, sigma)
        draws[row] = _matrix(usable[which], targets) @ coefficients
    best = int(weights.argmax())
    return draws, _words(usable[best], fits[best][0])


def _matrix(basis: Sequence[str], n: FloatArray) -> FloatArray:
    """Return the functions of a basis at some sizes, (num_sizes, num_functions)."""
    return np.column_stack([FUNCTIONS[name][1](n) for name in basis])


def _fitted(basis: Sequence[str], n: FloatArray, values: FloatArray, sigma: FloatArray) -> tuple[FloatArray, float]:
    """Return the coefficients, and the sum of squared errors in units of sigma."""
    coefficients, norm = nonnegative_least_squares(_matrix(basis, n) / sigma[:, np.newaxis], values / sigma)
    return coefficients, norm**2


def _words(basis: Sequence[str], coefficients: FloatArray) -> str:
    found = dict(zip(basis, coefficients.tolist(), strict=True))
    words = " + ".join(FUNCTIONS[one][0] for one, value in found.items() if value > 0) or "nothing"
    serial, divided = found.get("constant", 0.0), found.get("shared", 0.0)
    if "shared" not in found or not serial + divided:
        return words
    # Of the work that does not grow with n (Amdahl 1967): what remains of it with any number of units.
    return f"{words}, serial share {percent(serial / (serial + divided))}"


# A lasting difference of a few units, of one unit to the mean of all, or of units that all differ.
_LASTING = sums("constant, ring, log")
_LASTING_ERROR = 0.1  # relative: which units are the slow ones is chance
_EXPONENT_ERROR = 0.1  # of A(k), by differences between few points
_LOSS_ERROR = 0.05  # relative, at least: of the loss of two units
_MIN_RATIO = 1.5  # of work at different sizes, to see with which power of it jitter grows


def waiting(
    series: Series, targets: FloatArray, work: FloatArray, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray, str]:
    """Return draws of what lasts and of jitter at the targets, (num_draws, num_points), and what jitter rests on.

    What lasts is by how much the slowest rank's work exceeds that of the fastest one, in the mean.

    Args:
        series: whose sizes all have parts.
        targets: sizes asked for, (num_points,).
        work: draws of the fastest rank's work at the targets, relative to the largest size, (num_draws, num_points).
        generator: of the draws.
    """
    last = series.sizes[-1]
    parts_ns = last.parts_ns or {}
    lasting_ns, jitter_ns = parts_ns["imbalance"], parts_ns["jitter"]
    predicted = [sample.predictions for sample in last.samples if len(sample.predictions) > 1]
    if predicted and series.unit == "node":
        # The tails have lasting differences in them, behind which new units hide.
        grown, words = _by_tails(predicted[0], targets, generator), "tails of the work"
        jitter = np.maximum((lasting_ns + jitter_ns) * grown - lasting_ns, 0.0)
    else:
        grown, words = _by_growth(series, targets, generator)
        jitter = jitter_ns * grown
    lasting = parts_of_all(last)["imbalance"] * _lasting_growth(series, targets, generator) * work
    return lasting, jitter * work ** _exponents(series, generator), words


def _lasting_growth(series: Series, targets: FloatArray, generator: np.random.Generator) -> FloatArray:
    """Return by which factor what lasts, as a share of the work, is larger than on the largest size.

    float64, (num_draws, num_points).
    """
    several = [size for size in series.sizes if size.num_units > 1]
    values = np.array([parts["imbalance"] / max(parts["work"], TINY) for parts in map(parts_of_all, several)])
    if not len(values) or values[-1] <= 0:
        return np.ones((NUM_DRAWS, len(targets)))
    n = np.array([size.num_units for size in several], np.float64)
    errors = np.full(len(n), _LASTING_ERROR)
    draws, _ = drawn(n, values, errors, _LASTING, np.append(targets, n[-1]), generator, _LASTING_ERROR * values[-1])
    at_last = draws[:, -1:]
    return np.asarray(np.divide(draws[:, :-1], at_last, out=np.ones_like(draws[:, :-1]), where=at_last > 0))


def _by_growth(series: Series, targets: FloatArray, generator: np.random.Generator) -> tuple[FloatArray, str]:
    """Return by which factor jitter is larger than on the largest size, by its own A(k), (num_draws, num_points).

    With the exponent of the upper half as growth at the largest size: between one that ends, as of bounded noise, and
    one that goes on as a power; a logarithm, as of exponential tails, lies between them (Box & Cox 1964).
    """
    last = series.sizes[-1]
    ratio = targets / last.num_units
    curves = [sample.growth for sample in last.samples if len(sample.growth) > 2]
    if not curves:
        return ratio ** generator.uniform(0.0, 1.0, (NUM_DRAWS, 1)), "not known, between none and in proportion"
    k = np.array([point[0] for point in curves[0]], np.float64)
    excess = np.mean([[value - 1 for _, value in curve] for curve in curves if len(curve) == len(k)], axis=0)
    upper = slice(len(k) // 2, None)
    is_growing = (excess[upper] > 0).all() and len(k[upper]) > 1
    slope = float(np.clip(np.polyfit(np.log(k[upper]), np.log(excess[upper]), 1)[0], 0.0, 1.0)) if is_growing else 0.0
    drawn_slope = np.clip(slope + _EXPONENT_ERROR * generator.standard_normal((NUM_DRAWS, 1)), 0.0, 1.0)
    power = generator.uniform(-1.0, drawn_slope)
    power = np.where(np.abs(power) < 1e-6, 1e-6, power)
    return 1 + drawn_slope * (ratio**power - 1) / power, f"A(k) with exponent {slope:.2f}"


def _by_tails(
    points: tuple[tuple[int, float, float, float], ...], targets: FloatArray, generator: np.random.Generator
) -> FloatArray:
    nodes = np.log([point[0] for point in points])
    loss, low, high = (np.array([point[column] for point in points]) for column in (1, 2, 3))
    present = max(float(loss[0]), TINY)
    normal = generator.standard_normal((NUM_DRAWS, 1))
    at = np.log(targets)
    center = np.interp(at, nodes, loss / present)
    half = np.interp(at, nodes, (high - low) / present) / 4  # an interval of 95 % is four deviations wide
    # The interval of the loss is wide where it is measured, too; only its growth counts here.
    grown = np.maximum(center - 1, 0.0)
    return np.asarray(np.maximum(1 + grown * (1 + normal * np.minimum(half / np.maximum(grown, 0.1), 0.5)), 0.0))


def _exponents(series: Series, generator: np.random.Generator) -> FloatArray:
    """Return with which power of the work jitter grows, (num_draws, 1): 0 where it does not depend on it.

    At an equal number of units, jitter of all sizes would be equal if it did not depend on the work of a rank.
    """
    points = [
        (parts["work"], (value - 1) * parts["work"])
        for size in series.sizes
        if (parts := size.parts_ns) is not None
        for sample in size.samples
        for k, value in sample.growth
        if k == 2 and value > 1
    ]
    work = np.log([point[0] for point in points])
    if len(points) < 2 or np.ptp(work) < np.log(_MIN_RATIO):
        # Beyond its ends, so that these are as likely as what lies between them.
        return np.clip(generator.uniform(-0.25, 1.25, (NUM_DRAWS, 1)), 0.0, 1.0)
    loss = np.log([point[1] for point in points])
    center = work - work.mean()
    slope = float(center @ loss / (center @ center))
    rest = loss - loss.mean() - slope * center
    variance = max(float(rest @ rest) / max(len(points) - 2, 1), _LOSS_ERROR**2)
    error = float(np.sqrt(variance / (center @ center)))
    return np.asarray(np.clip(slope + error * generator.standard_normal((NUM_DRAWS, 1)), 0.0, 1.0))


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
    # Microseconds of launching on one unit would count as exact, and every form as one that misses them by far.
    floor_ns = _OF_TRANSFER_ERROR * float(of.transfer_ns.max())
    transfer, _ = drawn(n, of.transfer_ns, np.hypot(errors, _TRANSFER_ERROR), forms, points, generator, floor_ns)
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
