"""The law of a scaling series, T(n) = work(n) + waiting(n) + transfer(n) + other(n), and what it predicts.

Each term is a sum of few functions of n with coefficients of at least 0, by least squares of relative errors
(Lawson & Hanson 1974, chapter 23). Which functions is left open where the data leave it open: each draw of a bootstrap
takes one of the candidates, those that explain the data in few terms more often (weights exp(-BIC / 2), Schwarz 1978).
So an interval has the noise of the runs and the doubt about the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.jitter.extrapolation import extrapolated_transfer
from hpcpace.probe.growth import transfer_term
from hpcpace.probe.record import ProbeRecord
from hpcpace.runs.scaling.sizes import Kind, Series, Size
from hpcpace.wording import percent

FloatArray = NDArray[np.float64]
Basis = Callable[[FloatArray], FloatArray]

MOST_MISFIT = 0.25
"""Relative error at the largest measured size beyond which a law describes nothing."""
MOST_FACTOR = 4
"""Beyond this many times the largest size nothing is predicted."""
LEAST_SIZES = 2
PRIOR_ERROR, PRIOR_ERROR_OF_TOTAL = 0.03, 0.1
"""Relative error of a law for each doubling beyond the largest size, where too few sizes were measured to see it.

The second one is of laws of the step time alone (docs/scale.md#how-far-to-trust-it)."""
_NUM_DRAWS = 400
# Relative error of parts of the step: to which one a nanosecond belongs is not always clear.
_WORK_ERROR, _PART_ERROR = 0.01, 0.05
_FLOOR = 0.003  # of the shortest step, below which a part is noise
_LEAST_POINTS = 3
_LEAST_GROWING = 4  # sizes for a term to have more than two functions
_TINY = 1e-12
_MOST_SPREAD = 50.0  # of the logarithm of a step time, beyond which nothing is known of it


def _constant(n: FloatArray) -> FloatArray:
    return np.ones_like(n)


def _shared(n: FloatArray) -> FloatArray:
    return 1 / n


def _ring(n: FloatArray) -> FloatArray:
    return (n - 1) / n


def _hops(n: FloatArray) -> FloatArray:
    return n - 1


def _log(n: FloatArray) -> FloatArray:
    return np.log2(n)


Candidates = tuple[tuple[Basis, ...], ...]
_WORK: dict[Kind, Candidates] = {
    Kind.STRONG: ((_constant, _shared), (_constant, _shared, _log), (_constant, _shared, _hops)),
    Kind.WEAK: ((_constant,), (_constant, _log), (_constant, _hops)),
}
# Ring: B (n - 1) / n + latency (n - 1). Tree: in proportion to log2 n (Thakur, Rabenseifner & Gropp 2005, section 4).
_TRANSFER: Candidates = ((_ring,), (_log,), (_ring, _hops), (_log, _hops))
_TRANSFER_ON_ONE: Candidates = ((_constant,), (_constant, _ring), (_constant, _log), (_constant, _ring, _hops))
_OTHER: Candidates = ((_constant,), (_constant, _log))
_TOTAL: dict[Kind, Candidates] = {
    Kind.STRONG: (
        (_constant, _shared),
        (_shared, _log),
        (_constant, _shared, _log),
        (_shared, _ring),
        (_constant, _shared, _hops),
    ),
    Kind.WEAK: ((_constant,), (_constant, _ring), (_constant, _log), (_constant, _hops)),
}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the law says of sizes.

    Attributes:
        num_units: the sizes, int64, (num_points,).
        step_ns: mean step time, float64, (num_points,).
        low_ns, high_ns: 95 % interval for the mean step time of one more run, float64, (num_points,).
        parts_ns: of each term, float64, (num_points,), by name; `total` alone where parts are not known.
        draws_ns: the step time in each draw, float64, (num_draws, num_points).
        rests_on: what it rests on, a clause each.
        backtest: relative error of the largest size as predicted from the others, and how many times larger it is; None
            with too few sizes.
        misfit: relative error of the law at the largest size, which it was fitted to.
    """

    num_units: NDArray[np.int64]
    step_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    parts_ns: dict[str, FloatArray]
    draws_ns: FloatArray
    rests_on: tuple[str, ...]
    backtest: tuple[float, float] | None
    misfit: float


@dataclass(frozen=True)
class _Fit:
    """Draws of one term at the sizes asked for, float64, (num_draws, num_points)."""

    draws: FloatArray
    words: str = ""
    notes: list[str] = field(default_factory=list)


def obstacle(series: Series) -> str:
    """Return why a series has no law; empty where it has one."""
    if len(series.sizes) < LEAST_SIZES:
        return f"{len(series.sizes)} sizes were measured, a law needs {LEAST_SIZES}"
    if series.kind is Kind.UNKNOWN:
        return f"neither weak nor strong scaling: {series.why}"
    if any(size.mean("step_ns") is None for size in series.sizes):
        return "the step time of a size is not known: add its batch to its throughput"
    return ""


def predict(series: Series, num_units: Sequence[int], *, probe: ProbeRecord | None = None, seed: int = 0) -> Predicted:
    """Return what the law says of some sizes.

    Args:
        series: without an `obstacle`.
        num_units: at most 4 times the largest size, ascending.
        probe: measured latencies and rates of the operations.
        seed: of the bootstrap.
    """
    last = series.sizes[-1]
    targets = np.asarray(num_units, np.float64)
    generator = np.random.default_rng(seed)
    fitted, rests_on = _terms(series, np.append(targets, last.num_units), generator, probe)
    misfit = float(np.median(_sum(fitted)[:, -1])) / (last.mean("step_ns") or 1.0) - 1
    if abs(misfit) > PRIOR_ERROR:
        rests_on += (
            f"the law is {100 * misfit:+.1f} % off at {last.num_units} {series.unit}s, which it was fitted to",
        )
    parts = {name: values[:, :-1] for name, values in fitted.items()}
    draws_ns = np.sum(list(parts.values()), axis=0)
    center_ns = np.median(draws_ns, axis=0)
    backtest = _backtest(series, seed) if len(series.sizes) >= _LEAST_GROWING else None
    run_cv = float(np.mean([size.run_cv for size in series.sizes]))
    spread = np.full(len(targets), run_cv)
    # An error made over one step of sizes is made again over each further one.
    error, step = backtest or (PRIOR_ERROR_OF_TOTAL if "total" in parts else PRIOR_ERROR, 2.0)
    reach = np.maximum(np.log(targets / last.num_units), 0.0)
    # So is that of a law that already misses the largest size.
    # Less than a doubling is too short a way to tell the error of a law from the noise of two runs.
    for_each = max(abs(error) / np.log(max(step, 2.0)), abs(misfit) / np.log(2))
    spread = np.minimum(np.hypot(spread, for_each * reach), _MOST_SPREAD)
    noisy = draws_ns * np.exp(spread * generator.standard_normal(draws_ns.shape))
    low_ns, high_ns = np.quantile(noisy, (0.025, 0.975), axis=0)
    return Predicted(
        num_units=np.asarray(num_units, np.int64),
        step_ns=center_ns,
        low_ns=np.minimum(low_ns, center_ns),
        high_ns=np.maximum(high_ns, center_ns),
        parts_ns={name: np.median(values, axis=0) for name, values in parts.items()},
        draws_ns=draws_ns,
        rests_on=rests_on,
        backtest=backtest,
        misfit=misfit,
    )


def _backtest(series: Series, seed: int) -> tuple[float, float] | None:
    shorter, largest = series.without_largest(), series.sizes[-1]
    measured = largest.mean("step_ns")
    if measured is None:
        return None
    center = float(
        np.median(_sum(_terms(shorter, np.array([float(largest.num_units)]), np.random.default_rng(seed))[0]))
    )
    return center / measured - 1, largest.num_units / shorter.sizes[-1].num_units


def _sum(parts: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(np.sum(list(parts.values()), axis=0))


def _terms(
    series: Series, targets: FloatArray, generator: np.random.Generator, probe: ProbeRecord | None = None
) -> tuple[dict[str, FloatArray], tuple[str, ...]]:
    """Return draws of each term at the targets, and what they rest on."""
    found = [size.parts_ns for size in series.sizes]
    n = np.array([size.num_units for size in series.sizes], np.float64)
    errors = np.array([size.error for size in series.sizes])
    if any(parts is None for parts in found):
        steps = np.array([size.mean("step_ns") for size in series.sizes], np.float64)
        total, words = _drawn(n, steps, errors, _TOTAL[series.kind], targets, generator)
        return {"total": total}, (f"step times at {len(n)} sizes alone: {words}",)
    values = {name: np.array([parts[name] for parts in found if parts is not None]) for name in (found[0] or {})}
    of_work_errors, errors = np.hypot(errors, _WORK_ERROR), np.hypot(errors, _PART_ERROR)
    floor_ns = _FLOOR * float(np.sum(list(values.values()), axis=0).min())
    work, of_work = _drawn(n, values["work"], of_work_errors, _WORK[series.kind], targets, generator, floor_ns)
    ranks = _ranks_per_unit(series)
    is_alone = ranks * n[0] <= 1
    transfer, of_transfer = _drawn(
        n * ranks,
        values["transfer"],
        errors,
        _TRANSFER if is_alone or values["transfer"][0] < floor_ns else _TRANSFER_ON_ONE,
        targets * ranks,
        generator,
        floor_ns,
    )
    if probe is not None and (probed := _probed(series, targets, probe)) is not None:
        # Half of the draws, so that the interval has both where they part.
        factor = np.exp(errors[-1] * generator.standard_normal((_NUM_DRAWS // 2, 1)))
        transfer[: _NUM_DRAWS // 2] = probed[0] * factor
        of_transfer = f"{of_transfer}, and {probed[1]}"
    other, _ = _drawn(n, values["other"], errors, _OTHER, targets, generator, floor_ns)
    growth, of_growth = _waiting_growth(series, targets, generator)
    last = series.sizes[-1]
    noise = np.exp(errors[-1] * generator.standard_normal((_NUM_DRAWS, 1)))
    with_work = (work / np.maximum(values["work"][-1], _TINY)) ** _exponents(series, generator)
    lasting = values["imbalance"][-1] * noise * work / np.maximum(values["work"][-1], _TINY)
    jitter = np.maximum((values["imbalance"][-1] + values["jitter"][-1]) * noise * growth * with_work - lasting, 0.0)
    terms = {"work": work, "imbalance": lasting, "jitter": jitter, "transfer": transfer, "other": other}
    return terms, (
        f"own work at {len(n)} sizes: {of_work}",
        f"jitter: {of_growth} on {last.num_units} {series.unit}s",
        f"transfer at {len(n)} sizes: {of_transfer}",
    )


def _probed(series: Series, targets: FloatArray, probe: ProbeRecord) -> tuple[FloatArray, str] | None:
    """Return the transfer at the targets by the laws of a probe, and their form; None where it lacks these calls."""
    last = series.sizes[-1]
    parts, calls = last.parts_ns, last.samples[0].calls
    if parts is None or series.unit != "node" or last.num_units < 2:
        return None
    term = transfer_term(probe.laws, calls, num_nodes=last.num_units, transfer_ns=parts["transfer"])
    if term is None:
        return None
    grown = extrapolated_transfer(term, last.num_units, targets.astype(np.int64))
    return grown, f"as a {term.algorithm} by the probe of {len(probe.hosts)} hosts"


def _ranks_per_unit(series: Series) -> float:
    last = series.sizes[-1]
    return max(last.num_ranks, last.num_units) / last.num_units if series.unit == "node" else 1.0


def _drawn(
    n: FloatArray,
    values: FloatArray,
    errors: FloatArray,
    candidates: Candidates,
    targets: FloatArray,
    generator: np.random.Generator,
    floor: float = 0.0,
) -> tuple[FloatArray, str]:
    """Return draws of a term at the targets, (num_draws, num_points), and its form in words.

    Args:
        n: sizes, (num_sizes,).
        values: of the term, (num_sizes,).
        errors: relative, (num_sizes,).
        candidates: functions of which the term may consist.
        targets: sizes asked for, (num_points,).
        generator: of the bootstrap.
        floor: smallest error that counts, in the unit of the values.
    """
    sigma = np.maximum(values * errors, max(floor, float(values.max(initial=0.0)) * 1e-6, _TINY))
    usable = [
        basis
        for basis in candidates
        if len(basis) <= (3 if len(n) >= _LEAST_GROWING else 2) and _is_determined(basis, n)
    ] or [candidates[0]]
    fits = [_fitted(basis, n, values, sigma) for basis in usable]
    scores = np.array([error + len(basis) * np.log(len(n)) for basis, (_, error) in zip(usable, fits, strict=True)])
    weights = np.exp(-0.5 * (scores - scores.min()))
    chosen = generator.choice(len(usable), size=_NUM_DRAWS, p=weights / weights.sum())
    draws = np.empty((_NUM_DRAWS, len(targets)))
    for row, which in enumerate(chosen.tolist()):
        noisy = values + sigma * generator.standard_normal(len(n))
        coefficients, _ = _fitted(usable[which], n, noisy, sigma)
        draws[row] = _evaluated(usable[which], coefficients, targets)
    best = int(weights.argmax())
    return draws, _words(usable[best], fits[best][0])


def _is_determined(basis: Sequence[Basis], n: FloatArray) -> bool:
    return bool(np.linalg.matrix_rank(np.column_stack([one(n) for one in basis])) == len(basis))


def _fitted(basis: Sequence[Basis], n: FloatArray, values: FloatArray, sigma: FloatArray) -> tuple[FloatArray, float]:
    """Return the coefficients, and the sum of squared errors in units of sigma."""
    from scipy.optimize import nnls  # takes longer to load than all that it does here

    matrix = np.column_stack([one(n) for one in basis]) / sigma[:, np.newaxis]
    coefficients, norm = nnls(matrix, values / sigma)
    return np.asarray(coefficients), float(norm) ** 2


def _evaluated(basis: Sequence[Basis], coefficients: FloatArray, n: FloatArray) -> FloatArray:
    return np.asarray(np.column_stack([one(n) for one in basis]) @ coefficients)


_NAMES: dict[Basis, str] = {
    _constant: "constant",
    _shared: "1/n",
    _ring: "(n - 1)/n, as a ring",
    _hops: "n - 1, as hops",
    _log: "log n, as a tree",
}


def _words(basis: Sequence[Basis], coefficients: FloatArray) -> str:
    found = dict(zip(basis, coefficients.tolist(), strict=True))
    words = " + ".join(_NAMES[one] for one, value in found.items() if value > 0) or "nothing"
    serial, shared = found.get(_constant, 0.0), found.get(_shared, 0.0)
    # Of the work that does not grow with n (Amdahl 1967): what remains of it with any number of units.
    return (
        f"{words}, serial share {percent(serial / (serial + shared))}"
        if _shared in found and serial + shared
        else words
    )


def _waiting_growth(series: Series, targets: FloatArray, generator: np.random.Generator) -> tuple[FloatArray, str]:
    """Return by which factor waiting is larger than on the largest size, (num_draws, num_points).

    From the generalised Pareto tails of the largest size where they are known, else from its own A(k): between a
    logarithm, as of exponential tails, and the power of its upper half.
    """
    last = series.sizes[-1]
    ratio = targets / last.num_units
    predicted = [sample.predictions for sample in last.samples if len(sample.predictions) > 1]
    if predicted and series.unit == "node":
        return _by_tails(predicted[0], targets, generator), "tails of the work"
    curves = [sample.growth for sample in last.samples if len(sample.growth) > 2]
    if not curves:
        exponent = generator.uniform(0.0, 1.0, (_NUM_DRAWS, 1))
        return ratio**exponent, "not known, between none and in proportion"
    k = np.array([point[0] for point in curves[0]], np.float64)
    excess = np.mean([[value - 1 for _, value in curve] for curve in curves if len(curve) == len(k)], axis=0)
    upper = slice(len(k) // 2, None)
    is_growing = (excess[upper] > 0).all() and len(k[upper]) > 1
    slope = float(np.clip(np.polyfit(np.log(k[upper]), np.log(excess[upper]), 1)[0], 0.0, 1.0)) if is_growing else 0.0
    logarithmic = 1 + np.log(ratio) / max(float(np.log(k[-1])), 1.0)
    share = generator.uniform(0.0, 1.0, (_NUM_DRAWS, 1))
    return share * ratio**slope + (1 - share) * logarithmic, f"A(k) with exponent {slope:.2f}"


def _by_tails(
    points: tuple[tuple[int, float, float, float], ...], targets: FloatArray, generator: np.random.Generator
) -> FloatArray:
    nodes = np.log([point[0] for point in points])
    loss, low, high = (np.array([point[column] for point in points]) for column in (1, 2, 3))
    present = max(float(loss[0]), _TINY)
    normal = generator.standard_normal((_NUM_DRAWS, 1))
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
    if len(points) < _LEAST_POINTS or np.ptp(work) < np.log(2):
        return generator.uniform(0.0, 1.0, (_NUM_DRAWS, 1))
    loss = np.log([point[1] for point in points])
    center = work - work.mean()
    slope = float(center @ loss / (center @ center))
    rest = loss - loss.mean() - slope * center
    error = float(np.sqrt(rest @ rest / max(len(points) - 2, 1) / (center @ center)))
    return np.asarray(np.clip(slope + error * generator.standard_normal((_NUM_DRAWS, 1)), 0.0, 1.0))


def parts_at(size: Size) -> dict[str, float]:
    """Return the parts of a measured size; `total` alone where they are not known."""
    return dict(size.parts_ns or {"total": size.mean("step_ns") or 0.0})
