"""Healthy jobs that look like a hang for a while: a long checkpoint, a first step that compiles, one slow step."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_STEPS = 28


@dataclass(frozen=True, kw_only=True)
class HealthyJob:
    """A job in which nothing hangs.

    Attributes:
        name: what is unusual in it.
        slowed: seconds that a rank takes longer, by step, place and rank.
        slow_steps: the same in usual steps.
        hang_s: seconds that an operation must last to hang; less than what is unusual here takes.
    """

    name: str
    program: str
    slowed: dict[tuple[int, str, int], float] = field(default_factory=dict)
    slow_steps: dict[tuple[int, str, int], float] = field(default_factory=dict)
    hang_s: float = 1.0


def _long_one(phase: str) -> dict[tuple[int, str, int], float]:
    """Return what makes a phase of every fourth step 0.5 s long, and the fifth one three times that."""
    return {**{(step, phase, 0): 0.4 for step in range(3, NUM_STEPS, 4)}, (19, phase, 0): 1.4}


HEALTHY = (
    HealthyJob(name="a long checkpoint", program="dp with checkpoints", slowed=_long_one("checkpoint")),
    HealthyJob(name="a long evaluation", program="dp with evaluations", slowed=_long_one("eval")),
    HealthyJob(name="a first step of 4 s", program="dp", slowed={(0, "forward", 1): 4.0}),
    HealthyJob(name="a step of 20 usual ones", program="dp x pp", slow_steps={(20, "forward", 2): 9.5}, hang_s=0.5),
    HealthyJob(name="nothing", program="tp"),
)
"""The kinds of healthy jobs, run in turn."""
