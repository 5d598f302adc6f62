"""The law of a scaling series, T(n) = work + waiting + transfer + other, and its knee.

Which functions a term consists of is left open where the data leave it open, see `hpcpace.runs.scaling.forms`. So an
interval has the noise of the runs and the doubt about the form. From the knee on, doubling the size does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import plural
from hpcpace.metrics.extrapolation import extrapolated_transfer
from hpcpace.metrics.special import ENDS_95
from hpcpace.probe.laws import no_law_of, transfer_term
from hpcpace.probe.record import ProbeRecord
from hpcpace.runs.scaling.forms import (
    NUM_DRAWS,
    TINY,
    FloatArray,
    drawn,
    exposed,
    parts_at,
    parts_of_all,
    phases_of,
    rest_of,
    sums,
    waiting,
    words_of,
)
from hpcpace.runs.scaling.sizes import Kind, Series

MAX_MISFIT = 0.25
"""Relative error at the largest measured size beyond which a law describes nothing."""
MAX_FACTOR = 4
"""Beyond this many times the largest size nothing is predicted."""
MIN_SIZES = 2
PRIOR_ERROR, PRIOR_ERROR_OF_TOTAL = 0.03, 0.1
"""Relative error of a law for each doubling beyond the largest size, where too few sizes were measured to see it.

