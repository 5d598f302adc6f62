"""A vectorised model of a bulk-synchronous job: what noise costs it, and what it can gain from delaying early ranks."""

from hpcpace.simulation.model import (
    KINDS,
    DelayRule,
    Incast,
    Noise,
    NoiseKind,
    ParametricNoise,
    PollStealing,
    PowerShare,
    ResampledNoise,
    Simulated,
    SimulatedJob,
    TracedNoise,
    simulate,
)

__all__ = [
    "KINDS",
    "DelayRule",
    "Incast",
    "Noise",
    "NoiseKind",
    "ParametricNoise",
    "PollStealing",
    "PowerShare",
    "ResampledNoise",
    "Simulated",
    "SimulatedJob",
    "TracedNoise",
    "simulate",
]
