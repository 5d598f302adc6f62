"""Jobs whose ranks were placed badly in a lab: what `hpcpace place` predicts, and what they then take and send.

`python -m experiments.place_lab [--folder FOLDER] [--write]` boots a lab of eight hosts, runs each job once and asks
`hpcpace place`; where that moves ranks, the job runs twice more with each placement, in turn. It needs root,
Slurm, two cores with nothing else to do, and some 20 minutes. See docs/results/placement.md.

Options:
  --folder PATH  keep runs here; jobs that are there are not done again
  --write        put the section into docs/results/placement.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.labs import ALONE, JobQueue
from experiments.options import command_line
from experiments.pages import cases_of, counted, page, read_toml, write_section
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

_LAB = LabConfig(name="place", hosts=8, leaves=2, cpus_per_host=2, link="100mbit", uplink="100mbit")
_COMMON, _STEPS, _TIMEOUT_S = "--preset tiny --compute-ms 160", 20, 300.0
_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job.

    Attributes:
        name: in the table.
        options: of `hpcpace train gpt2`.
        placement: name of the hosts of its ranks.
    """

    name: str
    options: str
    placement: str


_CASES = read_toml(__file__)
JOBS = cases_of(Job, _CASES["job"])


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        left = [number for number in range(len(JOBS)) if not (folder / f"{number}.json").exists()]
        if left:
            with Lab.up(_LAB) as lab:
                for number in left:
                    found = _Trial(lab, folder / str(number)).result(JOBS[number])
                    (folder / f"{number}.json").write_text(json.dumps(found))
                    print(f"  {JOBS[number].name}: {found}", flush=True)
        text = section([json.loads((folder / f"{number}.json").read_text()) for number in range(len(JOBS))])
    print(text)
    if args.write:
        write_section("placement", text)


class _Trial:
    """The runs of a job with two placements."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._queue, self._folder = lab, JobQueue(lab), folder
        folder.mkdir(exist_ok=True)

    def result(self, job: Job) -> dict[str, Any]:
        """Return what was predicted and measured."""
        before, after = self._folder / "before.txt", self._folder / "after.txt"
        before.write_text("\n".join(_CASES[job.placement]) + "\n")
        self._run(job, "first", before)
        found: dict[str, Any] = {"predicted": self._hpcpace("place", "first", "--json", "--output", str(after))}
        if found["predicted"]["is_kept"]:
            return found
        sent: dict[str, list[float]] = {"before": [], "after": []}
        for repeat in range(_REPEATS):
            # Whichever comes first may have colder caches.
            for which in ("before", "after") if repeat % 2 else ("after", "before"):
                sent[which].append(self._run(job, f"{which}-{repeat}", self._folder / f"{which}.txt"))
        sides = [[f"{which}-{repeat}" for repeat in range(_REPEATS)] for which in ("before", "after")]
        compared = self._hpcpace("compare", "--json", *sides[0], "--", *sides[1])
        measured = {name: compared[name] for name in ("share", "interval")}
        return {**found, "sent": {which: sum(each) / len(each) for which, each in sent.items()}, **measured}

    def _run(self, job: Job, name: str, placement: Path) -> float:
        """Run the job with a placement; return the bytes that it sent over the uplink of a leaf, both ways, a step."""
        before = self._uplink_bytes()
        words = f"hpcpace batch -- train gpt2 {_COMMON} --steps {_STEPS} {job.options}"
        options = (f"-N{_LAB.hosts}", "--ntasks-per-node=1", "--no-requeue", "--output=%j.out", f"--wrap={words}")
        where = {"HPCPACE_PLACEMENT": str(placement), "HPCPACE_RUN_DIR": str(self._folder / name)}
        job_id = self._queue.submit(*options, cwd=self._folder, environ={**ALONE, **where})
        done = self._queue.wait(job_id, timeout_s=_TIMEOUT_S)
        if done.state != "COMPLETED":
            raise HpcpaceError(f"{job.name}, {name}: {done.state}\n{done.output.read_text()}")
        return (self._uplink_bytes() - before) / _STEPS

    def _uplink_bytes(self) -> int:
        links = self._hpcpace("lab", "status", "--json")["links"]
        return sum(link["tx_bytes"] + link["rx_bytes"] for link in links if link["name"] == "leaf1")

    def _hpcpace(self, *words: str) -> Any:
        """Return what a command of hpcpace prints as JSON, in the lab."""
        named = [str(self._folder / word) if (self._folder / word).is_dir() else word for word in words]
        done = self._lab.run(sys.executable, "-P", "-m", "hpcpace", *named)
        if not done.stdout:
            raise HpcpaceError(f"hpcpace {' '.join(words)} says nothing: {done.stderr}")
        return json.loads(done.stdout)


def section(results: list[dict[str, Any]]) -> str:
    """Return the section of the page."""
    tried = [(job, each) for job, each in zip(JOBS, results, strict=True) if not each["predicted"]["is_kept"]]
    kept = [job.name for job, each in zip(JOBS, results, strict=True) if each["predicted"]["is_kept"]]
    inside = [_is_inside(each) for _, each in tried]
    shorter = [each["interval"][1] < 0 for _, each in tried]
    counts = {"inside": counted(inside), "shorter": counted(shorter)}
    return page("place-lab", steps=_STEPS, repeats=_REPEATS, tried=tried, kept=kept, **counts)


def _is_inside(result: dict[str, Any]) -> bool:
    """Return whether the measured change is within the predicted interval."""
    step = result["predicted"]["step_time"]
    return bool(step["low"] <= result["share"] <= step["high"])


if __name__ == "__main__":
    main()
