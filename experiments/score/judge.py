"""One verdict against the truth: whether the mode is right, who was named, and whether that was the one.

A culprit counts as found where the true one is among the names that the verdict holds for the same; a verdict that
names somebody where nobody is to blame is a false alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments.score.scenario import Scenario
from experiments.score.truth import CANNOT_TELL, STRAGGLER, Truth

# Of the links that nobody can tell apart, a verdict must hold this share for possible, or it claims too much.
_LEAST_HELD_POSSIBLE = 0.5


class Culprit(Protocol):
    """What is read of a culprit of a verdict."""

    @property
    def kind(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def interval(self) -> tuple[float, float]: ...


class Verdict(Protocol):
    """What is read of a verdict; `variety` says how a straggler recurs."""

    @property
    def mode(self) -> str: ...
    @property
    def variety(self) -> str: ...
    @property
    def culprits(self) -> Sequence[Culprit]: ...
    @property
    def confidence(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one verdict came to.

    Attributes:
        mode, variety: that it gave.
        is_mode_right: whether the truth holds it for right.
        has_culprit: whether somebody was to be named.
        is_found: whether the one to be named was named.
        named: the culprits that it named, without those that may be named.
        num_named_right: those of them that are, or are part of, the true one.
        is_abstention: whether somebody was to be named, and nobody was.
        is_false_alarm: whether somebody was named, and nobody is to blame.
        is_covered: whether the interval of the found culprit's effect holds the true effect; None without.
        confidence: that it gave.
    """

    mode: str
    variety: str
    is_mode_right: bool
    has_culprit: bool
    is_found: bool
    named: tuple[str, ...]
    num_named_right: int
    is_abstention: bool
    is_false_alarm: bool
    is_covered: bool | None
    confidence: float

    @property
    def num_named(self) -> int:
        """Culprits that it named."""
        return len(self.named)

    @property
    def is_wrong(self) -> bool:
        """Whether it blames somebody who is not to blame."""
        return self.num_named > self.num_named_right

    @property
    def is_wrong_and_confident(self) -> bool:
        """Whether it says something, and that is wrong: a mode, or whom it names."""
        return self.mode != CANNOT_TELL and not self.is_right

    @property
    def is_right(self) -> bool:
        """Whether nothing in it is wrong: the mode, and whom it names, if anybody."""
        return self.is_mode_right and not self.is_wrong


def judge(scenario: Scenario, truth: Truth, verdict: Verdict) -> Judgement:
    """Return what a verdict came to."""
    named = [culprit for culprit in verdict.culprits if not set(_names(culprit)) & set(truth.tolerated)]
    right = [culprit for culprit in named if _is_right(scenario, truth, culprit)]
    is_found = bool(named) and (bool(set(_names(named[0])) & set(truth.culprits)) and named[0] in right)
    if not is_found and truth.ranks and right:
        parts = set().union(*(_ranks(scenario, culprit) for culprit in right))
        is_found = parts == set(truth.ranks)
    is_mode_right = verdict.mode in truth.modes
    if verdict.mode == STRAGGLER and truth.varieties and verdict.variety not in truth.varieties:
        is_mode_right = False
    return Judgement(
        mode=verdict.mode,
        variety=verdict.variety,
        is_mode_right=is_mode_right,
        has_culprit=bool(truth.culprits) and truth.is_identifiable,
        is_found=is_found,
        named=tuple(f"{culprit.kind} {culprit.id}" for culprit in named),
        num_named_right=len(right),
        is_abstention=bool(truth.culprits) and (not named or verdict.mode == CANNOT_TELL),
        is_false_alarm=bool(named) and not truth.culprits,
        is_covered=_is_covered(truth, named[0]) if is_found and truth.effect is not None else None,
        confidence=verdict.confidence,
    )


def _names(culprit: Culprit) -> tuple[str, ...]:
    return (f"{culprit.kind} {culprit.id}", *culprit.aliases)


def _is_right(scenario: Scenario, truth: Truth, culprit: Culprit) -> bool:
    names = set(_names(culprit))
    if names & set(truth.culprits):
        num_held = len(names & set(truth.culprits))
        return truth.is_identifiable or num_held >= _LEAST_HELD_POSSIBLE * len(truth.culprits)
    ranks = _ranks(scenario, culprit)
    return bool(ranks) and ranks <= set(truth.ranks)


def _ranks(scenario: Scenario, culprit: Culprit) -> set[int]:
    """Return the ranks that a culprit consists of; none for a link or a phase."""
    numbers = range(scenario.num_ranks)
    match culprit.kind:
        case "rank":
            return {int(culprit.id)}
        case "node":
            return {rank for rank in numbers if f"n{scenario.node_of_rank[rank] + 1}" == culprit.id}
        case "leaf":
            return {rank for rank in numbers if f"leaf{scenario.leaf_of_rank[rank] + 1}" == culprit.id}
        case "slot":
            return {rank for rank in numbers if f"pp{rank % scenario.num_stages}" == culprit.id}
        case _:
            return set()


def _is_covered(truth: Truth, culprit: Culprit) -> bool:
    low, high = culprit.interval
    return truth.effect is not None and low <= truth.effect <= high
