"""The cases of cases.toml, and whether a tool is right about one.

It is if it names the rank, or none, and the stage or cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from experiments.cases import cases_of, read_toml


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        name: for the job.
        title: in the table.
        stage: pattern of words, one of which must be in the verdict; empty where nothing is to be found.
        rank: that has it; None where no rank is to be named.
        num_steps: about 10 s of them, or the most if a fault of the lab has to begin meanwhile.
        in_lab: whether the ranks are on two hosts of a lab, with a network between them.
        fault: words of `hpcpace lab fault`, which begins after the first mark.
    """

    name: str
    title: str
    stage: str
    rank: int | None = None
    num_steps: int = 500
    in_lab: bool = False
    fault: tuple[str, ...] = ()


CASES = cases_of(Case, read_toml(__file__)["case"])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a tool says in the end.

    Attributes:
        headline: what comes first.
        text: headline, reasons and advice.
        ranks: that it blames, as its file for programs has it.
        is_fault: whether it says that anything is wrong.
    """

    headline: str
    text: str
    ranks: tuple[int, ...] = ()
    is_fault: bool = True


def is_right(case: Case, verdict: Verdict) -> bool:
    """Return whether a verdict names exactly the rank and the stage of a case, or nothing where nothing is wrong."""
    ranks = () if case.rank is None else (case.rank,)
    if not case.stage:
        return not verdict.is_fault and not verdict.ranks
    is_named = verdict.is_fault and tuple(verdict.ranks) == ranks
    return is_named and bool(re.search(case.stage, verdict.text, re.IGNORECASE))
