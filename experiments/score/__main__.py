"""Scores the diagnosis on synthetic runs: `make score`, or `python -m experiments.score --quick` for a first look.

Options:
  --seeds develop|report  use even seeds (develop) or odd ones (report) [develop]
  --cells TEXT            run only these cells, with commas between them
  --per-cell N            make this many traces per cell; default 100
  --per-point N           make this many traces per point of power; default 20
  --power                 measure power as well if only some cells are named
  --quick                 make only 6 traces per cell
  --keep FOLDER           keep each outcome there, and take those of an interrupted campaign of the same code
  --jobs N                run this many processes [2]
  --verbose               print a line for each wrong verdict
  --write PATH?           write this file, or another one [docs/results/diagnosis-score.md]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from experiments.jobs import in_processes
from experiments.options import command_line
from experiments.pages import RESULTS, ROOT, command
from experiments.score import campaign
from experiments.score.cells import CELLS, LOST_CELLS, power_cells
from experiments.score.layout_cells import LAYOUT_CELLS

DOCUMENT = RESULTS / "diagnosis-score.md"
_PER_CELL, _PER_POWER_CELL = 100, 20
_QUICK, _QUICK_POWER = 6, 2
_ALL_CELLS = (*CELLS, *LOST_CELLS, *LAYOUT_CELLS)


def main() -> None:
    args = _arguments()
    begin_s = time.monotonic()
    cells = [cell for cell in _ALL_CELLS if not args.cells or cell.name in args.cells]
    todo = campaign.tasks(cells, per_cell=args.per_cell or (_QUICK if args.quick else _PER_CELL), of=args.seeds)
    if args.power or not args.cells:
        per_point = args.per_point or (_QUICK_POWER if args.quick else _PER_POWER_CELL)
        todo += campaign.tasks(power_cells(), per_cell=per_point, of=args.seeds)
    said = (lambda one: _line(one) if _is_failed(one) else "") if args.verbose else (lambda one: "")
    examined: Callable[[campaign.Task], campaign.Outcome] = campaign.examined
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        examined = partial(campaign.kept, folder=args.keep)
    outcomes = list(in_processes(examined, todo, processes=args.jobs, said=said))
    _show(outcomes)
    if args.write:
        duration_s = None if args.keep else time.monotonic() - begin_s
        text = campaign.document(outcomes, command=command("experiments.score"), duration_s=duration_s)
        args.write.write_text(text)
        print(f"written: {args.write}")
    if any(outcome.error for outcome in outcomes):
        sys.exit("some examinations failed")


def _arguments() -> argparse.Namespace:
    args = command_line(__doc__)
    args.cells = args.cells.split(",") if args.cells else []
    args.write = ROOT / args.write if args.write else None
    args.keep = ROOT / args.keep if args.keep else None
    names = [cell.name for cell in _ALL_CELLS]
    if unknown := sorted(set(args.cells) - set(names)):
        sys.exit(f"no cell is called {', '.join(unknown)}: use {', '.join(names)}")
    if args.write and args.seeds != "report":
        sys.exit("--write is for --seeds report")
    if args.write == DOCUMENT and args.cells:
        sys.exit(f"{DOCUMENT.name} has all cells: name another file")
    return args


def _is_failed(outcome: campaign.Outcome) -> bool:
    found = outcome.judgement
    return found is None or not found.is_right or (found.has_culprit and not found.is_found)


def _line(outcome: campaign.Outcome) -> str:
    s, truth, found = outcome.scenario, outcome.truth, outcome.judgement
    said, cost = outcome.error, ""
    if found is not None:
        variety = f" ({found.variety})" if found.variety else ""
        cost = f", said to be {found.loss_share:.1%}"
        said = f"{found.mode}{variety}, names {', '.join(found.named[:4]) or 'nobody'}"
    return (
        f"{outcome.task.cell} seed {outcome.task.seed}: {s.layout} {s.num_ranks} ranks, {s.num_steps} steps, {s.noise} "
        f"{s.level:.0%}, size {s.size:.0%}, costs {truth.fault_share:.1%} + noise {truth.noise_share:.1%}{cost}; "
        f"truth {' or '.join(truth.modes)}, {' = '.join(truth.culprits[:4]) or 'nobody'}; said {said}"
    )


def _show(outcomes: list[campaign.Outcome]) -> None:
    for text in campaign.tables(outcomes).values():
        if text.count("\n") > 1:
            print(text, end="\n\n")
    written = [outcome for outcome in outcomes if outcome.is_same_from_disk is not None]
    same = sum(bool(outcome.is_same_from_disk) for outcome in written)
    print(f"{same} of {len(written)} runs written to files and read back got the same verdict")
    for outcome in [outcome for outcome in outcomes if outcome.error][:5]:
        print(f"failed: {outcome.task.cell}, seed {outcome.task.seed}: {outcome.error}")


if __name__ == "__main__":
    main()
