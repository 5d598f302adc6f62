"""A vectorised model of a bulk-synchronous job: what noise costs it, and what it can gain from delaying early ranks."""

from hpcpace.simulation.couplings import Incast, PollStealing, PowerShare
from hpcpace.simulation.model import DelayRule, Simulated, SimulatedJob, simulate
from hpcpace.simulation.noise import KINDS, Noise, NoiseKind, ParametricNoise, ResampledNoise, TracedNoise

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
