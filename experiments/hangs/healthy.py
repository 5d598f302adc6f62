"""Healthy jobs that look like a hang for a while: a long checkpoint, a first step that compiles, one slow step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HealthyJob:
    """A job in which nothing hangs.

    Attributes:
        name: what is unusual in it.
        slowed: seconds that a rank takes longer, by step, place and rank.
        hang_s: seconds that an operation must last to hang; less than what is unusual here takes.
    """

    name: str
    program: str
    slowed: dict[tuple[int, str, int], float]
    hang_s: float = 1.0
    num_steps: int = 28


def _checkpoints(long_s: float) -> dict[tuple[int, str, int], float]:
    # Usually 0.5 s with what the program does; the fifth one takes much longer.
    slow = {(step, "checkpoint", 0): 0.4 for step in range(3, 28, 4)}
    return {**slow, (19, "checkpoint", 0): long_s}


HEALTHY = (
    HealthyJob(name="long checkpoint", program="dp with checkpoints", slowed=_checkpoints(1.9)),
    HealthyJob(name="first step compiles", program="dp", slowed={(0, "forward", 1): 4.0}),
    HealthyJob(
        name="one slow step",
        program="dp x pp",
        # 20 times a step of about 0.1 s
        slowed={(20, "forward", 2): 1.8, **{(step, "data", rank): 0.02 for step in range(28) for rank in range(4)}},
    ),
    HealthyJob(name="nothing unusual", program="tp", slowed={}),
)
"""The kinds of healthy jobs, run in turn."""
