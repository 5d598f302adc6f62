"""Hangs of known kind on real ranks: is the verdict from their traces right, and in time?

See docs/results/hang-matrix.md. Results are added to a file, so that a run that was interrupted goes on where it
stopped, and several can share one.

Options:
  --times N        how often to run each cell [3]
  --healthy N      how many healthy jobs to run [0]
  --cells CELL...  run only these
  --results PATH   add outcomes to this file [hangs.jsonl]
  --write          write docs/results/hang-matrix.md from the results
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from experiments.hangs.job import FAULT_STEP, Job, Strike, have_ended, started, struck_ns
from experiments.jobs import Rows
from experiments.options import command_line
from experiments.pages import read_toml, table, write_page
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.text import NS_PER_S
from hpcpace.hang.from_traces import hang_in, read_records
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import FoundHang, HangKind

HANG_S = 3.0
"""Seconds that an operation must last, in these jobs of short steps."""
NAMED_WITHIN_S = 15.0
"""Seconds after that within which a hang is to be named."""
_POLL_S, _MAX_S, _AFTER_END_S = 0.5, 60.0, 2.0


def _hanging(row: dict[str, Any]) -> Job:
    """Return the job of a row whose fault is the last to strike."""
    strike = Strike(
        rank=row.pop("rank", 2), fault=row.pop("fault"), place=row.pop("place"), step=row.pop("step", FAULT_STEP)
    )
    late = [Strike(rank=row.pop("late_rank"), fault="late", place=strike.place)] if "late_rank" in row else []
    kinds = tuple(HangKind[name] for name in row.pop("kinds"))
    return Job(strikes=(*late, strike), kinds=kinds, hang_s=HANG_S, **row)


def _healthy(row: dict[str, Any]) -> Job:
    """Return a healthy job; its `long_phase` takes 0.5 s in every fourth step, and in step 19 three times that."""
    slowed = {name: {tuple(place): value for *place, value in row.pop(name, ())} for name in ("slowed", "slow_steps")}
    if phase := row.pop("long_phase", ""):
        slowed["slowed"] = {**{(step, phase, 0): 0.4 for step in range(3, 28, 4)}, (19, phase, 0): 1.4}
    return Job(num_steps=28, **{"hang_s": 1.0, **row}, **slowed)


_ROWS = read_toml(__file__, "cases")
CELLS = (
    *(
        _hanging({"place": place, **row, "program": program})
        for program, place in _ROWS["layouts"].items()
        for row in _ROWS["everywhere"]
    ),
    *map(_hanging, _ROWS["hang"]),
)
"""All jobs that hang, those of every layout first."""
HEALTHY = tuple(map(_healthy, _ROWS["healthy"]))
"""The kinds of healthy jobs, run in turn."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the traces of one job said first.

    Attributes:
        cell: key of the job.
        kind: of the hang; empty where none was found.
        named, could_be: its ranks.
        after_s: from the fault to the verdict; None without one.
        is_kind_right, are_ranks_right: whether they are those of the cell; of a healthy job, whether nothing was found.
        wrong: ranks that were named and are not to blame.
        said: the verdict in words; empty without one.
    """

    cell: str
    kind: str = ""
    named: Sequence[int] = ()
    could_be: Sequence[int] = ()
    after_s: float | None = None
    is_kind_right: bool
    are_ranks_right: bool
    wrong: Sequence[int] = ()
    said: str = ""

    @property
    def is_in_time(self) -> bool:
        """Whether the hang was found soon enough after it was one."""
        return self.after_s is not None and self.after_s <= HANG_S + NAMED_WITHIN_S


def main() -> None:
    args = command_line(__doc__, cells=[cell.key for cell in CELLS])
    kept = Rows(args.results)
    cells = [cell for cell in CELLS if not args.cells or cell.key in args.cells]
    healthy = [(HEALTHY[number % len(HEALTHY)], number // len(HEALTHY)) for number in range(args.healthy)]
    for job, turn in [*((cell, turn) for turn in range(args.times) for cell in cells), *healthy]:
        if Counter(row["cell"] for row in kept.read())[job.key] <= turn:
            outcome = judged(job)
            kept.add(asdict(outcome))
            is_right = outcome.is_kind_right and outcome.are_ranks_right
            print("right" if is_right else "WRONG", outcome, file=sys.stderr, flush=True)
    if args.write:
        write_page("hang-matrix", **_values([Outcome(**row) for row in kept.read()]))


def judged(job: Job) -> Outcome:
    """Run a job until its traces show a hang, and compare the verdict with what is true."""
    found, after_ns = _first_hang(job)
    if found is None:
        return Outcome(cell=job.key, is_kind_right=not job.strikes, are_ranks_right=not job.strikes)
    culprits = tuple(strike.rank for strike in job.strikes[-1:])
    return Outcome(
        cell=job.key,
        kind=str(found.hang.kind),
        named=found.hang.culprits,
        could_be=found.hang.could_be,
        after_s=None if after_ns is None else round(after_ns / NS_PER_S, 2),
        is_kind_right=found.hang.kind in job.kinds,
        are_ranks_right=bool(culprits) and found.hang.culprits == culprits,
        wrong=tuple(sorted(set(found.hang.culprits) - set(culprits))),
        said=describe(found.hang, found.job).headline,
    )


def _first_hang(job: Job) -> tuple[FoundHang | None, int | None]:
    """Run a job until it hangs or ends; return the hang, and the time from the fault to it, nanoseconds."""
    with tempfile.TemporaryDirectory(prefix="hpcpace-hangs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with started(job, folder) as pids:
            until_s = time.monotonic() + _MAX_S
            while time.monotonic() < until_s:
                time.sleep(_POLL_S)
                if (found := _look(folder / "run", job.hang_s)) is not None:
                    begun_ns = struck_ns(folder)
                    return found, None if begun_ns is None else time.monotonic_ns() - begun_ns
                if have_ended(pids):
                    until_s = min(until_s, time.monotonic() + _AFTER_END_S)
        return None, None


def _look(run: Path, hang_s: float) -> FoundHang | None:
    attempts = RunDirectory(run).attempts() if run.exists() else []
    try:
        return hang_in(read_records(attempts[-1]), hang_s=hang_s) if attempts else None
    except TraceError:  # no rank has flushed yet
        return None


def _values(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return what the page has of the outcomes."""
    by_key = {job.key: [one for one in outcomes if one.cell == job.key] for job in (*CELLS, *HEALTHY)}
    hangs = [one for cell in CELLS for one in by_key[cell.key]]
    kinds, ranks, soon, wrong = _counts(hangs)
    num_healthy = sum(len(by_key[job.name]) for job in HEALTHY)
    named = sum(not one.are_ranks_right for job in HEALTHY for one in by_key[job.name])
    rows = []
    for cell in CELLS:
        if own := by_key[cell.key]:
            after = [one.after_s for one in own if one.after_s is not None]
            took = f"{median(after):.1f} s" if after else "-"
            rows.append([cell.name, cell.program, cell.num_ranks, len(own), *_counts(own), took])
    return {
        "summary": fill(
            f"Of {len(hangs)} jobs that hang, the kind is right in {kinds}, the rank is right in {ranks}, and {soon} "
            f"are found in time; {wrong} have a wrong name. Of {num_healthy} healthy jobs, {named} are said to hang.",
            width=120,
        ),
        "matrix": table(
            ("hang", "layout", "ranks", "runs", "right kind", "right rank", "in time", "wrong names", "found after"),
            rows,
        ),
        "healthy": table(
            ("unusual", "jobs", "said to hang"),
            [
                (job.name, len(by_key[job.name]), sum(not one.are_ranks_right for one in by_key[job.name]))
                for job in HEALTHY
            ],
        ),
        "hang_s": f"{HANG_S:.0f}",
        "within_s": f"{NAMED_WITHIN_S:.0f}",
    }


def _counts(outcomes: Sequence[Outcome]) -> tuple[int, int, int, int]:
    """Return in how many the kind and the rank are right, how many are in time and name somebody wrong."""
    return (
        sum(one.is_kind_right for one in outcomes),
        sum(one.are_ranks_right for one in outcomes),
        sum(one.is_in_time for one in outcomes),
        sum(bool(one.wrong) for one in outcomes),
    )


if __name__ == "__main__":
    main()
