"""The cases, and whether what a tool says of one is right: it names the rank, or none, and the stage or cause."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
    rank: int | None = 1
    num_steps: int = 500
    in_lab: bool = False
    fault: tuple[str, ...] = ()


CASES = (
    Case(name="healthy", title="healthy", stage="", rank=None, num_steps=1200),
    Case(name="backward", title="slow backward, rank 1", stage="backward"),
    Case(name="forward", title="slow forward, rank 1", stage="forward"),
    Case(name="loader", title="slow loader (waits), rank 1", stage="data|input|loader"),
    Case(name="transform", title="slow transform (computes), rank 1", stage="data|input|loader|transform"),
    Case(name="loader-all", title="slow loader, both ranks", stage="data|input|loader", rank=None),
    Case(
        name="gradients",
        title="big gradients, two hosts",
        stage="communicat|all_reduce|gradient|transfer",
        rank=None,
        num_steps=100,
        in_lab=True,
    ),
    Case(name="stalls", title="rank 1 stalls every 25 steps", stage="period|every|comes? back|recur|stall|pause"),
    Case(name="checkpoint", title="checkpoint on rank 0 every 25 steps", stage="checkpoint", rank=0),
    Case(name="load", title="foreign load on both cores", stage="other processes|contention", rank=None),
    Case(
        name="link",
        title="slow link between two hosts",
        stage=r"\blinks? [^;]*\b(is|are) slow",
        rank=None,
        num_steps=600,
        in_lab=True,
        fault=("slow-link", "n2", "--rate", "200mbit"),
    ),
    Case(name="hang", title="rank 1 hangs", stage="hang|hung|stuck|no longer moves"),
)


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
