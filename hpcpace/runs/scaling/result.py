"""The result of a scaling series: figures of each size, what stops it, and larger sizes."""

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
from hpcpace.probe.record import ProbeRecord
from hpcpace.runs.scaling.forms import parts_of_all, phases_of
from hpcpace.runs.scaling.law import MAX_FACTOR, MAX_MISFIT, Knee, Predicted, knee_of, obstacle, predict
from hpcpace.runs.scaling.samples import PARTS, Sample
from hpcpace.runs.scaling.sizes import Kind, Series, series_of

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
class Stop:
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
    kind: Kind
    why: str
    sample_unit: str
    sizes: tuple[SizeFigures, ...]
    knee: Knee | None
    stop: Stop | None
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


def scaling_of(samples: Sequence[Sample], *, kind: Kind | None = None, probe: ProbeRecord | None = None) -> Scaling:
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
    if series.kind is Kind.UNKNOWN:
        raise CannotTell(
            "the speeds of these runs cannot be compared: without their throughput, step times need the batch, or "
            "--scaling weak or --scaling strong"
        )
    work = [size.num_units if series.kind is Kind.WEAK else 1 for size in series.sizes]
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


def _stop(series: Series) -> Stop | None:
    """Return what the largest size loses compared with the smallest one, part by part; None where parts are not known.

    Ideally each part of the smallest size is divided among the units in strong scaling, and stays as it is in weak
    scaling. What a slower rank does beyond the work of the fastest one is lost to imbalance, and not to work.
    """
    if not _has_parts(series) or series.kind is Kind.UNKNOWN:
        return None
    first, last = series.sizes[0], series.sizes[-1]
    ideal = first.num_units / last.num_units if series.kind is Kind.STRONG else 1.0
    before, now = parts_of_all(first), parts_of_all(last)
    step_ns = last.mean("step_ns") or 1.0
    lost = {name: (now[name] - ideal * before[name]) / step_ns for name in now}
    part = max(lost, key=lambda name: lost[name])
    return Stop(part=part if lost[part] >= _MIN_LOST else "", lost=lost)


def _predictions(
    series: Series, speeds: NDArray[np.float64], predicted: Predicted, factors: Sequence[int]
) -> tuple[PredictedSize, ...]:
    first, last = series.sizes[0], series.sizes[-1]
    found = []
    for column, factor in enumerate(factors):
        count = int(predicted.num_units[column])
        grown = factor if series.kind is Kind.WEAK else 1
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


def stop_words(part: str, kind: Kind) -> str:
    """Return what stops a job, in words."""
    if part == "work":
        return (
            "own work that does not shrink (serial share)" if kind is Kind.STRONG else "own work that grows with size"
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
