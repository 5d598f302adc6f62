"""The matrix: kinds of hangs by layouts of process groups, and what is true of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcpace.hang.views import HangKind

FAULT_STEP = 12
"""Before it there is a usual step time; divisible by four, so that a barrier and no checkpoint belongs to it."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault on a rank, at a place of a step."""

    rank: int
    fault: str
    place: str
    step: int = FAULT_STEP


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of hang in one layout.

    Attributes:
        program: the layout, a key of `experiments.hangs.programs.PROGRAMS`.
        width: ranks of the inner group, or stages of a pipeline.
        strikes: what happens; the last one is the cause of the hang.
        kinds: the right answers.
        num_steps: after which the loop ends.
    """

    name: str
    program: str
    strikes: tuple[Strike, ...]
    kinds: tuple[HangKind, ...]
    num_ranks: int = 4
    width: int = 2
    num_steps: int = 1000

    @property
    def culprit(self) -> int:
        """The rank that holds up the others."""
        return self.strikes[-1].rank

    @property
    def key(self) -> str:
        """What names it on the command line and in results."""
        return f"{self.name}, {self.program}, {self.num_ranks} ranks".replace(" ", "-").replace(",", "")


_OWN = (HangKind.OWN_WORK,)
_GONE = (HangKind.GONE,)


def _cell(name: str, program: str, fault: str, place: str, kinds: tuple[HangKind, ...], rank: int = 2) -> Cell:
    return Cell(name=name, program=program, strikes=(Strike(rank=rank, fault=fault, place=place),), kinds=kinds)


def _everywhere() -> list[Cell]:
    cells = []
    for program in ("dp", "tp", "pp", "dp x pp", "FSDP2"):
        place = "backward" if "pp" in program else "reduce"
        cells += [
            _cell("endless computation", program, "endless", place, _OWN),
            _cell("data never comes", program, "stuck", "data", _OWN),
            _cell("stopped", program, "stop", "forward", _GONE),
            _cell("exit", program, "exit_with_code", place, _GONE),
            _cell("killed with open connections", program, "kill", place, _GONE),
        ]
    return cells


def _stopped_inside() -> Cell:
    strikes = (Strike(rank=0, fault="late", place="reduce"), Strike(rank=2, fault="stop_inside", place="reduce"))
    return Cell(name="stopped inside an operation", program="dp", strikes=strikes, kinds=_GONE)


_SINGLE = (
    _stopped_inside(),
    _cell("exception", "dp", "raise_error", "reduce", _GONE),
    replace(
        _cell("error that the loop swallows", "dp", "swallow", "forward", (HangKind.GONE, HangKind.NEVER_CALLED)),
        num_steps=FAULT_STEP + 6,
    ),
    _cell("another operation", "dp", "other_operation", "reduce", (HangKind.MISMATCH,)),
    _cell("another order of groups", "dp in two groups", "other_order", "reduce", (HangKind.DISORDER,)),
    _cell("skipped barrier", "dp with a barrier", "skip", "barrier", (HangKind.MISMATCH, HangKind.NEVER_CALLED)),
    replace(
        _cell("checkpoint never ends", "dp with checkpoints", "stuck", "checkpoint", _OWN, rank=0),
        strikes=(Strike(rank=0, fault="stuck", place="checkpoint", step=FAULT_STEP + 3),),
    ),
)


def _larger() -> list[Cell]:
    dp = _cell("endless computation", "dp", "endless", "reduce", _OWN, rank=5)
    stages = _cell("stopped", "dp x pp", "stop", "forward", _GONE, rank=5)
    return [
        replace(dp, num_ranks=8),
        replace(stages, num_ranks=8, width=4),
        replace(dp, num_ranks=16, strikes=(Strike(rank=11, fault="endless", place="reduce"),)),
        replace(stages, num_ranks=16, width=4, strikes=(Strike(rank=9, fault="stop", place="forward"),)),
    ]


CELLS = (*_everywhere(), *_SINGLE, *_larger())
"""All cells, those of every layout first."""
