"""Holds the law of the smaller sizes against sizes that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.result import scaling_of
from hpcpace.runs.scaling.samples import Sample, sample_of_run

SIZES, HELD_OUT = (1, 2, 4, 8), (16, 32)
UPLINK_MBIT = 25
"""Rate of the lab's uplinks, one for each host: what messages wait for. It is low, because all hosts of a lab share the
cores of one machine: an all_reduce of 32 takes about 0.2 s of 2 cores, however small or large it is."""
_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One series.

    Attributes:
        name: of it.
        part: of `hpcpace.runs.scaling.samples.PARTS` that stops it.
        is_strong: whether the work is divided among the hosts; else each host has all of it.
        serial_share: part of the work that is not divided.
        event_ms, event_share: length of an event, and the share of steps in which a rank has one.
        slow_ms: what the last rank does on top in each step.
        message_bytes: of the all_reduce that ends a step; 0 for a barrier, which needs few messages.
        work_ms: of one host.
        num_steps: of a run in the lab, after the warm-up.
    """

    name: str
    part: str
    is_strong: bool = False
    serial_share: float = 0.0
    event_ms: float = 0.0
    event_share: float = 0.0
    slow_ms: float = 0.0
    message_bytes: int = 0
    work_ms: float = 120.0
    num_steps: int = 40

    def host_ms(self, num_hosts: int) -> float:
        """Return the work of a host in a step."""
        if not self.is_strong:
            return self.work_ms
        return self.work_ms * (self.serial_share + (1 - self.serial_share) / num_hosts)

    def transfer_ms(self, num_hosts: int) -> float:
        """Return how long a ring takes for the message at the rate of an uplink."""
        if num_hosts == 1:
            return 0.0
        return 2 * (num_hosts - 1) / num_hosts * self.message_bytes * _BITS / (UPLINK_MBIT * 1e3)


_KB = 1000
SETUPS = (
    Setup(name="jitter-rare", part="jitter", event_ms=200, event_share=0.04, num_steps=90),
    Setup(name="jitter-usual", part="jitter", event_ms=120, event_share=0.1, num_steps=90),
    Setup(name="jitter-often", part="jitter", event_ms=80, event_share=0.25, num_steps=90),
    Setup(
        name="jitter-strong", part="jitter", is_strong=True, event_ms=160, event_share=0.1, work_ms=800, num_steps=90
    ),
    Setup(name="serial-tenth", part="work", is_strong=True, serial_share=0.1, work_ms=800),
    Setup(name="serial-fifth", part="work", is_strong=True, serial_share=0.2, work_ms=800),
    Setup(name="serial-half", part="work", is_strong=True, serial_share=0.5, work_ms=800),
    Setup(name="uplink-weak", part="transfer", message_bytes=1000 * _KB, work_ms=400),
    Setup(name="uplink-large", part="transfer", message_bytes=1500 * _KB, work_ms=400),
    Setup(name="uplink-strong", part="transfer", is_strong=True, message_bytes=1000 * _KB, work_ms=1600),
)


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
