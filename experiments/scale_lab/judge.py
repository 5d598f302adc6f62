"""Holds the law of the smaller sizes against sizes that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.scale_lab.setups import HELD_OUT, SIZES, Setup
from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.result import scaling_of
from hpcpace.runs.scaling.samples import Sample, sample_of_run


@dataclass(frozen=True, kw_only=True)
class Point:
    """A held-out size: what was predicted and what was measured, milliseconds."""

    num_hosts: int
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A set-up: the part that was said to stop it, the sizes that the law rests on, and those held out."""

    setup: Setup
    known: tuple[int, ...]
    stopped_by: str
    lost: float
    points: tuple[Point, ...]

    @property
    def is_named(self) -> bool:
        """Whether the injected part was named."""
        return self.stopped_by == self.setup.part


def judge(folder: Path, setup: Setup) -> Judged:
    """Return how well the runs of `SIZES` predict those of `HELD_OUT` that are there.

    Where none of these are, the largest of `SIZES` is held out.
    """
    there = [size for size in (*SIZES, *HELD_OUT) if (folder / f"{setup.name}-{size}").exists()]
    samples = {size: _sample(folder / f"{setup.name}-{size}") for size in there}
    known = [size for size in there if size in SIZES]
    known = known if len(known) < len(there) else known[:-1]
    scaling = scaling_of([samples[size] for size in known])
    predicted = {size.num_units: size for size in scaling.predictions}
    points = []
    for size in there:
        if size in predicted:
            low, high = predicted[size].step_interval_ns
            times = (value / 1e6 for value in (predicted[size].step_ns, low, high, samples[size].step_ns or 0.0))
            names = ("predicted_ms", "low_ms", "high_ms", "measured_ms")
            points.append(Point(**dict(zip(names, times, strict=True)), num_hosts=size))
    stop = scaling_of([samples[size] for size in there if size in SIZES]).stop
    return Judged(
        setup=setup,
        known=tuple(known),
        stopped_by=stop.part if stop is not None else "",
        lost=stop.lost[stop.part] if stop is not None and stop.part else 0.0,
        points=tuple(points),
    )


def _sample(path: Path) -> Sample:
    (loaded,) = load_runs([path])
    if loaded.measured is None:
        raise SystemExit(f"{path}: {loaded.problem}")
    return sample_of_run(loaded.measured)
