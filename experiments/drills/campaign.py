"""Repeats a drill in its own lab: checks the lab after each repetition, and runs a healthy job after the last."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.drills.cluster import START_TIMEOUT_S, DrillSite, MisreadStart
from experiments.drills.evidence import REPORT_TITLE
from experiments.drills.kinds import ENVIRON, MOST_MISREAD, Drill, Outcome, repetition
from hpcpace.config import LabConfig
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab

FOLDER = Path("/var/tmp")
"""Each host has its own /tmp; all hosts share this folder."""
TMP_SIZE = "32MiB"

Tell = Callable[[str], None]


def drill_lab(name: str) -> LabConfig:
    """Return the settings of a lab for drills."""
    return LabConfig(name=name, tmp_size=TMP_SIZE)


def run_drill(drill: Drill, *, repetitions: int, tell: Tell) -> list[Outcome]:
    """Boot a lab, do the repetitions of a drill, and see that a healthy job completes afterwards.

    Where the lab itself fails, that is the problem of all repetitions.
    """
    try:
        return _in_a_lab(drill, repetitions=repetitions, tell=tell)
    except HpcpaceError as error:
        tell(f"{drill.name}: FAILED: {error}")
        return [Outcome(time_s=None, num_lost=None, said="", problems=(str(error),))] * repetitions


def _in_a_lab(drill: Drill, *, repetitions: int, tell: Tell) -> list[Outcome]:
    with (
        tempfile.TemporaryDirectory(prefix="hpcpace-drill-", dir=FOLDER) as folder,
        Lab.up(drill_lab(f"drill-{drill.name}")) as lab,
    ):
        site = DrillSite(lab, Path(folder))

        def one(number: int) -> Outcome:
            outcome = well_again(site, repetition(site, drill))
            time_s = "unknown" if outcome.time_s is None else f"{outcome.time_s:.1f} s"
            tell(f"{drill.name} {number + 1}/{repetitions}: {drill.timed} {time_s}, lost {outcome.num_lost}")
            for problem in outcome.problems:
                tell(f"{drill.name} {number + 1}/{repetitions}: FAILED: {problem}")
            return outcome

        with ThreadPoolExecutor(drill.at_once) as pool:
            outcomes = list(pool.map(one, range(repetitions)))
        problem, num_misread = healthy_job(site)
        last = outcomes[-1]
        if problem:
            tell(f"{drill.name}: FAILED: {problem}")
            last = dataclasses.replace(last, problems=(*last.problems, problem))
        outcomes[-1] = dataclasses.replace(last, num_misread=last.num_misread + num_misread)
        return outcomes


def well_again(site: DrillSite, outcome: Outcome) -> Outcome:
    """Return an outcome with one problem more where the lab does not get well after it."""
    problem = site.wait_until_well()
    return dataclasses.replace(outcome, problems=(*outcome.problems, problem)) if problem else outcome


def healthy_job(site: DrillSite) -> tuple[str, int]:
    """Run a short job on all hosts; return what is wrong with it, else nothing, and how many did not start before."""
    for num_misread in range(MOST_MISREAD):
        try:
            job = site.submit(steps=6, environ=ENVIRON)
            job.wait_for_start()
            ended, _ = job.wait(START_TIMEOUT_S)
        except MisreadStart:
            continue
        except HpcpaceError as error:
            return f"the job after the drill: {error}", num_misread
        # Six steps are too few for a verdict; what is missing would stand in the log.
        if ended.state == "COMPLETED" and job.report_status() in (0, 1, 3) and REPORT_TITLE not in job.log():
            return "", num_misread
        return f"the job after the drill is {ended.state}; its log:\n{job.log()}", num_misread
    return f"{MOST_MISREAD} jobs after the drill did not start", MOST_MISREAD
