"""Runs the steps as processes of their own, each within its limit and all within one, and keeps what they found.

The folder of results has two files, written anew after each step: results.json, and logs.tar.gz with all logs. What the
jobs leave behind, such as traces and profiles, stays in the folder for work.

Its cells are the figures that the page shows.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from experiments.gpu.place import figures_file
from experiments.pages import cases_of, read_toml

RESULTS, LOGS = "results.json", "logs.tar.gz"
OK, FAILED, TIMEOUT, SKIPPED = "ok", "failed", "timeout", "skipped"
_MIN_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a step came to.

    Attributes:
        step: its name.
        status: ok, failed, timeout or skipped; a figure that is not as hoped for is ok.
        figures: by name, also of a step that failed later.
        reason: why it is not ok.
    """

    step: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs steps.

    Attributes:
        out: folder of the results.
        work: folder of everything else.
        options: of this package, for the process of each step.
        budget_s: seconds for all steps.
        factor: on the limit of each step.
        program: runs a step given by `--inside`.
        clock: returns seconds.
    """

    out: Path
    work: Path
    options: Sequence[str]
    budget_s: float
    factor: float = 1.0
    program: Sequence[str] = (sys.executable, "-m", "experiments.gpu")
    clock: Callable[[], float] = time.monotonic

    def run(self, steps: Sequence[Step], facts: dict[str, Any]) -> list[Result]:
        """Run steps one after the other and return their results; those of an earlier run of other steps are kept."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        begin_s, results = self.clock(), []
        for step in steps:
            left_s = self.budget_s - (self.clock() - begin_s)
            if left_s < _MIN_S:
                result = Result(
                    step=step.name, status=SKIPPED, reason=f"the budget of {self.budget_s:.0f} s is used up"
                )
            else:
                result = self._run_step(step, min(self.factor * step.limit_s, left_s))
            results.append(result)
            self._keep(result, facts)
            print(line(result), flush=True)
        return results

    def _run_step(self, step: Step, limit_s: float) -> Result:
        folder = self.work / step.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [*self.program, "--inside", step.name, *self.options]
        status, reason, begin_s = OK, "", self.clock()
        others = psutil.Process().children(recursive=True)
        with self._log(step.name).open("w") as log:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                if child.wait(limit_s):
                    status, reason = FAILED, self._last_line(step.name)
            except subprocess.TimeoutExpired:
                status, reason = TIMEOUT, f"not finished after {limit_s:.0f} s"
            finally:
                _end_children(others)
                child.wait()
        figures = {}
        with suppress(OSError, ValueError):
            figures = json.loads(figures_file(folder).read_text())
        seconds = round(self.clock() - begin_s, 1)
        return Result(step=step.name, status=status, seconds=seconds, figures=figures, reason=reason)

    def _log(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def _last_line(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return (lines or ["no output"])[-1][:300]

    def _keep(self, result: Result, facts: dict[str, Any]) -> None:
        path = self.out / RESULTS
        kept: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            kept = json.loads(path.read_text()).get("steps", {})
        steps = kept | {result.step: asdict(result)}
        content = facts | {"date": f"{datetime.now(UTC):%Y-%m-%d}", "steps": dict(sorted(steps.items()))}
        path.write_text(json.dumps(content, indent=1) + "\n")
        with tarfile.open(self.out / LOGS, "w:gz") as archive:
            for log in sorted(self.work.glob("*.log")):
                archive.add(log, log.name)


def adopt_orphans() -> None:
    """Make processes whose parents have ended children of this one, as workers of a torchrun that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children(others: Sequence[psutil.Process]) -> None:
    """Kill all that this process has started, and what that has started, but for others."""
    while children := [one for one in psutil.Process().children(recursive=True) if one not in others]:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        # One that was started meanwhile is seen in the next turn, and one that cannot die yet is left alone.
        _, alive = psutil.wait_procs(children, timeout=5)
        others = [*others, *alive]


def line(result: Result) -> str:
    """Return a line of at most 80 columns."""
    words = result.reason or "; ".join(f"{name}: {value}" for name, value in result.figures.items())
    return f"{result.step}  {result.status:8}{result.seconds:6.1f} s  {words}"[:80]


TOTAL_S = 540
"""Limit of all together: less than the time for which a machine with a GPU may be lent."""
SETUP_S = 60
"""Limit of the installation, which first_light.sh keeps to."""
REHEARSAL_FACTOR = 8
"""How much longer a step may take in a rehearsal: four ranks may share two cores, and these with others."""


def limits(arguments: Sequence[str]) -> tuple[int, int]:
    """Return the seconds that all may take, and those that the installation may take of them."""
    factor = REHEARSAL_FACTOR if "--rehearse" in arguments else 1
    return factor * TOTAL_S, factor * SETUP_S


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step.

    Attributes:
        name: short name, for `--only`, and of its files.
        measure: what measures it, in `experiments.gpu.measures.MEASURES`.
        title: what it does.
        limit_s: seconds after which all its processes are killed.
        cells: questions by the name of the figure that answers them.
    """

    name: str
    measure: str
    title: str
    limit_s: int
    cells: Mapping[str, str]


STEPS = cases_of(Step, read_toml(__file__, "steps")["step"])
