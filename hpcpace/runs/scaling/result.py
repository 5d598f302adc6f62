"""How a job scales: the law of a series, its knee, figures of each size, what stops it, and larger sizes.

The law is T(n) = work + waiting + transfer + other. Which functions a term consists of is left open where the data
leave it open, see `hpcpace.runs.scaling.forms`. So an interval has the noise of the runs and the doubt about the form.
From the knee on, doubling the size does not pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import CannotTell, with_reasons
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, plural
from hpcpace.metrics.growth import extrapolated_transfer
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
from hpcpace.runs.scaling.samples import PARTS, Sample
from hpcpace.runs.scaling.sizes import ScalingKind, Series, series_of

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
    ScalingKind.STRONG: sums(
        "constant + shared, constant + shared + log, constant + shared + root, constant + shared + hops"
    ),
    ScalingKind.WEAK: sums("constant, constant + log, constant + root, constant + hops"),
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
    ScalingKind.STRONG: sums(
        "constant + shared, shared + log, shared + ring, constant + shared + log, constant + shared + root, "
        "constant + shared + hops"
    ),
    ScalingKind.WEAK: sums(
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
    if series.kind is ScalingKind.UNKNOWN:
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
    if series.kind is ScalingKind.UNKNOWN:
        return None
    units = np.array([size.num_units for size in series.sizes], np.float64)
    errors = np.array([size.error for size in series.sizes])
    noise = np.random.default_rng(0).standard_normal((NUM_DRAWS, len(units)))
    drawn = speeds * np.exp(errors * noise)
    found = _first_knee(units, speeds, drawn, is_measured=True)
    if found is None or found.num_units is not None or predicted is None:
        return found
    later = predicted.num_units.astype(np.float64)
    work = later if series.kind is ScalingKind.WEAK else np.ones_like(later)
    scale = speeds[-1] / (
        (units[-1] if series.kind is ScalingKind.WEAK else 1) / (series.sizes[-1].mean("step_ns") or 1.0)
    )
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


SCHEMA = "hpcpace-scale/1"
IDEAL = 0.95
"""Scaling factor from which on a size counts as ideal."""
_MIN_FLAT, _MAX_FLAT = 0.5, 1.1
"""Throughput over that of the smallest size between which it may be that of one GPU: an efficiency seen in practice."""
_SUPER_LINEAR = 1.05
"""Scaling factor from which on a size is remarked on: less is within what clocks and temperatures do."""
_MIN_LOST = 0.03  # of the step, below which nothing is said to stop a job


class Band(StrEnum):
    """How a size compares with one unit, as the bands of the nano-cluster study."""

    IDEAL = "ideal"
    OVERHEAD = "overhead"
    DETRIMENTAL = "detrimental"


@dataclass(frozen=True, kw_only=True)
class SizeFigures:
    """One size; shares and times are means over its repeats.

    Attributes:
        num_units, num_ranks: its size; ranks 0 where unknown.
        runs: names of the repeats.
        samples_per_s: throughput; None where it is not known.
        speedup: relative to the smallest size, with the ends of its 95 % interval.
        scaling_factor: S_n, throughput over that of as many smallest sizes, with its interval.
        further_gain: what each unit beyond the size before gives, as a share of what one gives there; None of the
            smallest.
        band: ideal, overhead or detrimental.
        step_ns, cv, busy, wait, transfer: None where unknown.
        parts_ns: by name of part; empty where not known.
        run_cv: relative variation from run to run, measured or the prior.
    """

    num_units: int
    num_ranks: int
    runs: tuple[str, ...]
    samples_per_s: float | None
    speedup: float
    speedup_interval: tuple[float, float]
    scaling_factor: float
    scaling_interval: tuple[float, float]
    further_gain: float | None
    band: Band
    step_ns: float | None
    cv: float | None
    busy: float | None
    wait: float | None
    transfer: float | None
    parts_ns: dict[str, float]
    run_cv: float


@dataclass(frozen=True, kw_only=True)
class ScalingLoss:
    """What a job loses at its largest size, compared with the smallest one.

    Attributes:
        part: the part with the largest loss; empty where nothing is lost.
        lost: share of the step that each part costs beyond its ideal, by name.
    """

    part: str
    lost: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PredictedSize:
    """One size that was not measured; times as of `Predicted`, speedup and its interval relative to the smallest."""

    num_units: int
    factor: int
    step_ns: float
    step_interval_ns: tuple[float, float]
    speedup: float
    speedup_interval: tuple[float, float]
    scaling_factor: float
    parts_ns: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """All that is known of a series.

    Attributes:
        unit, kind, why: as of `Series`.
        sample_unit: what throughput counts.
        sizes: ascending.
        knee: None where no size was measured together with twice that size, or how the work grows is not known.
        stop: None where there are no parts.
        predictions: at 2 and 4 times the largest size; empty where there is no law.
        rests_on: what the law rests on, a clause each.
        backtest: relative error with which the law of the smaller sizes predicts the largest one; None without that.
        no_law: why there is no law; empty where there is one.
        no_parts: why the parts of the step are not known; empty where they are.
        left_out: runs that are not in it, and why, a sentence each.
        remarks: what is remarkable about the sizes, a sentence each.
        is_overlap_known: whether all runs say which of their transfers are hidden behind work.
    """

    unit: str
    kind: ScalingKind
    why: str
    sample_unit: str
    sizes: tuple[SizeFigures, ...]
    knee: Knee | None
    stop: ScalingLoss | None
    predictions: tuple[PredictedSize, ...]
    rests_on: tuple[str, ...]
    backtest: float | None
    no_law: str
    no_parts: str
    left_out: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    is_overlap_known: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def scaling_of(
    samples: Sequence[Sample], *, kind: ScalingKind | None = None, probe: ProbeRecord | None = None
) -> Scaling:
    """Return what runs of several sizes say together.

    Args:
        samples: the runs, at least one.
        kind: how the work grows, where the user says so.
        probe: measured latencies and rates of the operations.

    Raises:
        UsageError: the runs count different things, or have no size.
        CannotTell: they have one size only, or the speed of a size is not known.
    """
    series = series_of(samples, kind=kind)
    if len(series.sizes) < 2:
        of = plural(series.sizes[0].num_units, series.unit)
        raise CannotTell(with_reasons(f"all runs are of one size, {of}: add runs of other sizes", series.left_out))
    speeds = _speeds(series)
    _ask_what_a_rate_is_of(series, speeds)
    no_law = obstacle(series) or series.doubt
    factors = (2, MAX_FACTOR)
    largest = series.sizes[-1].num_units
    predicted = None if no_law else predict(series, [factor * largest for factor in factors], probe=probe)
    if predicted is not None and abs(predicted.misfit) > MAX_MISFIT:
        no_law = (
            f"no law fits these sizes: the closest one is {100 * predicted.misfit:+.0f} % off at {largest} "
            f"{series.unit}s, which it was fitted to"
        )
        predicted = None
    if predicted is not None and not predicted.low_ns.all():
        no_law, predicted = "no law fits these sizes: by the closest one, larger sizes may take no time", None
    unknown = (sample.unknown for size in series.sizes for sample in size.samples)
    sizes = tuple(_size_figures(series, speeds, row) for row in range(len(series.sizes)))
    return Scaling(
        unit=series.unit,
        kind=series.kind,
        why=series.why,
        sample_unit=series.sizes[0].samples[0].unit,
        sizes=sizes,
        knee=knee_of(series, speeds, predicted),
        stop=_stop(series),
        predictions=() if predicted is None else _predictions(series, speeds, predicted, factors),
        rests_on=() if predicted is None else predicted.rests_on,
        backtest=None if predicted is None or predicted.backtest is None else predicted.backtest[0],
        no_law=no_law,
        no_parts="" if _has_parts(series) else next(filter(None, unknown), "they are not recorded"),
        left_out=series.left_out,
        remarks=tuple(_super_linear(sizes, series.unit)),
        is_overlap_known=_has_parts(series) and phases_of(series) is not None,
    )


def _ask_what_a_rate_is_of(series: Series, speeds: NDArray[np.float64]) -> None:
    """Refuse to judge a throughput that stays the same at all sizes, if it may be that of one GPU.

    Raises:
        CannotTell: it stays the same, and nothing says what it is of.
    """
    first, last = series.sizes[0], series.sizes[-1]
    if not all(sample.is_rate_assumed for size in series.sizes for sample in size.samples):
        return
    ratios = speeds / speeds[0]
    if ratios.min() < _MIN_FLAT or ratios.max() > _MAX_FLAT:
        return
    total = ratios[-1] * first.num_units / last.num_units
    raise CannotTell(
        f"the throughput hardly changes from {first.num_units} to {plural(last.num_units, series.unit)} "
        f"({speeds[0]:.6g} to {speeds[-1]:.6g}), and its column does not say what it is of: if of one GPU, the scaling "
        f"factor is {ratios[-1]:.2f} (--throughput gpu); if of all ranks together, {total:.2f} (--throughput total)"
    )


def _super_linear(sizes: Sequence[SizeFigures], unit: str) -> Iterator[str]:
    """Yield what is remarkable about sizes that scale better than they should be able to."""
    for size in sizes[1:]:
        if size.scaling_factor >= _SUPER_LINEAR and size.scaling_interval[0] > 1:
            yield (
                f"{plural(size.num_units, unit)} are super-linear (scaling factor {size.scaling_factor:.2f}): did the "
                f"smallest size run at its best (warm-up, memory, swapping), with the same batch of a {unit}, and is "
                "throughput counted in the same way? Shares that fit into caches can be a reason, too"
            )
            return


def _has_parts(series: Series) -> bool:
    return all(size.parts_ns is not None for size in series.sizes)


def _speeds(series: Series) -> NDArray[np.float64]:
    """Return speeds that can be compared, (num_sizes,): throughput, or what a step time says of it.

    Raises:
        CannotTell: neither is known of all sizes.
    """
    rates = [size.mean("samples_per_s") for size in series.sizes]
    if None not in rates:
        return np.array(rates, np.float64)
    steps = [size.mean("step_ns") for size in series.sizes]
    if None in steps:
        raise CannotTell(
            "the speeds of these runs cannot be compared: some have a throughput alone and some a step time alone, add "
            "their batches"
        )
    if series.kind is ScalingKind.UNKNOWN:
        raise CannotTell(
            "the speeds of these runs cannot be compared: without their throughput, step times need the batch, or "
            "--scaling weak or --scaling strong"
        )
    work = [size.num_units if series.kind is ScalingKind.WEAK else 1 for size in series.sizes]
    return np.array(work) / np.array(steps, np.float64) * 1e9


def _size_figures(series: Series, speeds: NDArray[np.float64], row: int) -> SizeFigures:
    size, first = series.sizes[row], series.sizes[0]
    ratio = size.num_units / first.num_units
    speedup = float(speeds[row] / speeds[0])
    half = size.half_width(first) if row else 0.0
    interval = (speedup * float(np.exp(-half)), speedup * float(np.exp(half)))
    factor = float(speeds[row]) / (size.num_units * (float(speeds[0]) / first.num_units))  # R_n / (n R_1)
    further = None
    if row:
        before = series.sizes[row - 1].num_units
        further = float(speeds[row] / speeds[row - 1] - 1) / (size.num_units / before - 1)
    return SizeFigures(
        num_units=size.num_units,
        num_ranks=size.num_ranks,
        runs=tuple(sample.name for sample in size.samples),
        samples_per_s=size.mean("samples_per_s"),
        speedup=speedup,
        speedup_interval=interval,
        scaling_factor=factor,
        scaling_interval=(interval[0] / ratio, interval[1] / ratio),
        further_gain=further,
        band=band(factor, ratio),
        step_ns=size.mean("step_ns"),
        cv=size.mean("cv"),
        busy=size.mean("busy"),
        wait=size.mean("wait"),
        transfer=size.mean("transfer"),
        parts_ns={} if size.parts_ns is None else dict(size.parts_ns),
        run_cv=size.run_cv,
    )


def band(factor: float, ratio: float) -> Band:
    """Return the band of a scaling factor: detrimental is slower than the smallest size.

    Factor and speedup count as they are printed, to two digits.

    Args:
        factor: S_n.
        ratio: how many times the smallest size it is.
    """
    if round(factor, 2) >= IDEAL:
        return Band.IDEAL
    return Band.OVERHEAD if round(factor * ratio, 2) >= 1 else Band.DETRIMENTAL


def _stop(series: Series) -> ScalingLoss | None:
    """Return what the largest size loses compared with the smallest one, part by part; None where parts are not known.

    Ideally each part of the smallest size is divided among the units in strong scaling, and stays as it is in weak
    scaling. What a slower rank does beyond the work of the fastest one is lost to imbalance, and not to work.
    """
    if not _has_parts(series) or series.kind is ScalingKind.UNKNOWN:
        return None
    first, last = series.sizes[0], series.sizes[-1]
    ideal = first.num_units / last.num_units if series.kind is ScalingKind.STRONG else 1.0
    before, now = parts_of_all(first), parts_of_all(last)
    step_ns = last.mean("step_ns") or 1.0
    lost = {name: (now[name] - ideal * before[name]) / step_ns for name in now}
    part = max(lost, key=lambda name: lost[name])
    return ScalingLoss(part=part if lost[part] >= _MIN_LOST else "", lost=lost)


def _predictions(
    series: Series, speeds: NDArray[np.float64], predicted: Predicted, factors: Sequence[int]
) -> tuple[PredictedSize, ...]:
    first, last = series.sizes[0], series.sizes[-1]
    found = []
    for column, factor in enumerate(factors):
        count = int(predicted.num_units[column])
        grown = factor if series.kind is ScalingKind.WEAK else 1
        step_ns = last.mean("step_ns") or 1.0
        times = [float(values[column]) for values in (predicted.step_ns, predicted.low_ns, predicted.high_ns)]
        speedup, high, low = (float(speeds[-1] / speeds[0]) * grown * step_ns / time for time in times)
        found.append(
            PredictedSize(
                num_units=count,
                factor=factor,
                step_ns=times[0],
                step_interval_ns=(times[1], times[2]),
                speedup=speedup,
                speedup_interval=(low, high),
                scaling_factor=speedup * first.num_units / count,
                parts_ns={name: float(values[column]) for name, values in predicted.parts_ns.items()},
            )
        )
    return tuple(found)


def stop_words(part: str, kind: ScalingKind) -> str:
    """Return what stops a job, in words."""
    if part == "work":
        return (
            "own work that does not shrink (serial share)"
            if kind is ScalingKind.STRONG
            else "own work that grows with size"
        )
    return {
        "imbalance": "ranks that are slower in every step (imbalance)",
        "jitter": "waiting for whoever is late in a step (jitter)",
        "transfer": "transfer",
        "other": "what is neither work, waiting nor transfer (checkpoints, evaluation, pacing)",
    }.get(part, "")


COLUMNS = (
    *("units", "unit", "ranks", "runs", "is_predicted", "samples_per_s", "speedup", "speedup_low", "speedup_high"),
    *("scaling_factor", "scaling_factor_low", "scaling_factor_high", "further_gain", "band"),
    *("step_ms", "step_ms_low", "step_ms_high", "cv", "busy", "wait", "transfer"),
    *(f"{name}_ms" for name in PARTS),
)


def rows_of(scaling: Scaling) -> Iterator[list[Any]]:
    """Yield the rows below `COLUMNS`."""
    for size in scaling.sizes:
        yield _measured(size, scaling.unit)
    for predicted in scaling.predictions:
        yield _predicted(predicted, scaling)


def _measured(size: SizeFigures, unit: str) -> list[Any]:
    return [
        *(size.num_units, unit, size.num_ranks or None, len(size.runs), 0, size.samples_per_s),
        *(size.speedup, *size.speedup_interval, size.scaling_factor, *size.scaling_interval),
        *(size.further_gain, str(size.band), _ms(size.step_ns), None, None),
        *(size.cv, size.busy, size.wait, size.transfer),
        *(_ms(size.parts_ns.get(name)) for name in PARTS),
    ]


def _predicted(size: PredictedSize, scaling: Scaling) -> list[Any]:
    ratio = size.num_units / scaling.sizes[0].num_units
    low, high = size.speedup_interval
    rate = scaling.sizes[0].samples_per_s
    return [
        *(size.num_units, scaling.unit, None, 0, 1, None if rate is None else rate * size.speedup),
        *(size.speedup, low, high, size.scaling_factor, low / ratio, high / ratio),
        *(None, "", _ms(size.step_ns), *map(_ms, size.step_interval_ns)),
        *(None, None, None, None),
        *(_ms(size.parts_ns.get(name)) for name in PARTS),
    ]


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS
