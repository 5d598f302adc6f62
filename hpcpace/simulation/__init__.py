"""A vectorised model of a bulk-synchronous job: the cost of noise, and the gain of pacing."""

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
