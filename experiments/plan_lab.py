"""Changes to a job in a lab, predicted from one traced run before each of them is run.

`python -m experiments.plan_lab [--folder FOLDER] [--write]` boots labs of two hosts with a core each and trains GPT-2
tiny by `hpcpace train`. It needs root, Slurm, two cores with nothing else to do, and some six minutes. See
docs/results/plan.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import hpcpace
from experiments.labs import JobQueue
from experiments.pages import RESULTS, command, counted, machine, table, today, with_section
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.planning.answer import OTHER_WAYS
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.of_run import MeasuredRun, measure_run
from hpcpace.planning.steps import steps_of

_MBIT = 100
_STEPS, _TIMEOUT_S = 60, 180.0
_HEADING = "## In the lab"


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
    options: tuple[str, ...]
    layout: dict[str, int]
    job: dict[str, Any] = field(default_factory=dict)
    mbit: int = _MBIT


def _dp(batch: int = 8, **more: int) -> dict[str, int]:
    return {"dp": 2, "micro_batch": batch // 2, **more}


def _pp(num_micro: int, batch: int = 8) -> dict[str, int]:
    return {"pp": 2, "micro_batch": batch // num_micro, "num_micro": num_micro}


FIRST = Change(name="first job", options=("--mesh", "dp=2"), layout=_dp())
CHANGES = (
    Change(name="batch doubled", options=("--mesh", "dp=2", "--batch-size", "16"), layout=_dp(16)),
    Change(name="batch halved", options=("--mesh", "dp=2", "--batch-size", "4"), layout=_dp(4)),
    Change(
        name="gradients in 2 bytes", options=("--mesh", "dp=2", "--compress", "fp16"), layout=_dp(),
        job={"gradient_bytes": 2},
    ),
    Change(
        name="local SGD, every 4 steps", options=("--mesh", "dp=2", "--sync-every", "4"), layout=_dp(),
        job={"sync_every": 4},
    ),
    Change(name="no overlap", options=("--mesh", "dp=2", "--no-overlap"), layout=_dp(), job={"overlaps": False}),
    Change(name="pipeline, 4 microbatches", options=("--mesh", "pp=2", "--microbatches", "4"), layout=_pp(4)),
    Change(name="pipeline, 8 microbatches", options=("--mesh", "pp=2", "--microbatches", "8"), layout=_pp(8)),
    Change(name="pipeline, 2 microbatches", options=("--mesh", "pp=2", "--microbatches", "2"), layout=_pp(2)),
    Change(name="tensor parallelism", options=("--mesh", "tp=2"), layout={"tp": 2, "micro_batch": 8}),
    Change(name="link halved", options=FIRST.options, layout=_dp(), mbit=50),
    Change(name="second link", options=FIRST.options, layout=_dp(), mbit=200),
    Change(
        name="second link, pipeline of 4", options=("--mesh", "pp=2", "--microbatches", "4"), layout=_pp(4), mbit=200,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.plan_lab", description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep runs here; runs that are there are not done again")
    parser.add_argument("--write", action="store_true", help="put the section into docs/results/plan.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        _run_all(folder)
        text = section(folder)
    print(text)
    if args.write:
        path = RESULTS / "plan.md"
        path.write_text(with_section(path.read_text(), text))


def _path(folder: Path, change: Change) -> Path:
    return folder / change.name.replace(" ", "-").replace(",", "")


def _run_all(folder: Path) -> None:
    for mbit in (_MBIT, 50, 200):
        left = [one for one in (FIRST, *CHANGES) if one.mbit == mbit and not _path(folder, one).exists()]
        if left:
            with Lab.up(LabConfig(name="plan", hosts=2, leaves=1, cpus_per_host=1, link=f"{mbit}mbit")) as lab:
                for one in left:
                    _run(JobQueue(lab), folder, one)


def _run(queue: JobQueue, folder: Path, change: Change) -> None:
    words = ["hpcpace", "train", "gpt2", "--preset", "tiny", "--steps", str(_STEPS), "--batch-size", "8"]
    words += [*change.options, "--run-dir", str(_path(folder, change))]
    environ = {
        "OMP_NUM_THREADS": "1",
        "HPCPACE_AUDIT": "off",
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    job_id = queue.submit(
        *("-N2", "--ntasks-per-node=1", "--no-requeue", "--output=%j.out"),
        f"--wrap=srun --mpi=pmi2 {' '.join(words)}",
        cwd=folder,
        environ=environ,
    )
    job = queue.wait(job_id, timeout_s=_TIMEOUT_S)
    print(f"  {change.name}: {job.state}", flush=True)


def section(folder: Path) -> str:
    """Return the section of the page: each change, predicted and run."""
    first = measure_run(hpcpace.load(_path(folder, FIRST), warns=False), None)
    rows, inside, steps = [], [], {}
    assert first.known.error is not None
    for change in CHANGES:
        predicted_s, measured_s = predicted(first, change), median_step_s(_path(folder, change))
        ways = OTHER_WAYS if change.layout.get("pp", 1) * change.layout.get("tp", 1) > 1 else 1.0
        inside.append(abs(math.log(measured_s / predicted_s)) <= ways * first.known.error)
        steps[change.name] = (predicted_s, measured_s)
        off = f"{100 * (predicted_s / measured_s - 1):+.0f} %"
        rows.append(
            (
                change.name,
                f"{1e3 * predicted_s:.0f} ms",
                f"{1e3 * measured_s:.0f} ms",
                off,
                "yes" if inside[-1] else "no",
            )
        )
    steps[FIRST.name] = (first.step_s, first.step_s)
    return "\n\n".join(
        [
            _HEADING,
            f"`{command('experiments.plan_lab')}`, {today()}: {machine('torch')}. GPT-2 tiny on two hosts with a core "
            f"each and {_MBIT} Mb/s. The first job, data parallelism with 8 sequences, took "
            f"{1e3 * first.step_s:.0f} ms a step, and its constants alone say "
            f"{1e3 * first.step_s / first.correction:.0f} ms. Intervals reach {100 * first.known.error:.0f} % to each "
            f"side, {OTHER_WAYS:g} times that for other ways of parallelism. Every change was predicted from this job "
            "alone.",
            table(("change", "predicted", "run", "off", "inside"), rows),
            f"Inside: {counted(inside)}. Best of some layouts, predicted and run: {counted(_best(steps))}.",
        ]
    )


_CONTESTS = (
    ("first job", "pipeline, 4 microbatches", "tensor parallelism"),
    ("pipeline, 2 microbatches", "pipeline, 4 microbatches", "pipeline, 8 microbatches"),
    ("first job", "gradients in 2 bytes", "local SGD, every 4 steps"),
    ("first job", "no overlap"),
    ("second link", "second link, pipeline of 4"),
    ("first job", "link halved", "second link"),
)


def _best(steps: dict[str, tuple[float, float]]) -> Iterable[bool]:
    """Return of each contest whether the change that is predicted to be fastest is so."""
    return [
        min(names, key=lambda name: steps[name][0]) == min(names, key=lambda name: steps[name][1])
        for names in _CONTESTS
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
