"""The folder of a study: STUDY/plan.json maps runs to set-ups, STUDY/runs/NAME are ordinary run directories.

The runs themselves show what is done, so an interrupted study resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.errors import UsageError
from hpcpace.core.files import Folder, read_file
from hpcpace.core.rundir import Attempt, RunDirectory, json_text
from hpcpace.studies.setups import Layout, Setup, StudyRun

SCHEMA = "hpcpace-study/1"
MOST_PLAN_BYTES = 1 << 24
"""Limit for plan.json, which has a few hundred bytes per run."""

DONE, OUT_OF_MEMORY, FAILED, OPEN = "finished", "out of memory", "failed", "open"
_MOST_ATTEMPTS = 2


@dataclass(frozen=True)
class StudyFolder:
    """A study on disk."""

    path: Path

    @property
    def plan_json(self) -> Path:
        """The file that maps runs to set-ups."""
        return self.path / "plan.json"

    def run_dir(self, run: StudyRun) -> RunDirectory:
        """Return the run directory of a run, whether it exists or not."""
        return RunDirectory(self.path / "runs" / run.name)

    def write_plan(self, name: str, runs: Sequence[StudyRun], *, facts: dict[str, Any] | None = None) -> bool:
        """Write the plan, unless there is one already; return whether it was written.

        Args:
            name: of the study.
            runs: in the order in which they will run.
            facts: further values to keep with the study.

        Raises:
            UsageError: the folder cannot be written.
        """
        if self.plan_json.exists():
            return False
        rows = [{"name": run.name, "repetition": run.repetition, "setup": _to_json(run.setup)} for run in runs]
        try:
            with Folder.open(self.path, make=True) as folder:
                folder.make_folder("runs").close()
                plan = {"schema": SCHEMA, "study": name, "facts": facts or {}, "runs": rows}
                folder.write(self.plan_json.name, json_text(plan))
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {error.strerror}") from error
        return True

    def facts(self) -> dict[str, Any]:
        """Return the further values that the plan keeps."""
        facts: dict[str, Any] = self._plan()["facts"]
        return facts

    def runs(self) -> list[StudyRun]:
        """Return the runs of the plan, in order.

        Raises:
            UsageError: there is no plan, or it cannot be read.
        """
        try:
            return [
                StudyRun(setup=_from_json(row["setup"]), repetition=row["repetition"]) for row in self._plan()["runs"]
            ]
        except (KeyError, TypeError) as error:
            raise UsageError(f"{self.plan_json} is not a plan of {SCHEMA} ({error}): plan the study again") from error

    def state(self, run: StudyRun) -> str:
        """Return finished, out of memory, failed (it ended twice without a result), or open."""
        attempts = self.run_dir(run).attempts()
        for attempt in attempts[::-1]:
            outcome = self.result(attempt).get("outcome", "")
            if outcome in (DONE, OUT_OF_MEMORY):
                return str(outcome)
        return FAILED if len(attempts) >= _MOST_ATTEMPTS else OPEN

    def open_runs(self, layout: Layout | None = None) -> list[StudyRun]:
        """Return the runs that still have to be done, of one layout or of all."""
        return [run for run in self.runs() if layout in (None, run.setup.layout) and self.state(run) == OPEN]

    def result(self, attempt: Attempt) -> dict[str, Any]:
        """Return the content of an attempt's result.json; empty if it is missing or incomplete."""
        return read_json(attempt, attempt.result_json.name, json_object, []) or {}

    def _plan(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(read_file(self.plan_json, most_bytes=MOST_PLAN_BYTES))
        except FileNotFoundError:
            raise UsageError(
                f"no study at {self.path}, which has no plan.json: plan one with sbatch/nano_cluster.sh"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {self.plan_json}: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise UsageError(f"{self.plan_json} is not a plan of {SCHEMA}: name the folder of a study")
        return content


def _to_json(setup: Setup) -> dict[str, Any]:
    return dataclasses.asdict(setup)


def _from_json(values: dict[str, Any]) -> Setup:
    return Setup(**{**values, "layout": Layout(**values["layout"])})
