"""Scores the diagnosis on real jobs in the lab: `python -m experiments.score.lab_runs`. Needs root and Slurm.

Each case is a training job on four hosts, with real processes, a real network and the batch script's own report. Its
verdict is read from summary.json, as a program would, and judged against the injection or the lab's log of truth. With
`--keep` and `--minutes`, a campaign runs in stretches: a later call goes on with what is missing.

Options:
  --repetitions N  run each case this many times [1]
  --only CASE...   run only these cases
  --labs N         run this many jobs at a time, each in its own lab [2]
  --minutes X      begin no job after this time [inf]
  --keep PATH      keep runs and results in this folder; those there already count
  --write          write docs/results/diagnosis-lab.md, once nothing is missing
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import pages
from experiments.jobs import Rows, commit, hpcpace, teller
from experiments.labs import DrillJob, DrillSite, MisreadStart, truth_of
from experiments.options import command_line
from experiments.pages import ROOT
from experiments.score.lab_cases import CASES, JOB, Case, truth_of_case
from experiments.score.truth import Judgement, Truth, judge
from hpcpace.core.codec import convert
from hpcpace.core.errors import HpcpaceError
from hpcpace.diagnosis.summary import Culprit
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

_OUTCOMES = "outcomes.jsonl"
FOLDER = Path("/var/tmp")
"""Each host has its own /tmp; all hosts share this folder."""
JOB_TIMEOUT_S = 300.0
HANG_S = 3.0
_MAX_STARTS = 5
_HANG_WAIT_S = 8.0
"""Until a job that hangs is cancelled: more than `HANG_S`, and than twenty of its steps on a busy machine."""
_ENVIRON = {
    "HPCPACE_CLOCK_INTERVAL_S": "5",
    "HPCPACE_WORLD_START_TIMEOUT_S": "60",
    "HPCPACE_DIAGNOSIS_HANG_S": str(HANG_S),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one job; `error` says why there is no judgement.

    Attributes:
        is_mode_found: whether a right mode is among the findings, or the verdict is right without any.
        step_ms, cv: median step time and its coefficient of variation.
        is_same_without_lab: whether the run's verdict is the same once the lab and its log of truth are gone; None
            where that was not tried.
        load: of the machine while the job ran, of the last minute.
        commit: of the code.
    """

    case: Case
    judgement: Judgement | None = None
    modes: tuple[str, ...] = ()
    is_mode_found: bool = False
    headline: str = ""
    step_ms: float = 0.0
    cv: float = 0.0
    run: Path | None = None
    verdict: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_same_without_lab: bool | None = None
    load: float = 0.0
    commit: str = ""
    error: str = ""


def keep(outcome: Outcome, folder: Path) -> None:
    """Add an outcome to those in a folder; of several threads, one at a time."""
    Rows(folder / _OUTCOMES).add(_row_of(outcome))


def kept(folder: Path) -> list[Outcome]:
    """Return the outcomes in a folder, in the order in which they were added."""
    return [_outcome_of(row) for row in Rows(folder / _OUTCOMES).read()]


def change(folder: Path, changed: Callable[[Outcome], Outcome]) -> None:
    """Replace the outcomes in a folder by what a function makes of them."""
    Rows(folder / _OUTCOMES).write([_row_of(changed(outcome)) for outcome in kept(folder)])


def _row_of(outcome: Outcome) -> dict[str, Any]:
    judgement = None if outcome.judgement is None else dataclasses.asdict(outcome.judgement)
    values = {item.name: getattr(outcome, item.name) for item in dataclasses.fields(outcome)}
    return values | {"case": outcome.case.name, "judgement": judgement, "run": outcome.run and str(outcome.run)}


def _outcome_of(row: dict[str, Any]) -> Outcome:
    case = next(case for case in CASES if case.name == row["case"])
    found = row["judgement"]
    judgement = None if found is None else Judgement(**{**found, "named": tuple(found["named"])})
    run = Path(row["run"]) if row["run"] else None
    return Outcome(**{**row, "case": case, "judgement": judgement, "run": run, "modes": tuple(row["modes"])})


def missing(cases: Sequence[Case], outcomes: Sequence[Outcome], repetitions: int) -> list[Case]:
    """Return the cases that jobs are still to be run of, one of each in turn."""
    counts = Counter(outcome.case.name for outcome in outcomes)
    return [case for round_ in range(repetitions) for case in cases if counts[case.name] <= round_]


