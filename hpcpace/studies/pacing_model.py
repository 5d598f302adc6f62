"""Runs every policy in every kind of simulated job with the published baseline, and finds which gain as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.core.config import PaceSettings
from hpcpace.simulation.published import CAUSES, STRENGTHS, PacedOutcome, Scene, Target, distance, fit, paced

POLICIES = ("published-window", "published-spread", "slack", "stagger")
MOST_DELAY_SHARE = 0.3
NEAR = 0.03
"""Largest difference between two gains that count as equal."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A policy in one kind of job, at each number of nodes.

    Attributes:
        scene: the kind of job.
        policy: the one in use.
        outcomes: by number of nodes.
        fits: whether the job has the published baseline there.
    """

    scene: Scene
    policy: str
    outcomes: tuple[PacedOutcome, ...]
    fits: tuple[bool, ...]

    @property
    def label(self) -> str:
        """The job and the policy in a few words."""
        return f"{self.scene.coupling} {self.scene.strength:g}, {self.scene.cause}: {self.policy}"


def simulations(published: Sequence[Target]) -> list[Simulation]:
    """Run every policy in every kind of job, fitted to the published baseline: about a minute for the whole table.

    Args:
        published: the table, the fewest nodes first.
    """
    found = []
    for scene in (
        Scene(coupling=coupling, strength=strength, cause=cause)
        for coupling, strengths in STRENGTHS.items()
        for strength in strengths
        for cause in CAUSES
    ):
        fitted = [fit(target, published[0], scene) for target in published]
        for policy in POLICIES:
            settings = PaceSettings(policy=policy, max_delay_share=MOST_DELAY_SHARE)
            outcomes = tuple(paced(one, settings, nodes=of.nodes) for one, of in zip(fitted, published, strict=True))
            fits = tuple(one.is_fit for one in fitted)
            found.append(Simulation(scene=scene, policy=policy, outcomes=outcomes, fits=fits))
    return found


def nearest(found: Sequence[Simulation], published: Sequence[Target]) -> list[Simulation]:
    """Return for each coupling and cause the simulation whose gains are closest to the published ones."""
    kinds = dict.fromkeys((one.scene.coupling, one.scene.cause) for one in found)
    return [
        min(
            (one for one in found if (one.scene.coupling, one.scene.cause) == kind),
            key=lambda one: distance(published, one.outcomes),
        )
        for kind in kinds
    ]


def shown(found: Sequence[Simulation], published: Sequence[Target]) -> list[Simulation]:
    """Return the simulations to show: the closest ones, and the one whose variation falls most."""
    near = nearest(found, published)
    fitting = [one for one in found if one.fits[-1]] or list(found)
    calmest = min(fitting, key=lambda one: one.outcomes[-1].variation / one.outcomes[-1].baseline_variation)
    return near if calmest in near else [*near, calmest]


def has_published_gains(one: Simulation, published: Sequence[Target]) -> bool:
    """Return whether gains are within 3 points of the published ones at every number of nodes, in jobs that fit."""
    return all(one.fits) and distance(published, one.outcomes) <= NEAR


def is_as_calm(one: Simulation, published: Sequence[Target]) -> bool:
    """Return whether the variation on the most nodes falls at least half as much as the published one."""
    found, target = one.outcomes[-1], published[-1]
    fall, published_fall = 1 - found.variation / found.baseline_variation, 1 - target.paced_variation / target.variation
    return one.fits[-1] and fall >= published_fall / 2


def strengths_needed(found: Sequence[Simulation], target: Target) -> list[tuple[Simulation, float]]:
    """Return for each coupling the lowest strength that reaches the gain on the most nodes, if any tried strength does.

    Gains between two strengths are interpolated linearly.

    Args:
        found: simulations of ascending strengths.
        target: the row with the most nodes.

    Returns:
        The simulation with the largest strength that does not reach the gain yet, and the strength.
    """
    needed = []
    for coupling, strengths in STRENGTHS.items():
        reached = []
        for cause, policy in dict.fromkeys((one.scene.cause, one.policy) for one in found):
            series = [
                one for one in found if (one.scene.coupling, one.scene.cause, one.policy) == (coupling, cause, policy)
            ]
            gains = np.array([one.outcomes[-1].gain if one.fits[-1] else -np.inf for one in series])
            above = np.flatnonzero(gains >= target.gain)
            if len(above) and above[0] > 0 and np.isfinite(gains[above[0] - 1]):
                last = int(above[0])
                share = (target.gain - gains[last - 1]) / (gains[last] - gains[last - 1])
                strength = strengths[last - 1] + share * (strengths[last] - strengths[last - 1])
                reached.append((series[last - 1], float(strength)))
        needed += [min(reached, key=lambda pair: pair[1])] if reached else []
    return needed
