"""Runs the nano-cluster and model-size studies in the lab: `make nano-cluster`; --scaling runs the scaling study.

Needs root and Slurm, and resumes where it stopped: finished runs stay in the folder of the study. --write updates its
part of docs/results/studies-lab.md.

Options:
  --folder PATH                   keep the study here, not below /tmp [/var/tmp/hpcpace-studies]
  --repetitions N                 [5]
  --sequence-ms X                 let a sequence of GPT-2 take this long, forward and backward [60]
  --seconds X                     choose steps so that a run takes about this long [6]
  --only nano-cluster|model-size  run this one alone
  --scaling                       run the scaling study only
  --name TEXT                     name the lab [studies]
  --write                         write docs/results/studies-lab.md at the end
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.library.figures import study_figures
from analysis.library.published import BATCH, read_published
from experiments.options import command_line
from experiments.pages import RESULTS, write_page, write_section
from experiments.studies import lab_set_up
from experiments.studies.document import PAGE, SCALING, TITLE, Measured, draw_plots, run_scaling, section, values_of
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.text import format_duration, nanoseconds
from hpcpace.studies.setups import Setup, StudyFolder, model_size_setups, repeated

PUBLISHED = lab_set_up.REPOSITORY / "tests" / "data" / "published" / "nano_cluster_gpt2_small.csv"
_START_S = 1.2
"""Time of a run in addition to its steps, for the printed estimate."""
_SCALING_STEPS = 120
_PAUSE_S = 180.0
"""Longer than any run, and than the start of a layout's job: a longer gap was an interruption."""


def main() -> None:
    args = command_line(__doc__)
    if args.only and (args.write or args.scaling):
        sys.exit("--only goes with neither --write, which is for both studies, nor --scaling")
    if not args.sequence_ms > 0:
        sys.exit("--sequence-ms is a time above 0")
    stop_on_signals()
    if os.getloadavg()[0] > 1:
        print(f"warning: load average {os.getloadavg()[0]:.1f}: next to other work, ranks may compute for longer")
    begin_s = time.monotonic()
    try:
        scaling_study(args) if args.scaling else paper_studies(args)
    except HpcpaceError as error:
        sys.exit(f"error: {error}")
    print(f"done in {format_duration(nanoseconds(time.monotonic() - begin_s))}")


def paper_studies(args: argparse.Namespace) -> None:
    """Run the nano-cluster study and that of model sizes."""
    found = lab_set_up.set_up(read_published(PUBLISHED), sequence_ms=args.sequence_ms)
    print("\n".join(found.lines()), flush=True)
    studies = {}
    for name in [args.only] if args.only else ["nano-cluster", "model-size"]:
        studies[name] = planned_study(args.folder / name, name, found, args.repetitions, args.seconds)
    if any(study.open_runs() for study in studies.values()):
        with lab_set_up.study_lab(args.name, link_bps=found.link_bps) as lab:
            for study in studies.values():
                lab_set_up.run_study(lab, study, timeout_s=3 * 3600)
    if args.write:
        figures = {name: study_figures(study)[0] for name, study in studies.items()}
        times_s = {name: measured_at(study) for name, study in studies.items()}
        when = Measured(
            begin_s=min(times[0] for times in times_s.values()),
            end_s=max(times[-1] for times in times_s.values()),
            busy_s={name: busy_s(times) for name, times in times_s.items()},
        )
        draw_plots(studies, RESULTS / PAGE)
        values = values_of(figures, found, published=read_published(PUBLISHED), when=when)
        write_page(PAGE, others=[SCALING], **values)


def scaling_study(args: argparse.Namespace) -> None:
    """Run the scaling study with each failure mode."""
    path = args.folder / "scaling"
    found = run_scaling(path, lab_name=args.name, steps=_SCALING_STEPS, timeout_s=1800)
    if args.write:
        write_section(PAGE, section(path, found), title=TITLE)


def planned_study(path: Path, name: str, found: lab_set_up.SetUp, repetitions: int, duration_s: float) -> StudyFolder:
    """Write the plan of a study, with as many steps of each set-up as take about a time, and say what it takes."""
    study, facts = StudyFolder(path), found.facts()
    setups = model_size_setups(batch=BATCH, shrink=lab_set_up.SHRINK, warmup_steps=2)
    if name == "nano-cluster":
        setups = lab_set_up.lab_sweep().setups()

    def steps_of(setup: Setup) -> int:
        return lab_set_up.steps_for(setup, found.link_bps, duration_s)

    setups = [found.emulated(setup) for setup in setups]
    study.write_plan(name, repeated(setups, repetitions, steps_of=steps_of), facts=facts)
    if study.facts() != facts:
        raise UsageError(f"{path} was planned with {study.facts()}, and now it is {facts}: remove it, or name another")
    left = study.open_runs()
    expected_s = sum(_START_S + run.setup.steps * lab_set_up.expected_step_s(run.setup, found.link_bps) for run in left)
    print(f"{name}: {len(left)} of {len(study.runs())} runs to do, about {expected_s / 60:.0f} min", flush=True)
    return study


def measured_at(study: StudyFolder) -> list[float]:
    """Return when runs began and ended, in seconds since 1970, ascending, by the times of their files."""
    attempts = [attempt for run in study.runs() for attempt in study.run_dir(run).attempts()]
    files = [path for attempt in attempts for path in (attempt.run_json, attempt.result_json)]
    return sorted(path.stat().st_mtime for path in files if path.exists())


def busy_s(times_s: Sequence[float]) -> float:
    """Return the seconds between the first time and the last, without gaps in which the studies were stopped."""
    gaps_s = (after - before for before, after in itertools.pairwise(times_s))
    return sum(gap_s for gap_s in gaps_s if gap_s < _PAUSE_S)


def stop_on_signals() -> None:
    """Let a signal that ends this program bring the lab down first, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


if __name__ == "__main__":
    main()