def line(outcome: Outcome) -> str:
    """Return a line on one job."""
    found = outcome.judgement
    if found is None:
        return f"{outcome.case.name}: FAILED: {' '.join(outcome.error.split())[:400]}"
    words = ["right mode" if found.is_mode_right else "right mode not first" if outcome.is_mode_found else "WRONG MODE"]
    if found.has_culprit:
        words.append("culprit found" if found.is_found else "culprit NOT found")
    if found.is_wrong:
        words.append("WRONG CULPRIT")
    return (
        f"{outcome.case.name}: {', '.join(words)}; said {' + '.join(outcome.modes)}, names "
        f"{', '.join(found.named) or 'nobody'}; step {outcome.step_ms:.0f} ms, CV {outcome.cv:.2f}"
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a row for each case that has outcomes."""
    rows = []
    for case in CASES:
        own = [outcome for outcome in outcomes if outcome.case.name == case.name]
        done = [(outcome, outcome.judgement) for outcome in own if outcome.judgement is not None]
        wanted = [found.is_found for _, found in done if found.has_culprit]
        of_all = f" of {len(own)}"
        row = [
            *(case.name, len(own), f"{sum(found.is_mode_right for _, found in done)}{of_all}"),
            *(
                f"{sum(outcome.is_mode_found for outcome, _ in done)}{of_all}",
                pages.counted(wanted) if wanted else "none",
            ),
            f"{sum(found.is_wrong for _, found in done)}{of_all}",
            f"{statistics.median(outcome.step_ms for outcome, _ in done):.0f} ms" if done else "-",
            f"{statistics.median(outcome.cv for outcome, _ in done):.2f}" if done else "-",
        ]
        rows += [row] if own else []
    head = ("case", "jobs", "mode comes first", "mode is found", "culprit", "somebody else", "step, median", "CV")
    return pages.table(head, rows)


def write_document(outcomes: Sequence[Outcome]) -> None:
    """Write docs/results/diagnosis-lab.md."""
    names = [case.name for case in CASES]
    loads = [outcome.load for outcome in outcomes]
    pages.write_page(
        "diagnosis-lab",
        command=pages.command("experiments.score.lab_runs"),
        num_jobs=len(outcomes),
        commits=", ".join(sorted({outcome.commit for outcome in outcomes})),
        loads=f"{min(loads):.1f} to {max(loads):.1f}",
        outcomes=table(outcomes),
        cases=pages.table(
            ("case", "what happens", "mode that is right"),
            [(case.name, case.title, " or ".join(case.modes)) for case in CASES],
        ),
        num_same=sum(outcome.is_same_without_lab is True for outcome in outcomes),
        said=pages.listed(
            f"{one.case.name}: {one.headline if one.judgement is not None else f'failed: {one.error[:300]}'}"
            for one in sorted(outcomes, key=lambda one: names.index(one.case.name))
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Said:
    """The verdict as summary.json has it, for the judge."""

    mode: str
    variety: str
    culprits: tuple[Culprit, ...]
    confidence: float


def main() -> None:
    args = command_line(__doc__, only=[case.name for case in CASES])
    if args.write and args.only:
        sys.exit("--write is for all cases")
    with tempfile.TemporaryDirectory(prefix="hpcpace-truth-", dir=FOLDER) as folder:
        where = args.keep.resolve() if args.keep else Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        cases = [case for case in CASES if not args.only or case.name in args.only]
        todo = missing(cases, kept(where), args.repetitions)
        if todo:
            _run_jobs(todo, where, num_labs=min(args.labs, len(todo)), max_s=args.minutes * 60)
        outcomes = kept(where)
    num_left = len(missing(cases, outcomes, args.repetitions))
    num_same = sum(outcome.is_same_without_lab is True for outcome in outcomes)
    print(f"{num_same} of {len(outcomes)} verdicts are the same without the lab; {num_left} jobs are left")
    if args.write and not num_left:
        write_document(outcomes)


def _run_jobs(todo: Sequence[Case], where: Path, *, num_labs: int, max_s: float) -> None:
    """Run a job of each case, in several labs at a time, and keep the results."""
    begin_s, lock, of_code = time.monotonic(), threading.Lock(), commit(ROOT)
    tell = teller(begin_s)
    left = queue.SimpleQueue[Case]()
    for case in todo:
        left.put(case)

    def run(number: int) -> None:
        of_lab = where / f"lab{number}"
        of_lab.mkdir(exist_ok=True)
        with suppress(queue.Empty):
            while time.monotonic() < begin_s + max_s:
                with Lab.up(lab_config(f"truth{number}")) as lab:
                    run_in(DrillSite(lab, of_lab))

    def run_in(site: DrillSite) -> None:
        """Run jobs until one fails: its fault may still be there, and the next job needs another lab."""
        is_sound = True
        while is_sound and time.monotonic() < begin_s + max_s:
            outcome = outcome_of(site, left.get_nowait())
            with lock:
                keep(dataclasses.replace(outcome, load=os.getloadavg()[0], commit=of_code), where)
            tell(line(outcome))
            is_sound = not outcome.error

    with ThreadPoolExecutor(num_labs) as pool:
        list(pool.map(run, range(num_labs)))
    change(where, reported_again)


def lab_config(name: str, *, share: tuple[str, ...] = ()) -> LabConfig:
    """Return the settings of a lab for these jobs: links fast enough for a tiny model not to be bound by them."""
    return LabConfig(name=name, tmp_size="32MiB", link="10gbit", uplink="10gbit", share=share)


def outcome_of(site: DrillSite, case: Case) -> Outcome:
    """Run a job of a case and judge its verdict; where that cannot be done, the outcome says why."""
    try:
        job, truth = run_case(site, case)
        return judged(case, truth, job.summary(), job.run.path)
    except (HpcpaceError, OSError, ValueError) as error:  # the boundary: the other cases go on
        site.end_jobs()
        return Outcome(case=case, error=str(error))


def run_case(site: DrillSite, case: Case) -> tuple[DrillJob, Truth]:
    """Run a job of a case to its end, and return it with what is right to say about it.

    Raises:
        HpcpaceError: it did not start, did not end, or its fault was refused.
        ValueError: the log of truth does not say that its fault happened.
    """
    for attempt in range(_MAX_STARTS):
        num_before = len(truth_of(site.lab))
        try:
            job = _run(site, case)
        except MisreadStart:
            if attempt == _MAX_STARTS - 1:
                raise
            site.end_jobs()  # its ranks wait for each other for ever
            continue
        return job, truth_of_case(case, truth_of(site.lab)[num_before:])
    raise AssertionError("unreachable")


def _run(site: DrillSite, case: Case) -> DrillJob:
    fault_ids = [site.fault(*case.fault)] if case.fault and case.is_early else []
    try:
        job = site.submit("--", *case.training, steps=case.num_steps, environ=_ENVIRON)
        job.wait_for_start()
        if case.fault and not case.is_early:
            job.wait_for_steps()
            _wait_for_step(job, case.num_before)
            fault_ids = [site.fault(*(str(job.job_id) if word == JOB else word for word in case.fault))]
        if case.is_cancelled or "--duration" in case.fault:
            fault_ids = []  # what has happened to a rank cannot be undone, and what ends by itself need not be
        if case.is_cancelled:
            time.sleep(_HANG_WAIT_S)
            site.queue.run("scancel", str(job.job_id))
        job.wait(JOB_TIMEOUT_S)
        return job
    finally:
        for fault_id in fault_ids:
            site.fault("undo", fault_id)


def _wait_for_step(job: DrillJob, step: int) -> None:
    """Wait until rank 0 has told in the log of a step, which it does of every tenth one."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    while f"step {step}/" not in job.log():
        if time.monotonic() > deadline_s:
            raise HpcpaceError(f"job {job.job_id} has not come to step {step}: {job.log()[-1000:]}")
        time.sleep(0.3)


def judged(case: Case, truth: Truth, summary: Mapping[str, Any], run: Path) -> Outcome:
    """Return what the verdict in a summary says."""
    verdict = summary["verdict"]
    modes = tuple(finding["mode"] for finding in verdict["findings"]) or (verdict["mode"],)
    return Outcome(
        case=case,
        judgement=judge(case.scenario, truth, said(verdict)),
        modes=modes,
        is_mode_found=bool(set(modes) & set(truth.modes)),
        headline=verdict["headline"],
        step_ms=summary["throughput"]["p50_ns"] / 1e6,
        cv=summary["throughput"]["cv"] or 0.0,
        run=run,
        verdict=verdict,
    )


def said(verdict: Mapping[str, Any]) -> Said:
    """Return a verdict of summary.json as the judge reads it."""
    return convert(verdict, Said)


def reported_again(outcome: Outcome) -> Outcome:
    """Report a run once more, now that the lab is down and its log of truth gone, and compare the verdicts."""
    if outcome.run is None or outcome.is_same_without_lab is not None:
        return outcome
    # Thresholds are settings of the report, and are taken from the environment.
    done = hpcpace("report", "--json", outcome.run, timeout_s=120, **_ENVIRON)
    is_same = bool(done.stdout) and json.loads(done.stdout)["verdict"] == outcome.verdict
    return dataclasses.replace(outcome, is_same_without_lab=is_same)


if __name__ == "__main__":
    main()
