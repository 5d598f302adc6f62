"""Ranks that meet once a step, in virtual time: nobody gets past the pacing point before the last one is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.pace.controller import Measurement, Policy
from hpcpace.trace.schema import PaceArm

WINDOW = 10
TRANSFER_NS = 1_000_000.0
STEP_NS = 100_000_000.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a run: delays (num_steps, num_ranks) and durations of steps (num_steps,), in nanoseconds."""

    delays_ns: np.ndarray
    steps_ns: np.ndarray


def balanced(num_steps: int, num_ranks: int, *, seed: int, noise: float) -> np.ndarray:
    """Return the work of ranks that are alike, with independent noise: float64, (num_steps, num_ranks)."""
    noises = np.random.default_rng(seed).lognormal(0, noise, (num_steps, num_ranks))
    return STEP_NS * noises


def run(
    policies: Sequence[Policy],
    work_ns: np.ndarray,
    *,
    arm: Callable[[int], PaceArm] = lambda window: PaceArm.OFF if window < 5 else PaceArm.ON,
    is_late_known: bool = True,
) -> Run:
    """Let ranks work, wait and be delayed by their policies; decisions come two windows later, as in the job.

    Where it is not known whether a rank is late, each is delayed by what its policy decided last, late or not.
    """
    num_steps, num_ranks = work_ns.shape
    delays_ns, steps_ns = np.zeros(work_ns.shape), np.zeros(num_steps)
    known_ns = work_ns if is_late_known else np.full(work_ns.shape, np.nan)
    wanted_ns = np.zeros(num_ranks)
    pending: Callable[[], None] | None = None
    for begin in range(0, num_steps - num_steps % WINDOW, WINDOW):
        steps = slice(begin, begin + WINDOW)
        of_window = arm(begin // WINDOW)
        if of_window == PaceArm.ON:
            delays_ns[steps] = _delays(policies, known_ns[steps]) if is_late_known else wanted_ns
        entered_ns = work_ns[steps] + delays_ns[steps]
        ends_ns = entered_ns.max(axis=1) + TRANSFER_NS
        steps_ns[steps] = ends_ns
        own_ns = ends_ns[:, None] - work_ns[steps]
        decide = _decision(policies, own_ns, known_ns[steps], ends_ns, delays_ns[steps], of_window, wanted_ns)
        if pending is not None:
            pending()
        pending = decide
    return Run(delays_ns=delays_ns, steps_ns=steps_ns)


def _delays(policies: Sequence[Policy], work_ns: np.ndarray) -> np.ndarray:
    return np.array([[policy.delay_at(0, work) for policy, work in zip(policies, row, strict=True)] for row in work_ns])


def _decision(
    policies: Sequence[Policy],
    own_ns: np.ndarray,
    work_ns: np.ndarray,
    ends_ns: np.ndarray,
    delays_ns: np.ndarray,
    arm: PaceArm,
    wanted_ns: np.ndarray,
) -> Callable[[], None]:
    def decide() -> None:
        for rank, policy in enumerate(policies):
            wanted_ns[rank] = policy.update(
                Measurement(
                    own_ns=tuple(own_ns[:, rank]),
                    least_ns=tuple(own_ns.min(axis=1)),
                    most_ns=tuple(own_ns.max(axis=1)),
                    work_ns=tuple(work_ns[:, rank]),
                    step_ns=tuple(ends_ns),
                    delayed_ns=tuple(delays_ns[:, rank]),
                    arm=arm,
                )
            )

    return decide
