"""How a run ended before its time: which ranks ended first and how, and which ones waited then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EndKind(StrEnum):
    """How the program of a rank ended, or what ended the run."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    HANG = "hang"
    SILENT = "silent"
    FAILURE = "failed operation"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the program of one rank ended before its time.

    Attributes:
        kind: how; `hang` where hpcpace ended it because the job hung; `silent` where a trace ends without a word and
            the program was killed, crashed or still runs.
        what: name of the exception's type, or of the signal, or the exit code; empty where silent.
        step: the step that was running.
        after_ns: time since the first end of any rank, on the common clock; None where that cannot be compared. Where
            silent, it is the last sign of life.
    """

    rank: int
    kind: EndKind
    what: str
    step: int
    after_ns: int | None


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What ended a run before its time.

    Attributes:
        kind: what came first; `failed operation` where an operation ran out of time and no rank had ended.
        what: as of `RankEnd`; of a failed operation, its name.
        ranks: who came first; of a failed operation, the members that had not entered it, empty if unknown.
        step: the step that was running then.
        waiting: the other ranks that stood in an operation then, or on which it failed.
        waited_in: name of that operation; empty if nobody waited.
        waited_ns: how long it lasted, from the first enter on.
        is_everywhere: whether all ranks ended in this way.
        ends: all ranks that ended before their time, the first one first.
    """

    kind: EndKind
    what: str
    ranks: tuple[int, ...]
    step: int
    waiting: tuple[int, ...]
    waited_in: str
    waited_ns: int
    is_everywhere: bool
    ends: tuple[RankEnd, ...]
