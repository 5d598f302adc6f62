"""Sizes of a scaling series: which runs are repeats of each other, which are left out, and how the work grows."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from hpcpace.core.errors import CannotTell, UsageError, with_reasons
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, first_few, listed, plural
from hpcpace.metrics.run_difference import (
    MIN_CV,
    MIN_REPEATS,
    PRIOR_CV,
    RunSpread,
    log_difference,
    spread_beyond_prior,
    spread_of_repeats,
)
from hpcpace.runs.compare import is_same_batch, usual_batches
from hpcpace.runs.scaling.samples import PARTS, Sample

_PRIOR = RunSpread(value=PRIOR_CV, freedom=math.inf)
_MAX_RATIO = 2.0
"""Repeats that differ by this factor or more are not the same thing measured again: one was written in another unit, or
for one rank instead of all."""
_MAX_ERROR = 0.25
"""Relative standard error from which on noise may take a time to nothing, at four times that."""
_MAX_TOLD = 3
_NONE_LEFT = "no run can be used"


class ScalingKind(StrEnum):
    """How the work grows with the size."""

    WEAK = "weak"
    STRONG = "strong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Size:
    """All repeats of one size.

    Attributes:
        num_units: nodes or ranks.
        samples: the repeats, at least one.
        spread: between runs, of the whole series.
    """

    num_units: int
    samples: tuple[Sample, ...]
    spread: RunSpread = _PRIOR

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the repeats; None where one lacks it."""
        values = [getattr(sample, name) for sample in self.samples]
        return None if None in values else float(np.mean(values))

    @property
    def num_ranks(self) -> int:
        """Its ranks, 0 where unknown."""
        return self.samples[0].num_ranks

    @property
    def parts_ns(self) -> Mapping[str, float] | None:
        """Means of the parts of a step; None where a repeat lacks them."""
        found = [sample.parts_ns for sample in self.samples]
        if None in found:
            return None
        return {name: float(np.mean([parts[name] for parts in found if parts is not None])) for name in PARTS}

    @property
    def batch(self) -> float:
        """Samples of a step: as the runs say, else their throughput times their step time; 0 where neither is known."""
        step_ns, rate = self.mean("step_ns"), self.mean("samples_per_s")
        return self.mean("batch") or (rate or 0.0) * (step_ns or 0.0) / NS_PER_S

    @property
    def has_repeats(self) -> bool:
        """Whether they say by themselves how much they differ."""
        return len(self.samples) >= MIN_REPEATS

    @property
    def log_times(self) -> list[float]:
        """Logarithms of the step times, or of times for a sample where step times are not known."""
        if self.mean("step_ns") is not None:
            return [math.log(sample.step_ns or math.nan) for sample in self.samples]
        return [-math.log(sample.samples_per_s or math.nan) for sample in self.samples]

    @property
    def run_cv(self) -> float:
        """Relative standard deviation from run to run: its own from three repeats on, else that of the series."""
        within = float(np.mean([sample.error for sample in self.samples]))
        if not self.has_repeats:
            return math.hypot(self.spread.value, within)
        return max(float(np.std(self.log_times, ddof=1)), within, MIN_CV)

    @property
    def error(self) -> float:
        """Relative standard error of its mean speed."""
        return self.run_cv / math.sqrt(len(self.samples))

    def half_width(self, other: Size) -> float:
        """Return half of the 95 % interval of the logarithm of its speed over that of another size."""
        errors = [[sample.error for sample in size.samples] for size in (other, self)]
        return log_difference(
            other.log_times,
            self.log_times,
            before_errors=errors[0],
            after_errors=errors[1],
            spread=None if self.has_repeats and other.has_repeats else self.spread,
        ).half_width


@dataclass(frozen=True, kw_only=True)
class Series:
    """Sizes that can be compared, ascending.

    Attributes:
        unit: what is counted, `node` or `rank`.
        kind: how the work grows.
        why: why it is taken for that.
        sizes: at least one.
        left_out: which runs are in none of them, and why, a sentence each.
    """

    unit: str
    kind: ScalingKind
    why: str
    sizes: tuple[Size, ...]
    left_out: tuple[str, ...]

    @property
    def doubt(self) -> str:
        """Which size is known too badly for a law; empty where there is none."""
        worst = max(self.sizes, key=lambda size: size.error)
        known = f"the speed of {plural(worst.num_units, self.unit)} is known to {100 * worst.error:.0f} % only"
        return known if worst.error > _MAX_ERROR else ""

    def without_largest(self) -> Series:
        """Return the series without its largest size."""
        return replace(self, sizes=self.sizes[:-1])


