"""Runs a small job until its traces show a hang, and compares the verdict with what is true."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.hangs.cells import Cell
from experiments.hangs.healthy import NUM_STEPS, HealthyJob
from experiments.hangs.jobs import Blow, Job, have_ended, started
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.text import NS_PER_S
from hpcpace.hang.from_traces import hang_in, read_records
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import FoundHang

HANG_S = 3.0
"""Seconds that an operation must last, in these jobs of short steps."""

NAMED_WITHIN_S = 15.0
"""Seconds after that within which a hang is to be named."""

_POLL_S = 0.5
_LONGEST_S = 60.0
_AFTER_END_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the traces of one job said first.

    Attributes:
        cell: key of the cell, or name of the healthy job.
        kind: of the hang; empty where none was found.
        named, could_be: its ranks.
        after_s: from the fault to the verdict; None without one.
        is_kind_right, are_ranks_right: whether they are those of the cell; of a healthy job, whether nothing was found.
        wrong: ranks that were named and are not to blame.
        said: the verdict in words; empty without one.
    """

    cell: str
    kind: str = ""
    named: tuple[int, ...] = ()
    could_be: tuple[int, ...] = ()
    after_s: float | None = None
    is_kind_right: bool
    are_ranks_right: bool
    wrong: tuple[int, ...] = ()
    said: str = ""

    @property
    def is_in_time(self) -> bool:
        """Whether the hang was found soon enough after it was one."""
        return self.after_s is not None and self.after_s <= HANG_S + NAMED_WITHIN_S

    def line(self) -> str:
        """Return it as a line of a file of results."""
        return json.dumps(asdict(self))


def outcomes_in(path: Path) -> list[Outcome]:
    """Return the outcomes in a file of results; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [Outcome(**{**row, **{key: tuple(row[key]) for key in ("named", "could_be", "wrong")}}) for row in rows]


def judge_cell(cell: Cell) -> Outcome:
    """Run the job of a cell once, and return what its traces say first."""
    blows = {one.rank: Blow(step=one.step, place=one.place, fault=one.fault) for one in cell.strikes}
    found, after_ns = _first_hang(
        program=cell.program, num_ranks=cell.num_ranks, width=cell.width, num_steps=cell.num_steps, blows=blows
    )
    if found is None:
        return Outcome(cell=cell.key, is_kind_right=False, are_ranks_right=False)
    return Outcome(
        cell=cell.key,
        kind=str(found.hang.kind),
        named=found.hang.culprits,
        could_be=found.hang.could_be,
        after_s=None if after_ns is None else round(after_ns / NS_PER_S, 2),
        is_kind_right=found.hang.kind in cell.kinds,
        are_ranks_right=found.hang.culprits == (cell.culprit,),
        wrong=tuple(sorted(set(found.hang.culprits) - {cell.culprit})),
        said=describe(found.hang, found.job).headline,
    )


def judge_healthy(job: HealthyJob) -> Outcome:
    """Run a healthy job once, and return whether its traces named nobody at any time."""
    found, _ = _first_hang(
        program=job.program,
        num_ranks=4,
        width=2,
        num_steps=NUM_STEPS,
        slowed=job.slowed,
        slow_steps=job.slow_steps,
        hang_s=job.hang_s,
    )
    if found is None:
        return Outcome(cell=job.name, is_kind_right=True, are_ranks_right=True)
    return Outcome(
        cell=job.name,
        kind=str(found.hang.kind),
        named=found.hang.culprits,
        could_be=found.hang.could_be,
        is_kind_right=False,
        are_ranks_right=False,
        wrong=found.hang.culprits,
        said=describe(found.hang, found.job).headline,
    )


def _first_hang(
    *,
    program: str,
    num_ranks: int,
    width: int,
    num_steps: int,
    blows: dict[int, Blow] | None = None,
    slowed: dict[tuple[int, str, int], float] | None = None,
    slow_steps: dict[tuple[int, str, int], float] | None = None,
    hang_s: float = HANG_S,
) -> tuple[FoundHang | None, int | None]:
    """Run a job until it hangs or ends; return the hang, and the time from the fault to it, nanoseconds."""
    folder = Path(tempfile.mkdtemp(prefix="hpcpace-hangs-"))
    job = Job(
        folder=folder,
        program=program,
        num_ranks=num_ranks,
        width=width,
        num_steps=num_steps,
        blows=blows or {},
        slowed=slowed or {},
        slow_steps=slow_steps or {},
    )
    try:
        with started(job) as pids:
            until_s = time.monotonic() + _LONGEST_S
            while time.monotonic() < until_s:
                time.sleep(_POLL_S)
                if (found := _look(job, hang_s)) is not None:
                    struck_ns = job.struck_ns()
                    return found, None if struck_ns is None else time.monotonic_ns() - struck_ns
                if have_ended(pids):
                    until_s = min(until_s, time.monotonic() + _AFTER_END_S)
        return None, None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _look(job: Job, hang_s: float) -> FoundHang | None:
    attempts = RunDirectory(job.run).attempts() if job.run.exists() else []
    if not attempts:
        return None
    try:
        return hang_in(read_records(attempts[-1]), hang_s=hang_s)
    except TraceError:  # no rank has flushed yet
        return None
