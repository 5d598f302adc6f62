"""The jobs of a pacing study: a baseline and policies on each number of nodes, several times each.

There is no plan on disk. A run's name says what it is, and a run with a result is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.errors import UsageError
from hpcpace.core.rundir import RunDirectory
from hpcpace.pace.settings import NO_POLICY, POLICIES

DEFAULT_POLICIES = (NO_POLICY, "published-window", "published-spread", "slack", "auto")
_ALWAYS_ON_TRIAL = ("auto", "coschedule")


@dataclass(frozen=True, kw_only=True)
class PacingJob:
    """One job.

    Attributes:
        nodes, ranks_per_node: of the job.
        policy: of `hpcpace train --pace`, or none for a baseline.
        repetition: from 0.
        steps: to train.
        has_trial: whether the policy has to prove itself inside the job; otherwise it is on from the start.
    """

    nodes: int
    ranks_per_node: int
    policy: str
    repetition: int
    steps: int
    has_trial: bool

    @property
    def name(self) -> str:
        """The name of its run directory, like `n4x2-slack-0`."""
        return f"n{self.nodes}x{self.ranks_per_node}-{self.policy}-{self.repetition}"

    def is_done(self, study: Path) -> bool:
        """Return whether one of its attempts has left a result."""
        return any(attempt.result_json.exists() for attempt in RunDirectory(study / "runs" / self.name).attempts())


def pacing_jobs(
    *,
    nodes: Sequence[int],
    ranks_per_node: int,
    policies: Sequence[str] = DEFAULT_POLICIES,
    repetitions: int,
    steps: int,
    with_trial: bool = False,
) -> list[PacingJob]:
    """Return the jobs of a study in the order in which they run.

    Each repetition runs every policy, and starts with another one: drift over hours then affects all policies alike.

    Raises:
        UsageError: there is no such policy.
    """
    unknown = [policy for policy in policies if policy not in (NO_POLICY, *POLICIES)]
    if unknown:
        raise UsageError(f"policy {unknown[0]!r}: choose from {NO_POLICY}, {', '.join(POLICIES)}")
    return [
        PacingJob(
            nodes=count,
            ranks_per_node=ranks_per_node,
            policy=policy,
            repetition=repetition,
            steps=steps,
            has_trial=with_trial or policy in _ALWAYS_ON_TRIAL,
        )
        for repetition in range(repetitions)
        for count in nodes
        for policy in _rotated(policies, repetition)
    ]


def _rotated(policies: Sequence[str], by: int) -> list[str]:
    first = by % len(policies)
    return [*policies[first:], *policies[:first]]