def series_of(samples: Sequence[Sample], *, kind: ScalingKind | None = None) -> Series:
    """Return the series of some runs.

    Args:
        samples: at least one.
        kind: how the work grows, where the user says so; else the batches tell.

    Raises:
        UsageError: the runs count different things, none has a size, or the batches say that `kind` is wrong.
        CannotTell: no run can be used.
    """
    left_out = [f"{sample.name} {sample.unusable}" for sample in samples if sample.unusable]
    usable = [sample for sample in samples if not sample.unusable]
    if not usable:
        raise CannotTell(with_reasons(_NONE_LEFT, left_out))
    units = sorted({sample.unit for sample in usable})
    if len(units) > 1:
        raise UsageError(f"the runs count {listed(units)}: speeds of different units cannot be compared")
    once = _without_twins(usable, left_out)
    alike = _alike(once, [sample.same_work for sample in once], "does other work", left_out)
    if not any(sample.num_nodes or sample.num_ranks for sample in alike):
        raise UsageError("no run says on how many nodes or ranks it ran: add the column nodes")
    unit, sizes = _counted(alike, left_out)
    if not sizes:
        raise CannotTell(with_reasons(_NONE_LEFT, left_out))
    spread = _spread(sizes)
    sizes = tuple(replace(size, spread=spread) for size in sizes)
    found, why = _kind(sizes)
    if kind is not None and found not in (kind, ScalingKind.UNKNOWN):
        raise UsageError(f"--scaling {kind} is not what the runs are: {why}, which is {found} scaling")
    if kind is not None and found is ScalingKind.UNKNOWN:
        found, why = kind, "as told"
    return Series(unit=unit, kind=found, why=why, sizes=sizes, left_out=tuple(left_out))


def _without_twins(samples: Sequence[Sample], left_out: list[str]) -> list[Sample]:
    """Return runs that were named twice once."""
    seen: dict[str, Sample] = {}
    for sample in samples:
        path = os.path.realpath(sample.path)  # a link to a run is that run
        if path in seen:
            left_out.append(f"{sample.name} is named twice, and counts once")
        seen.setdefault(path, sample)
    return list(seen.values())


def _counted(samples: Sequence[Sample], left_out: list[str]) -> tuple[str, tuple[Size, ...]]:
    """Return what is counted, and the sizes; what is counted is decided by the runs that are kept."""
    unit = _unit(samples)
    by_size: dict[int, list[Sample]] = {}
    for sample in _usual_layouts_first(samples):
        by_size.setdefault(sample.num_nodes if unit == "node" else sample.num_ranks, []).append(sample)
    uncounted = by_size.pop(0, [])
    sizes = tuple(
        Size(num_units=count, samples=repeats)
        for count in sorted(by_size)
        if (repeats := _repeats(by_size[count], plural(count, unit), left_out))
    )
    kept = [*uncounted, *(sample for size in sizes for sample in size.samples)]
    if _unit(kept) != unit:
        return _counted(kept, left_out)
    left_out += [f"{one.name} does not say on how many {unit}s it ran, which the sizes count" for one in uncounted]
    return unit, sizes


def _usual_layouts_first(samples: Sequence[Sample]) -> list[Sample]:
    """Return runs by how many have their number of ranks a node, most first: that decides between as many repeats."""
    layouts = Counter(_ranks_per_node(sample) for sample in samples)
    return sorted(samples, key=lambda sample: -layouts[_ranks_per_node(sample)])


def _ranks_per_node(sample: Sample) -> float:
    """Return 0 where it is not known."""
    return sample.num_ranks / sample.num_nodes if sample.num_nodes else 0.0


def _repeats(samples: Sequence[Sample], size: str, left_out: list[str]) -> tuple[Sample, ...]:
    """Return the runs of one size that are repeats of each other; those that do not say their batch have that of all.

    There are none where no speed is that of most. Batches that differ by less than 2 % are one.

    Args:
        samples: at least one.
        size: in words.
        left_out: gets why others are none, a sentence each.
    """
    usual = usual_batches(sample.batch for sample in samples)
    ways = [
        {
            **sample.same_way,
            "batch": f"{usual[sample.batch]:g}" if sample.batch else "",
            "number of nodes": str(sample.num_nodes or ""),
            "number of ranks": str(sample.num_ranks or ""),
        }
        for sample in samples
    ]
    alike = _alike(samples, ways, f"is not pooled with the others of {size}", left_out)
    given = [sample.batch for sample in alike if sample.batch]
    found = [sample if sample.batch or not given else sample.with_batch(float(np.mean(given))) for sample in alike]
    for what, name in (("step time", "step_ns"), ("throughput", "samples_per_s")):
        values = [getattr(sample, name) for sample in found]
        if values and None not in values:
            found = _of_most(found, values, what, size, left_out)
    return tuple(found)


