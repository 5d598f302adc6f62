"""The scaling study in a lab of four hosts, each failure mode injected once, and its section of studies-lab.md.

Ranks sleep for their computation: a machine with fewer cores than ranks would otherwise disturb more than what is
injected. What is to be found is only in the plan, which the reports do not read.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.studies.document import SCALING_HEADING, markdown, versions
from experiments.studies.lab_set_up import REPOSITORY
from hpcpace.core.config import LabConfig
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.text import format_count
from hpcpace.lab.lab import Lab
from hpcpace.studies.jobs import FAULTS, HEALTHY, ScalingFolder, ScalingResult, ScalingRun, results

_SCRIPT = REPOSITORY / "sbatch" / "scaling_study.sh"
_NODES, _RANKS_PER_NODE, _LINK, _UPLINK = "1,4", "1", "1gbit", "2gbit"
_SWEEP = ("--nodes", _NODES, "--ranks-per-node", _RANKS_PER_NODE, "--oversubscriptions", "1,4")
# A short sequence: what ranks compute in addition to their sleep shares the machine's cores.
_TRAINING = ("--seq-len", "32")


def run_scaling(path: Path, *, lab_name: str, steps: int, timeout_s: float) -> list[ScalingResult]:
    """Do the open runs of the study, with a progress line, and return what all reports say.

    Args:
        path: folder of the study, not below /tmp.
        lab_name: of the lab that is booted where runs are open.
        steps: of each run.
        timeout_s: that all runs may take.

    Raises:
        HpcpaceError: runs are left.
    """
    study = ScalingFolder(path)
    if not study.plan_json.exists() or study.open_runs():
        options = [*_SWEEP, "--steps", str(steps), "--emulate", "--faults", "--", *_TRAINING]
        path.mkdir(parents=True, exist_ok=True)
        with Lab.up(LabConfig(name=lab_name, link=_LINK, uplink=_UPLINK)) as lab:
            subprocess.run(
                lab.command(["bash", _SCRIPT, path, *options], folder=path),
                # The audit that each job begins with is no part of the study.
                env={**lab.environ(), "HPCPACE_WORLD_START_TIMEOUT_S": "30", "HPCPACE_AUDIT": "off"},
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            )
    left = study.open_runs()
    if left:
        raise HpcpaceError(f"{len(left)} runs of {path} are left, the first is {left[0].name}: see {path}/*.out")
    return results(study)


def section(path: Path, found: Sequence[ScalingResult]) -> str:
    """Return the section of the document, with the days on which the runs were made.

    Args:
        path: folder of the study.
        found: what the reports say.
    """
    study = ScalingFolder(path)
    times_s = [study.run_dir(one.run).summary_json.stat().st_mtime for one in found]
    days = dict.fromkeys(time.strftime("%Y-%m-%d", time.gmtime(time_s)) for time_s in (min(times_s), max(times_s)))
    injected = [one for one in found if one.run.fault != HEALTHY]
    num_right = sum(one.is_found is True for one in injected)
    new = [one for one in injected if right_modes(study, one.run) - modes_without_fault(study, one.run)]
    return "\n\n".join(
        [
            SCALING_HEADING,
            f"Measured by `python -m experiments.studies --scaling --write` on {' to '.join(days)}: {len(found)} runs "
            f"of {found[0].run.steps} steps; {versions()}. GPT-2 tiny in data parallelism, one rank on each host of a "
            f"lab, links of {_LINK}, uplinks of {_UPLINK} or a fourth of it (`o4`). Each rank sleeps for "
            f"{found[0].run.step_ms} ms in each step, in addition to a little computation. "
            "[studies.md](studies.md#the-scaling-study) describes each fault and its correct findings.",
            f"The reports have {num_right} of {len(injected)} injected failure modes among their findings. In "
            f"{len(new)} of them, the same run without a fault does not have that finding. Only these are "
            "distinguished from a run without a fault; for the others, only the throughput shows that there is one.",
            scaling_table(study, found),
        ]
    )


def modes_of(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return all modes that the report of a run has found."""
    verdict = (study.summary(run) or {"verdict": {"mode": "", "findings": []}})["verdict"]
    return {verdict["mode"], *(finding["mode"] for finding in verdict["findings"])}


def right_modes(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return those that are right for what was injected into a run."""
    return modes_of(study, run) & set(FAULTS.get(run.fault, ()))


def modes_without_fault(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return the modes found in the run that is the same but for the fault."""
    return modes_of(study, dataclasses.replace(run, fault=HEALTHY))


def scaling_table(study: ScalingFolder, found: Sequence[ScalingResult]) -> str:
    """Return a table of what was injected and what the reports say."""
    lines = [
        [
            *(one.run.name, "" if one.run.fault == HEALTHY else one.run.fault),
            "" if one.samples_per_s is None else format_count(one.samples_per_s),
            "" if one.efficiency is None else f"{one.efficiency:.2f}",
            "" if one.step_ms is None else f"{one.step_ms:.4g} ms",
            "" if one.cv is None else f"{one.cv:.2f}",
            one.headline.replace("|", "/"),
            "" if one.run.fault == HEALTHY else _found(study, one.run),
        ]
        for one in found
    ]
    head = ["run", "injected", "tokens/s", "per node, relative", "step", "CV", "the report's first line"]
    return markdown([*head, "correct finding"], lines)


def _found(study: ScalingFolder, run: ScalingRun) -> str:
    before = modes_without_fault(study, run)
    words = [mode + (" (also without the fault)" if mode in before else "") for mode in sorted(right_modes(study, run))]
    return ", ".join(words) or "none"
