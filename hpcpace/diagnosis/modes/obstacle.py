"""Why the data of a run decide nothing: a dataclass for each obstacle, with its figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TooFewSteps:
    """The run has fewer steps than a diagnosis needs."""

    num_steps: int
    least: int


@dataclass(frozen=True, kw_only=True)
class WrongClock:
    """A clock is proven wrong, so that transfers cannot be judged, and own work shows no fault."""


@dataclass(frozen=True, kw_only=True)
class AbsentRanks:
    """Ranks without a trace may cause what the others wait for, and nothing that is certain explains the loss."""


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Phases of `ranks`, which used a device, are times of the host: nobody knows their work, waits and transfers."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NoPhases:
    """The steps were recorded without phases: nobody knows what of them is work and what is a wait inside one."""


@dataclass(frozen=True, kw_only=True)
class TooMuchNoise:
    """Only a rank slower than its role by more than `smallest_share` would stand out from the noise."""

    smallest_share: float


@dataclass(frozen=True, kw_only=True)
class NothingCompared:
    """Ranks send to each other and no mesh is known, so that neither ranks nor stages can be compared."""


@dataclass(frozen=True, kw_only=True)
class UnmatchedOperations:
    """Much of the step, `share`, is in operations that match no other rank's: wait or transfer, nobody knows."""

    share: float


@dataclass(frozen=True, kw_only=True)
class NothingMeasured:
    """Nothing could be measured; `error` says why."""

    error: str


Obstacle = (
    TooFewSteps
    | WrongClock
    | AbsentRanks
    | HostTimes
    | NoPhases
    | TooMuchNoise
    | NothingCompared
    | UnmatchedOperations
    | NothingMeasured
)