def _of_most(
    samples: Sequence[Sample], values: Sequence[float], what: str, size: str, left_out: list[str]
) -> list[Sample]:
    """Return the repeats that have the value of most of them, within a factor, and say by how much the rest is off.

    Args:
        samples: repeats.
        values: one of each, above 0.
        what: they are, in words.
        size: of the repeats, in words.
        left_out: gets why others are none, a sentence each.
    """
    ordered = sorted(values)
    stops = [bisect_left(ordered, _MAX_RATIO * value) for value in ordered]
    first = max(range(len(ordered)), key=lambda at: stops[at] - at)
    alike = ordered[first : stops[first]]
    if 2 * len(alike) <= len(values):
        low, high = (samples[values.index(value)].name for value in (ordered[0], ordered[-1]))
        factor = _shown(ordered[-1] / ordered[0])
        left_out += [
            f"{sample.name} is left out with all of {size}: the {what} of {high} is {factor} times that of {low}, and "
            "which one is right is not known"
            for sample in samples
        ]
        return []
    kept = []
    for sample, value in zip(samples, values, strict=True):
        if alike[0] <= value <= alike[-1]:
            kept.append(sample)
            continue
        factor = _shown(value / float(np.median(alike)))
        left_out.append(f"{sample.name} is not pooled with the others of {size}: its {what} is {factor} times theirs")
    return kept


def _shown(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 100 else f"{factor:.3g}"


def _alike(
    samples: Sequence[Sample], conditions: Sequence[Mapping[str, str]], verb: str, left_out: list[str]
) -> list[Sample]:
    """Return the runs that agree with most others in all of some conditions, and say what of the rest differs.

    A value that a run does not have (empty) agrees with any.
    """
    keys = sorted({key for own in conditions for key in own})
    usual: dict[str, str] = {}
    for key in keys:
        values = Counter(value for own in conditions if (value := own.get(key, "")))
        if values:
            usual[key] = max(values, key=lambda value: values[value])
    kept = []
    for sample, own in zip(samples, conditions, strict=True):
        differs = [
            f"{key} is {own[key]}, not {value}" for key, value in usual.items() if own.get(key, "") not in ("", value)
        ]
        if not differs:
            kept.append(sample)
            continue
        left_out.append(f"{sample.name} {verb}: {'; '.join(first_few(differs, _MAX_TOLD))}")
    if not kept:  # each differs in something else: the first one stands for itself
        kept = [samples[0]]
        left_out[:] = [sentence for sentence in left_out if not sentence.startswith(f"{samples[0].name} {verb}")]
    return kept


def _unit(samples: Sequence[Sample]) -> str:
    """Return `node`, or `rank` where nodes have different numbers of ranks, or more runs say their ranks than nodes."""
    per_node = {_ranks_per_node(sample) for sample in samples} - {0.0}
    num_more = sum(bool(sample.num_ranks) - bool(sample.num_nodes) for sample in samples)
    return "rank" if len(per_node) > 1 or num_more > 0 else "node"


def _spread(sizes: Sequence[Size]) -> RunSpread:
    """Return how much runs of a size differ, pooled over all sizes: the prior, unless they differ by more than that.

    A single degree of freedom says too little to stand without the prior.
    """
    seen = spread_of_repeats([[size.log_times for size in sizes]])
    if seen.freedom < MIN_REPEATS - 1 or seen.value <= PRIOR_CV:
        return spread_beyond_prior(seen, PRIOR_CV)
    return seen


def _kind(sizes: Sequence[Size]) -> tuple[ScalingKind, str]:
    """Return how the work grows, by the batches."""
    batches = [size.batch for size in sizes]
    if len(sizes) < 2:
        return ScalingKind.UNKNOWN, "there is one size only"
    if not all(batches):
        return ScalingKind.UNKNOWN, "the batches are not known; --scaling says which"
    each = [batch / size.num_units for batch, size in zip(batches, sizes, strict=True)]
    if is_same_batch(min(batches), max(batches)):
        return ScalingKind.STRONG, f"the global batch is {batches[0]:g} at every size"
    if is_same_batch(min(each), max(each)):
        return ScalingKind.WEAK, f"the batch of a unit is {each[0]:g} at every size"
    shown = ", ".join(f"{batch:g} at {size.num_units}" for batch, size in zip(batches, sizes, strict=True))
    return ScalingKind.UNKNOWN, f"the global batch neither stays the same nor grows with the size: {shown}"
