"""The record of pacing: the content of trial.json, and one sentence that sums it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcpace.pace.choice import PacingChoice, PacingPoint, crowding
from hpcpace.pace.settings import MIN_PAIRS
from hpcpace.pace.trial import Interval, TrialOutcome, TrialResult

SCHEMA = "hpcpace-trial/1"


@dataclass(kw_only=True)
class PacingRecord:
    """One attempt's pacing, filled while the job runs.

    Attributes:
        policy: what was asked for.
        tried: the policy that was tried; empty before the pacing point is chosen.
        reason: why nothing was tried or pacing ended early; empty otherwise.
        points: where ranks are paced.
        mechanisms: what could make pacing pay here.
        facts: what the first steps have shown.
        seed: of the order of blocks.
        trial: its results so far; None without one.
        num_harms: how often this rank's policy found that it did harm.
        collections: this rank's full garbage collections, without and with a schedule.
    """

    policy: str
    tried: str = ""
    reason: str = ""
    points: list[PacingPoint] = field(default_factory=list)
    mechanisms: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    trial: TrialResult | None = None
    num_harms: int = 0
    collections: dict[str, Any] = field(default_factory=dict)

    def begin(self, choice: PacingChoice) -> None:
        """Take what the ranks have agreed on after the search."""
        self.tried, self.points = choice.policy, choice.points
        self.mechanisms, self.seed = choice.mechanisms, choice.seed
        self.facts = {
            "polling_share": max(profile.polling_share for profile in choice.profiles),
            "gc_share": max(profile.gc_share for profile in choice.profiles),
            "ranks_per_core": crowding(choice.profiles),
            "waits_on_device": any(profile.waits_on_device for profile in choice.profiles),
        }

    @property
    def is_on(self) -> bool:
        """Whether ranks were paced at the end."""
        if self.trial is not None:
            return self.trial.is_on
        return bool(self.tried) and self.tried != "observe" and not self.reason

    def to_json(self) -> dict[str, Any]:
        """Return the content of trial.json."""
        return {
            "schema": SCHEMA,
            "policy": self.policy,
            "tried": self.tried,
            "is_on": self.is_on,
            "sentence": self.sentence(),
            "reason": self.reason,
            "points": [point.facts() for point in self.points],
            "mechanisms": self.mechanisms,
            "facts": self.facts,
            "seed": self.seed,
            "trial": None if self.trial is None else self.trial.to_json(),
            "num_harms": self.num_harms,
            "collections": self.collections,
        }

    def sentence(self) -> str:
        """Return the result in one line, without a full stop."""
        return f"pacing {'on' if self.is_on else 'off'}: {self._why()}"

    def _why(self) -> str:
        waiting_only = "" if self.mechanisms else "waiting only, "
        if self.reason:
            is_nothing = (
                self.policy == "auto" and self.trial is not None and self.trial.outcome == TrialOutcome.NO_EFFECT
            )
            return f"waiting only, nothing to gain ({self.reason})" if is_nothing else self.reason
        if not self.tried:
            return "the job ended before a pacing point was found"
        if self.trial is None:
            return "observed only" if self.tried == "observe" else f"{self.tried} without a trial"
        trial, effect = self.trial, self.trial.effect
        if trial.outcome == TrialOutcome.NO_CLAIM:
            return f"no claim: blocks without pacing differed ({_interval(trial.aa_effect)})"
        if trial.outcome == TrialOutcome.HARM_AT_ONCE:
            return f"{self.tried} stopped at once: steps of one block took {100 * trial.worst_block:.1f} % longer"
        if trial.outcome == TrialOutcome.GAIN:
            return f"{self.tried} is faster ({_interval(effect)})"
        if trial.outcome == TrialOutcome.HARM:
            return f"{waiting_only}{self.tried} does harm ({_interval(effect)})"
        if trial.outcome == TrialOutcome.NO_EFFECT:
            return f"{waiting_only}nothing to gain ({_interval(effect)}, {_detectable(effect)})"
        seen = f" ({_interval(effect)}, {_detectable(effect)})" if trial.num_pairs >= MIN_PAIRS else ""
        return f"undecided, the job ended after {trial.num_pairs} of {MIN_PAIRS} or more pairs of blocks{seen}"


def _interval(effect: Interval | None) -> str:
    if effect is None:
        return "not measured"
    return f"{100 * effect.mean:+.1f} % +- {100 * effect.halfwidth:.1f} %"


def _detectable(effect: Interval | None) -> str:
    return "no effect measured" if effect is None else f"could have seen {100 * effect.detectable:.1f} %"
