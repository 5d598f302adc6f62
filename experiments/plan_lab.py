"""Changes to a job in a lab, predicted from one traced run before each of them is run.

`python -m experiments.plan_lab [--folder FOLDER] [--write]` boots labs of two hosts with a core each and trains GPT-2
tiny by `hpcpace train`. It needs root, Slurm, two cores with nothing else to do, and some six minutes. See
docs/results/plan.md.

Options:
  --folder PATH  keep runs here; runs that are there are not done again
  --write        put the section into docs/results/plan.md
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from hpcpace.planning.of_run import MeasuredRun, measure_run
from hpcpace.planning.steps import steps_of

_MBIT = 100
_STEPS, _TIMEOUT_S = 60, 180.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to the first job: data parallelism over two hosts, 8 sequences, 100 Mb/s.

    Attributes:
        name: in the table.
        options: of `hpcpace train gpt2`, in place of the first job's.
        layout: columns of its layout.
        job: attributes of the job that is planned.
        mbit: of the link.
    """

    name: str
    options: str
    layout: dict[str, int]
    job: dict[str, Any] = field(default_factory=dict)
    mbit: int = _MBIT


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        _run_all(folder)
        text = section(folder)
    print(text)
    if args.write:
        write_section("plan", text)


def _path(folder: Path, change: Change) -> Path:
    return folder / change.name.replace(" ", "-").replace(",", "")


_CASES = read_toml(__file__)
FIRST, *CHANGES = cases_of(Change, _CASES["change"])


def _run_all(folder: Path) -> None:
    for mbit in (_MBIT, 50, 200):
        left = [one for one in (FIRST, *CHANGES) if one.mbit == mbit and not _path(folder, one).exists()]
        if left:
            with Lab.up(LabConfig(name="plan", hosts=2, leaves=1, cpus_per_host=1, link=f"{mbit}mbit")) as lab:
                for one in left:
                    words = f"hpcpace train gpt2 --preset tiny --steps {_STEPS} --batch-size 8 {one.options}"
                    words += f" --run-dir {_path(folder, one)}"
                    job = JobQueue(lab).run_ranks(words, nodes=2, cwd=folder, timeout_s=_TIMEOUT_S)
                    print(f"  {one.name}: {job.state}", flush=True)


def section(folder: Path) -> str:
    """Return the section of the page: each change, predicted and run."""
    first = measure_run(hpcpace.load(_path(folder, FIRST), warns=False), None)
    rows, inside, steps = [], [], {FIRST.name: (first.step_s, first.step_s)}
    assert first.known.error is not None
    for change in CHANGES:
        steps[change.name] = predicted_s, measured_s = predicted(first, change), median_step_s(_path(folder, change))
        ways = OTHER_WAYS if change.layout.get("pp", 1) * change.layout.get("tp", 1) > 1 else 1.0
        inside.append(abs(math.log(measured_s / predicted_s)) <= ways * first.known.error)
        cells = (f"{1e3 * predicted_s:.0f} ms", f"{1e3 * measured_s:.0f} ms", percent(predicted_s / measured_s - 1, 0))
        rows.append((change.name, *cells, "yes" if inside[-1] else "no"))
    counts = {"inside": counted(inside), "best": counted(_best(steps))}
    return page("plan-lab", first=first, mbit=_MBIT, other_ways=OTHER_WAYS, rows=rows, **counts)


def _best(steps: dict[str, tuple[float, float]]) -> Iterable[bool]:
    """Return of each contest whether the change that is predicted to be fastest is so."""
    return [
        min(names, key=lambda name: steps[name][0]) == min(names, key=lambda name: steps[name][1])
        for names in _CASES["contests"]
    ]


def predicted(first: MeasuredRun, change: Change) -> float:
    """Return seconds of a step after a change, from the first run."""
    machine = first.job.machine.scaled(network_rate=change.mbit / _MBIT)
    job = replace(first.job.on(machine), **change.job)
    columns = {"element_bytes": 4, **change.layout}
    return float(steps_of(job, Layouts.of(**columns)).step_s[0]) * first.correction


def median_step_s(path: Path) -> float:
    """Return the median step of a run, seconds; of local SGD the mean, since only some of its steps exchange."""
    times: list[Any] = [block["step_time_ns"] for block in hpcpace.load(path, warns=False).columns("steps")]
    times_ns = np.concatenate(times).astype(float)
    return float(np.mean(times_ns) if "local-SGD" in path.name else np.median(times_ns)) / 1e9


if __name__ == "__main__":
    main()