The second one is of laws of the step time alone (docs/scale.md#how-far-to-trust-it)."""
# Relative error of parts of the step: to which one a nanosecond belongs is not always clear.
_WORK_ERROR, _PART_ERROR = 0.01, 0.05
_FLOOR = 0.003  # of the shortest step, below which a part is noise
_MIN_TO_HOLD_OUT = 4  # sizes for the largest to be held out
_MAX_SPREAD = 50.0  # of the logarithm of a step time, beyond which nothing is known of it


_OF_WORK = {
    Kind.STRONG: sums("constant + shared, constant + shared + log, constant + shared + root, constant + shared + hops"),
    Kind.WEAK: sums("constant, constant + log, constant + root, constant + hops"),
}
# Ring: B (n - 1) / n + latency (n - 1). Tree: in proportion to log2 n (Thakur, Rabenseifner & Gropp 2005, section 4).
_TRANSFER = sums("several, ring, log, root, hops, ring + hops, log + hops")
# Among several ranks of a node there is a transfer without another node, and each of these over ranks is one over nodes
# beside a constant.
_TRANSFER_ON_ONE = sums(
    "constant, constant + ring, constant + log, constant + root, constant + hops, constant + ring + hops"
)
_OTHER = sums("constant, constant + log, constant + root, constant + hops")
_TOTAL = {
    Kind.STRONG: sums(
        "constant + shared, shared + log, shared + ring, constant + shared + log, constant + shared + root, "
        "constant + shared + hops"
    ),
    Kind.WEAK: sums(
        "constant, constant + several, constant + ring, constant + log, constant + root, constant + hops, "
        "constant + ring + hops"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the law says of sizes.

    Attributes:
        num_units: the sizes, int64, (num_points,).
        step_ns: mean step time, float64, (num_points,).
        low_ns, high_ns: 95 % interval for the mean step time of one more run, float64, (num_points,).
        parts_ns: of each term, float64, (num_points,), by name; `total` alone where parts are not known.
        draws_ns: the step time in each draw, with the error of the law, above 0, float64, (num_draws, num_points).
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


def obstacle(series: Series) -> str:
    """Return why a series has no law; empty where it has one."""
    if len(series.sizes) < MIN_SIZES:
        return f"{len(series.sizes)} sizes were measured, a law needs {MIN_SIZES}"
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
    parts, misfit, rests_on = _anchored(series, targets, generator, probe)
    if abs(misfit) > PRIOR_ERROR:
        rests_on += (
            f"the law is {100 * misfit:+.1f} % off at {last.num_units} {series.unit}s, which it was fitted to",
        )
    center_ns = np.median(_sum(parts), axis=0)
    backtest = _backtest(series, seed) if len(series.sizes) >= _MIN_TO_HOLD_OUT else None
    # An error made over one step of sizes is made again over each further one.
    error, step = backtest or (PRIOR_ERROR_OF_TOTAL if "total" in parts else PRIOR_ERROR, 2.0)
    reach = np.maximum(np.log(targets / last.num_units), 0.0)
    # So is that of a law that already misses the largest size.
    # Less than a doubling is too short a way to tell the error of a law from the noise of two runs.
    for_each = max(abs(error) / np.log(max(step, 2.0)), abs(misfit) / np.log(2))
    spread = np.clip(for_each * reach * generator.standard_normal((NUM_DRAWS, 1)), -_MAX_SPREAD, _MAX_SPREAD)
    draws_ns = _sum(parts) * np.exp(spread)
    run_cv = min(_run_cv(series), _MAX_SPREAD)
    noisy = draws_ns * np.exp(run_cv * generator.standard_normal(draws_ns.shape))
    low_ns, high_ns = np.quantile(noisy, ENDS_95, axis=0)
    return Predicted(
        num_units=np.asarray(num_units, np.int64),
        step_ns=center_ns,
        low_ns=np.minimum(low_ns, center_ns),
        high_ns=np.maximum(high_ns, center_ns),
        parts_ns={name: np.median(values, axis=0) for name, values in parts.items()},
        draws_ns=np.maximum(draws_ns, TINY),
        rests_on=rests_on,
        backtest=backtest,
        misfit=misfit,
    )


def _anchored(
    series: Series, targets: FloatArray, generator: np.random.Generator, probe: ProbeRecord | None = None
) -> tuple[dict[str, FloatArray], float, tuple[str, ...]]:
    """Return draws of each term that go on from the largest size, the error of the law there, and what they rest on.

    A term that misses the largest size by a factor r, with a measured error e, is multiplied by r to the power of
    1 - (e / ln r)^2, or not at all where that is below 0 (James & Stein 1961): noise is left to the law.
    """
    last = series.sizes[-1]
    step_ns = max(last.mean("step_ns") or 1.0, TINY)
    measured = {"total": step_ns, **parts_at(last)}
    fitted, rests_on = _terms(series, np.append(targets, last.num_units), generator, probe)
    misfit = float(np.median(_sum(fitted)[:, -1])) / step_ns - 1
    parts, has_hidden = {}, bool(phases_of(series))
    for name, draws in fitted.items():
        there, floor = float(np.median(draws[:, -1])), _FLOOR * step_ns
        missed = np.log(measured[name] / there) if min(measured[name], there) > floor else 0.0
        of_last = float(_errors(series)[-1])
        error = of_last if name == "total" else np.hypot(of_last, _WORK_ERROR if name == "work" else _PART_ERROR)
        kept = max(1 - (error / missed) ** 2, 0.0) if missed else 0.0
        if name == "transfer" and has_hidden:  # which grows faster than what is exposed now, and not in proportion
            parts[name] = np.maximum(draws[:, :-1] + kept * (measured[name] - there), 0.0)
        else:
            parts[name] = draws[:, :-1] * np.exp(missed * kept)
    return parts, misfit, rests_on


def _backtest(series: Series, seed: int) -> tuple[float, float] | None:
    shorter, largest = series.without_largest(), series.sizes[-1]
    measured = largest.mean("step_ns")
    if measured is None:
        return None
    parts, _, _ = _anchored(shorter, np.array([float(largest.num_units)]), np.random.default_rng(seed))
    return float(np.median(_sum(parts))) / measured - 1, largest.num_units / shorter.sizes[-1].num_units


def _sum(parts: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(np.sum(list(parts.values()), axis=0))


def _run_cv(series: Series) -> float:
    """Return the variation from run to run, relative, of all sizes together: few repeats say little of their own."""
    return float(np.sqrt(np.mean([size.run_cv**2 for size in series.sizes])))


def _errors(series: Series) -> FloatArray:
    """Return the relative errors of the mean steps, (num_sizes,): those of all sizes' variation, or their own ones."""
    of_all = _run_cv(series) / np.sqrt([len(size.samples) for size in series.sizes])
    return np.maximum(of_all, [size.error for size in series.sizes])


def _terms(
    series: Series, targets: FloatArray, generator: np.random.Generator, probe: ProbeRecord | None = None
) -> tuple[dict[str, FloatArray], tuple[str, ...]]:
    """Return draws of each term at the targets, and what they rest on."""
    found = [size.parts_ns for size in series.sizes]
    n = np.array([size.num_units for size in series.sizes], np.float64)
    errors = _errors(series)
    if any(parts is None for parts in found):
        steps = np.array([size.mean("step_ns") for size in series.sizes], np.float64)
        total, words = drawn(n, steps, errors, _TOTAL[series.kind], targets, generator)
        unused = () if probe is None else ("the probe is not used: how long transfers take is not known",)
        return {"total": total}, (f"step times at {len(n)} sizes alone: {words}", words_of(None, series), *unused)
    of_all = [parts_of_all(size) for size in series.sizes]
    values = {name: np.array([parts[name] for parts in of_all]) for name in of_all[0]}
    phases = phases_of(series)
    if phases:
        values["transfer"] = rest_of(series, phases)
    of_speeds, of_work_errors, errors = errors, np.hypot(errors, _WORK_ERROR), np.hypot(errors, _PART_ERROR)
    floor_ns = _FLOOR * float(np.sum(list(values.values()), axis=0).min())
    work, of_work = drawn(n, values["work"], of_work_errors, _OF_WORK[series.kind], targets, generator, floor_ns)
    is_alone = _ranks_per_unit(series) * n[0] <= 1
    on_one = _TRANSFER if is_alone or values["transfer"][0] < floor_ns else _TRANSFER_ON_ONE
    transfer, of_transfer = drawn(n, values["transfer"], errors, on_one, targets, generator, floor_ns)
    if probe is not None:
        grown, of_probe = _probed(series, targets, probe, float(values["transfer"][-1]))
        of_transfer = f"{of_transfer}, and {of_probe}"
        if grown is not None:
            # Half of the draws, so that the interval has both where they part.
            factor = np.exp(errors[-1] * generator.standard_normal((NUM_DRAWS // 2, 1)))
            transfer[: NUM_DRAWS // 2] = grown * factor
    relative = work / np.maximum(values["work"][-1], TINY)
    for one in phases or ():
        transfer += exposed(series, one, of_speeds, targets, relative, generator)
    other, _ = drawn(n, values["other"], errors, _OTHER, targets, generator, floor_ns)
    noise = np.exp(errors[-1] * generator.standard_normal((NUM_DRAWS, 1)))
    lasting, jitter, of_jitter = waiting(series, targets, relative, generator)
    # What slower ranks do beyond the fastest one is work of theirs in the mean, and waiting of the others.
    waited = parts_at(series.sizes[-1])["imbalance"] / max(values["imbalance"][-1], TINY)
    return {
        "work": work + lasting * (1 - waited) * noise,
        "imbalance": lasting * waited * noise,
        "jitter": jitter * noise,
        "transfer": transfer,
        "other": other,
    }, (
        f"own work at {len(n)} sizes: {of_work}",
        f"jitter: {of_jitter} on {series.sizes[-1].num_units} {series.unit}s",
        f"transfer at {len(n)} sizes: {of_transfer}",
        words_of(phases, series),
    )


def _probed(
    series: Series, targets: FloatArray, probe: ProbeRecord, transfer_ns: float
) -> tuple[FloatArray | None, str]:
    """Return the transfer at the targets by the laws of a probe, and their form; None where it lacks them, and why.

    Args:
        series, targets, probe: as of `predict`.
        transfer_ns: the transfer at the largest size, of which nothing is hidden.
    """
    last = series.sizes[-1]
    parts, calls = last.parts_ns, last.samples[0].calls
    if parts is None or series.unit != "node" or last.num_units < 2:
        return None, f"not by the probe: its laws are of several nodes, not of {plural(last.num_units, series.unit)}"
    term = transfer_term(probe.laws, calls, num_nodes=last.num_units, transfer_ns=transfer_ns)
    if term is None:
        return None, f"not by the probe: {no_law_of(probe.laws, [op for op, _, _ in calls], last.num_units)}"
    grown = extrapolated_transfer(term, last.num_units, targets.astype(np.int64))
    return grown, f"as a {term.algorithm} by the probe of {len(probe.hosts)} hosts"


def _ranks_per_unit(series: Series) -> float:
    last = series.sizes[-1]
    return max(last.num_ranks, last.num_units) / last.num_units if series.unit == "node" else 1.0


HALF = 0.5
"""Share of its ideal gain below which a doubling does not pay."""
_NUM_POINTS = 256


@dataclass(frozen=True, kw_only=True)
class Knee:
    """From where on doubling gives less than half of its ideal gain.

    Attributes:
        num_units: the least such size; None where there is none up to `searched`.
        low, high: its 95 % interval over repeats and laws; None where that end is beyond `searched`.
        searched: the largest size whose doubling was looked at.
        by_size: sizes up to `searched`, ascending, and how probable it is that the knee is there or before.
        is_measured: whether the doubled size was measured, and not predicted.
    """

    num_units: int | None
    low: int | None
    high: int | None
    searched: int
    is_measured: bool
    by_size: tuple[tuple[int, float], ...] = ()


def knee_of(series: Series, speeds: NDArray[np.float64], predicted: Predicted | None) -> Knee | None:
    """Return the knee among the measured sizes, or, where there is none, the one that the law expects.

    Sizes whose work neither stays the same nor grows with them have none: what a doubling gives there is of the work.
    """
    if series.kind is Kind.UNKNOWN:
        return None
    units = np.array([size.num_units for size in series.sizes], np.float64)
    errors = np.array([size.error for size in series.sizes])
    noise = np.random.default_rng(0).standard_normal((NUM_DRAWS, len(units)))
    drawn = speeds * np.exp(errors * noise)
    found = _first_knee(units, speeds, drawn, is_measured=True)
    if found is None or found.num_units is not None or predicted is None:
        return found
    later = predicted.num_units.astype(np.float64)
    work = later if series.kind is Kind.WEAK else np.ones_like(later)
    scale = speeds[-1] / ((units[-1] if series.kind is Kind.WEAK else 1) / (series.sizes[-1].mean("step_ns") or 1.0))
    all_units = np.concatenate([units, later])
    center = np.concatenate([speeds, work / predicted.step_ns * scale])
    draws = np.concatenate([drawn, (work / predicted.draws_ns * scale)], axis=1)
    return _first_knee(all_units, center, draws, is_measured=False) or found


def _first_knee(
    units: NDArray[np.float64], speeds: NDArray[np.float64], draws: NDArray[np.float64], *, is_measured: bool
) -> Knee | None:
    """Return the least size from which a doubling gives less than half of its ideal gain; None without a doubling."""
    searched = int(units[-1] // 2)
    if searched < units[0]:
        return None
    grid = np.unique(np.rint(np.geomspace(units[0], searched, _NUM_POINTS)))
    grid = np.unique(np.concatenate([grid, units[units <= searched]]))
    sizes = [_first_below(units, row, grid) for row in np.concatenate([speeds[np.newaxis], draws])]
    spread = np.sort([np.inf if size is None else size for size in sizes[1:]])
    low, high = (float(spread[round(share * (len(spread) - 1))]) for share in ENDS_95)
    return Knee(
        num_units=sizes[0],
        low=int(low) if np.isfinite(low) else None,
        high=int(high) if np.isfinite(high) else None,
        searched=searched,
        is_measured=is_measured,
        by_size=tuple((size, float((spread <= size).mean())) for size in _told_sizes(units, searched)),
    )


def _told_sizes(units: NDArray[np.float64], searched: int) -> list[int]:
    """Return the sizes of a series up to the largest one searched, and that one."""
    return sorted({searched, *(int(size) for size in units if size <= searched)})


def _first_below(units: NDArray[np.float64], speeds: NDArray[np.float64], grid: NDArray[np.float64]) -> int | None:
    """Return the first size of a grid whose doubling gains less than half; speeds are interpolated in logarithms."""
    at, values = np.log(units), np.log(speeds)
    gain = np.exp(np.interp(np.log(2 * grid), at, values) - np.interp(np.log(grid), at, values)) - 1
    below = np.flatnonzero(gain < HALF)
    return int(grid[below[0]]) if len(below) else None
