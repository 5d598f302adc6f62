"""A job script that runs one job with two placements in turn, on the same hosts, and ends with their comparison."""

from __future__ import annotations

import shlex
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.codec import Text, convert, read_json
from hpcpace.core.errors import CannotTell
from hpcpace.core.hostlist import compress
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import printable
from hpcpace.placement.of_run import Placement, placement_text
from hpcpace.runs.measured import without_folders

NUM_REPEATS = 3
"""Runs of a side from which `hpcpace compare` takes how much runs differ."""
_STARTED_BY = {"torchrun": "torchrun", "pmi": "mpiexec"}
_BODY = """\
set -euo pipefail

hpcpace={program}
folder={folder}
# The ranks take their hosts from HPCPACE_PLACEMENT, and the run is to be HPCPACE_RUN_DIR.
job() {{
    {job}
}}

runs=$folder/${{SLURM_JOB_ID:?this is no Slurm job: submit it with sbatch}}
export HPCPACE_AUDIT=${{HPCPACE_AUDIT:-off}}
for repeat in {repeats}; do
    # Whichever comes first may have colder caches, or another neighbour on the network.
    order=(before after)
    ((repeat % 2)) || order=(after before)
    for which in "${{order[@]}}"; do
        echo "placement-trial: run $repeat with the placement $which"
        HPCPACE_PLACEMENT=$folder/$which.txt HPCPACE_RUN_DIR=$runs/$which-$repeat job
    done
done
exec "$hpcpace" compare "$runs"/before-* -- "$runs"/after-*
"""


@dataclass(frozen=True, kw_only=True)
class _Start:
    """How run.json says that a run was started."""

    launcher: Text = ""
    command: tuple[str, ...] = field(default=())


def trial_files(found: Placement, attempt: Attempt, folder: Path, program: str) -> dict[str, str]:
    """Return the content of each file of a trial, by its name.

    Args:
        found: the placements.
        attempt: that they come from.
        folder: where the files will be, absolute; the runs of the trial get a folder in it.
        program: path of hpcpace.

    Raises:
        CannotTell: ranks cannot be given their hosts, run.json does not say how they were started, or both placements
            are the same.
    """
    if not found.num_moved:
        raise CannotTell("there is nothing to try: the run's placement is as good as the best one found")
    job = _job_line(_start(attempt))
    per_host = np.bincount(found.before)
    name = printable(attempt.path.parent.name)
    lines = [
        "#!/usr/bin/env bash",
        f"# Runs the job of {name} with the placement that it had and with that of `hpcpace place`, in turn,",
        f"# {NUM_REPEATS} times each, and compares them. Check `job` below, and give sbatch its other options.",
        "#SBATCH --job-name=placement-trial",
        "#SBATCH --output=%x-%j.out",
        f"#SBATCH --nodes={len(per_host)}",
        f"#SBATCH --nodelist={compress(found.names)}",
        f"#SBATCH --ntasks={len(found.before)}",
        *([f"#SBATCH --ntasks-per-node={per_host[0]}"] if (per_host == per_host[0]).all() else []),
    ]
    repeats = " ".join(map(str, range(1, NUM_REPEATS + 1)))
    quoted = {"program": shlex.quote(program), "folder": shlex.quote(str(folder))}
    return {
        "before.txt": placement_text("slurm", found.before, found.names),
        "after.txt": placement_text("slurm", found.after, found.names),
        "trial.sh": "\n".join(lines) + "\n" + _BODY.format(**quoted, job=job, repeats=repeats),
    }


def _start(attempt: Attempt) -> _Start:
    problems: list[str] = []
    found = read_json(attempt, attempt.run_json.name, _recorded, problems)
    if found is None or not found.command:
        why = problems[0] if problems else "run.json has no command"
        raise CannotTell(f"how the run was started is not known ({why}): write a placement with --output instead")
    return found


def _recorded(content: Any) -> _Start:
    return convert({name: content.get(name) for name in ("launcher", "command") if name in content}, _Start)


def _job_line(start: _Start) -> str:
    """Return the line that starts the ranks of a run.

    Raises:
        CannotTell: they were not started by srun.
    """
    if start.launcher != "slurm":
        starter = _STARTED_BY.get(start.launcher, "an unknown launcher")
        raise CannotTell(
            f"the ranks of the run were started by {starter}, not by srun, which alone takes a host for each "
            "rank: start them with srun, or write a placement for them with --format and --output"
        )
    words = list(without_folders(start.command))
    if words[1:2] == ["train"] and Path(words[0]).name in ("hpcpace", "__main__.py"):
        return f'"$hpcpace" batch --name placement-trial -- {shlex.join(words[1:])}'
    traced = f'"$hpcpace" trace --run-dir "$HPCPACE_RUN_DIR" -- {shlex.join(words)}'
    return f'srun --distribution=arbitrary --nodelist="$HPCPACE_PLACEMENT" {traced}'
