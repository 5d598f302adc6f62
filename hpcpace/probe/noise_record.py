"""The noise of cores, as it is saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CoreFigures:
    """What kept one core from its work.

    Attributes:
        share: part of the time that detours cost.
        longest_ns: what the longest detour cost.
        num_detours: how many there were.
        quantum_ns: usual time of a piece of work.
        resolution_ns: shortest detour that shows.
        span_ns: time measured.
        period_ns: distance of detours that recur; None if they do not.
        period_share: part of the time that these cost; None likewise.
    """

    share: float
    longest_ns: float
    num_detours: int
    quantum_ns: float
    resolution_ns: float
    span_ns: int
    period_ns: float | None
    period_share: float | None


@dataclass(frozen=True, kw_only=True)
class CoreNoise:
    """The noise of one core of a host.

    Attributes:
        host: its name.
        cpu: number of the core, as Linux counts.
        figures: what was found.
    """

    host: str
    cpu: int
    figures: CoreFigures


@dataclass(frozen=True, kw_only=True)
class NoiseRecord:
    """The noise of all cores that the ranks may use.

    Attributes:
        cores: in the order of hosts and cores.
        notes: what has to be known to read them, such as that hosts share a machine.
    """

    cores: tuple[CoreNoise, ...] = ()
    notes: tuple[str, ...] = ()
