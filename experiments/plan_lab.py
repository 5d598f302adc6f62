"""Changes to a job in a lab, predicted from one traced run before each of them is run.

`python -m experiments.plan_lab [--folder FOLDER] [--write]` boots labs of two to eight hosts and trains GPT-2 tiny by
`hpcpace train`. It needs root, Slurm, two cores with nothing else to do, and some 20 minutes. See docs/results/plan.md.

Options:
  --folder PATH  keep runs here; runs that are there are not done again
  --write        put the section into docs/results/plan.md
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import hpcpace
from experiments.labs import JobQueue
from experiments.options import command_line
from experiments.pages import cases_of, counted, page, percent, read_toml, write_section
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.planning.answer import OTHER_WAYS
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.of_run import PlannedRun, measure_run
from hpcpace.planning.steps import steps_of

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to the first job of its set.

    Attributes:
        name: in the table.
        options: of `hpcpace train gpt2`, in place of the first job's.
        layout: columns of its layout.
        job: attributes of the job that is planned.
        hosts: on which it runs; 0 for those of the set.
        mbit: of a host's link.
        uplink_mbit: of a leaf's; 0 for what its hosts send.
    """

    name: str
    options: str
    layout: dict[str, int]
    job: dict[str, Any] = field(default_factory=dict)
    hosts: int = 0
    mbit: int = 100
    uplink_mbit: int = 0


@dataclass(frozen=True, kw_only=True)
class Set:
    """A first job, and changes to it that are predicted from its trace.

    Attributes:
        name, about, note: title, description, and what else is to be known.
        common: options of all jobs.
        hosts: of the first job.
        leaf_hosts: below each leaf switch.
        cpus_per_host: that each has in Slurm.
        contests: names of changes, of which one is the fastest.
        change: the first job, and then the changes.
    """

    name: str
    about: str
    note: str = ""
    common: str
    hosts: int
    leaf_hosts: int
    cpus_per_host: int
    contests: tuple[tuple[str, ...], ...]
    change: tuple[dict[str, Any], ...]

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The first job, and then the changes."""
        return cases_of(Change, self.change)

    def lab_of(self, change: Change) -> LabConfig:
        """Return the lab in which a change runs."""
        hosts = change.hosts or self.hosts
        uplink = change.uplink_mbit or self.leaf_hosts * change.mbit
        return LabConfig(
            name="plan",
            hosts=hosts,
            leaves=-(-hosts // self.leaf_hosts),
            cpus_per_host=self.cpus_per_host,
            link=f"{change.mbit}mbit",
            uplink=f"{uplink}mbit",
        )

    def folder_of(self, folder: Path, change: Change) -> Path:
        """Return where the run of a change is kept."""
        return folder / re.sub("[^a-z0-9]+", "-", f"{self.name} {change.name}".lower())


SETS = cases_of(Set, read_toml(__file__)["set"])


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for jobs in SETS:
            _run_all(jobs, folder)
        text = section(folder)
    print(text)
    if args.write:
        write_section("plan", text)


def _run_all(jobs: Set, folder: Path) -> None:
    """Run what has not been run, in one lab after the other."""
    left = [change for change in jobs.changes if not jobs.folder_of(folder, change).exists()]
    for settings in dict.fromkeys(map(jobs.lab_of, left)):
        with Lab.up(settings) as lab:
            for change in left:
                if jobs.lab_of(change) == settings:
                    path = jobs.folder_of(folder, change)
                    words = f"hpcpace train gpt2 {jobs.common} {change.options} --run-dir {path}"
                    job = JobQueue(lab).run_ranks(words, nodes=settings.hosts, cwd=folder, timeout_s=_TIMEOUT_S)
                    print(f"  {jobs.name}, {change.name}: {job.state}", flush=True)


def section(folder: Path) -> str:
    """Return the section of the page: each change, predicted and run."""
    return page("plan-lab", other_ways=OTHER_WAYS, sets=[_of_set(jobs, folder) for jobs in SETS])


def _of_set(jobs: Set, folder: Path) -> dict[str, Any]:
    """Return what the section says of a set."""
    first_change, *changes = jobs.changes
    first = measure_run(hpcpace.load(jobs.folder_of(folder, first_change), warns=False), None)
    rows, inside, steps = [], [], {first_change.name: (first.step_s, first.step_s)}
    assert first.known.error is not None
    for change in changes:
        measured_s = median_step_s(jobs.folder_of(folder, change), change)
        steps[change.name] = predicted_s, _ = predicted(jobs, first, change), measured_s
        ways = OTHER_WAYS if change.layout.get("pp", 1) * change.layout.get("tp", 1) > 1 else 1.0
        inside.append(abs(math.log(measured_s / predicted_s)) <= ways * first.known.error)
        cells = (f"{1e3 * predicted_s:.0f} ms", f"{1e3 * measured_s:.0f} ms", percent(predicted_s / measured_s - 1, 0))
        rows.append((change.name, *cells, "yes" if inside[-1] else "no"))
    best = counted(_best(jobs.contests, steps))
    return {
        "name": jobs.name,
        "about": jobs.about,
        "note": jobs.note,
        "first": first,
        "rows": rows,
        "inside": counted(inside),
        "best": best,
    }


def _best(contests: Iterable[tuple[str, ...]], steps: dict[str, tuple[float, float]]) -> Iterable[bool]:
    """Return of each contest whether the change that is predicted to be fastest is so."""
    return [
        min(names, key=lambda name: steps[name][0]) == min(names, key=lambda name: steps[name][1]) for names in contests
    ]


def predicted(jobs: Set, first: PlannedRun, change: Change) -> float:
    """Return seconds of a step after a change, from the first run."""
    machine = first.job.machine.scaled(network_rate=change.mbit / jobs.changes[0].mbit)
    if change.uplink_mbit:
        narrower = jobs.leaf_hosts * change.mbit / change.uplink_mbit
        machine = replace(machine, oversubscription=narrower, leaf_nodes=jobs.leaf_hosts)
    job = replace(first.job.on(machine), **change.job)
    columns = {"element_bytes": 4, **change.layout}
    return float(steps_of(job, Layouts.of(**columns)).step_s[0]) * first.correction


def median_step_s(path: Path, change: Change) -> float:
    """Return the median step of a run, seconds; of local SGD the mean, since only some of its steps exchange."""
    times: list[Any] = [block["step_time_ns"] for block in hpcpace.load(path, warns=False).columns("steps")]
    times_ns = np.concatenate(times).astype(float)
    return float(np.mean(times_ns) if "sync_every" in change.job else np.median(times_ns)) / 1e9


if __name__ == "__main__":
    main()
