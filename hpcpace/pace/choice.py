"""The choice of pacing points and policy after the search: every rank makes the same one from the same reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcpace.core.config import PaceSettings
from hpcpace.pace.mechanisms import POLLING, RankProfile, find_mechanisms, policy_for
from hpcpace.pace.pacing_points import PacingPoint, choose_points
from hpcpace.pace.point_search import RankReport


@dataclass(frozen=True, kw_only=True)
class PacingChoice:
    """What all ranks agree on.

    Attributes:
        settings: those given, adapted to ranks that poll on shared cores.
        policy: the policy to try; `auto` has been replaced by what it stands for.
        points: where ranks are paced.
        mechanisms: what could make pacing pay.
        profiles: of all ranks, in order.
        seed: for the order of the trial's blocks.
        obstacle: why nothing can be tried; empty otherwise.
    """

    settings: PaceSettings
    policy: str
    points: list[PacingPoint]
    mechanisms: list[str]
    profiles: list[RankProfile]
    seed: int
    obstacle: str


def choose(settings: PaceSettings, reports: Sequence[RankReport]) -> PacingChoice:
    """Return the choice that follows from the reports of all ranks, in order of rank."""
    profiles = [report.profile for report in reports]
    points = choose_points([report.candidates for report in reports])
    mechanisms = find_mechanisms(profiles, points)
    policy = settings.policy
    if policy == "auto":
        policy = policy_for(mechanisms, has_turns=settings.stagger_slots > 0)
    if policy == "slack" and POLLING in mechanisms:
        settings = settings.where_polled()
    return PacingChoice(
        settings=settings,
        policy=policy,
        points=points,
        mechanisms=mechanisms,
        profiles=profiles,
        seed=reports[0].seed,
        obstacle=_obstacle(policy, points, profiles),
    )


def _obstacle(policy: str, points: Sequence[PacingPoint], profiles: Sequence[RankProfile]) -> str:
    if policy == "coschedule" or points:
        return ""
    if any(profile.waits_on_device for profile in profiles):
        return "collectives run on GPUs, where a delay of the host delays nothing: observed only"
    return "no operation blocks a group of ranks exactly once in every step"
