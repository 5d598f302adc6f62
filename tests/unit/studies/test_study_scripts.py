"""The study scripts of sbatch/ against programs that stand in for Slurm; the plans are those of hpcpace itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcpace.studies.jobs import ScalingFolder
from hpcpace.studies.setups import StudyFolder

REPOSITORY = Path(__file__).parents[3]
FAKES = REPOSITORY / "tests" / "data" / "fake_study"
NANO, SCALING = (REPOSITORY / "sbatch" / f"{name}.sh" for name in ("nano_cluster", "scaling_study"))
SMALL = ("--layouts", "1x1,2x2", "--batches", "4", "--image-batches", "", "--repetitions", "1")
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "4"}
FAULTS_OF_RANKS = ("straggler", "slow-stage", "jitter", "periodic", "slow-data")

Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(
        script: Path, *words: str, **environ: str
    ) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        path = f"{FAKES}:{Path(sys.executable).parent}:/usr/bin:/bin"
        clean = {"HOME": str(tmp_path), "PATH": path, "FAKE_CALLS": str(calls), "HPCPACE_PYTHON": sys.executable}
        # The `hpcpace` of PATH is the one of this repository as well.
        clean["PYTHONPATH"] = str(REPOSITORY)
        command = ["bash", str(script), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**clean, **environ}, capture_output=True, text=True, timeout=60
        )
        noted = calls.read_text().splitlines() if calls.exists() else []
        return done, [json.loads(line) for line in noted]

    return call


def test_plans_a_study_and_submits_a_job_for_each_layout(run: Run, tmp_path: Path) -> None:
    done, jobs = run(NANO, "study", *SMALL, HPCPACE_SBATCH_ARGS="--partition gpu")
    assert done.returncode == 0, done.stderr
    assert [(job["nodes"], job["ntasks_per_node"], job["partition"]) for job in jobs] == [(1, 1, "gpu"), (2, 2, "gpu")]
    assert {(job["job_name"], job["script"], tuple(job["words"])) for job in jobs} == {
        ("nano_cluster", "nano_cluster.sh", ("study",))
    }
    assert len(StudyFolder(tmp_path / "study").runs()) == 4
    assert "layout 2x2: job 101" in done.stdout


SPECIAL = 'two  words it\'s "a" $(touch ran) `touch ran` $HOME *; touch ran; #ü\ntouch ran'


def pasted(advice: str, folder: Path) -> list[str]:
    """Return what the second command of a line "squeue ...; then: bash SCRIPT STUDY --table" passes to its script."""
    line = advice.partition("; then: ")[2]
    stub = "bash() { printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", stub + line], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_scaling_study_names_its_table_as_a_line_to_paste(run: Run, tmp_path: Path) -> None:
    done, jobs = run(SCALING, SPECIAL, "--nodes", "1")
    assert done.returncode == 0, done.stderr
    assert jobs
    assert pasted(done.stdout.partition("squeue")[2], tmp_path) == [str(SCALING), str(tmp_path / SPECIAL), "--table"]
    assert not (tmp_path / "ran").exists()


def test_quotes_in_options_of_sbatch_keep_blanks_and_nothing_is_run(run: Run, tmp_path: Path) -> None:
    _, jobs = run(NANO, "study", *SMALL, HPCPACE_SBATCH_ARGS="--partition 'a  b $(touch ran)'")
    assert {job["partition"] for job in jobs} == {"a  b $(touch ran)"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("variable", ["HPCPACE_SBATCH_ARGS", "HPCPACE_PYTHON"])
def test_a_quote_that_is_not_closed_submits_nothing(variable: str, run: Run) -> None:
    done, jobs = run(NANO, "study", *SMALL, **{variable: "it's"})
    assert done.returncode == 2 and jobs == []
    assert f"hpcpace: {variable} has a quote that is not closed: close it, or leave it out" in done.stderr


def test_submits_only_what_is_left(run: Run, tmp_path: Path) -> None:
    run(NANO, "study", *SMALL)
    study = StudyFolder(tmp_path / "study")
    study.run_dir(study.runs()[0]).new_attempt().result_json.write_text('{"outcome": "finished"}')
    _, jobs = run(NANO, "study")
    assert [job["nodes"] for job in jobs] == [2]


def test_plans_the_study_of_model_sizes(run: Run, tmp_path: Path) -> None:
    done, _ = run(NANO, "study", "--repetitions", "1", HPCPACE_STUDY="model-size")
    assert done.returncode == 0, done.stderr
    assert {run.setup.preset for run in StudyFolder(tmp_path / "study").runs()} == {"small", "medium", "large", "xl"}


def test_a_job_does_the_runs_of_its_own_layout(run: Run, tmp_path: Path) -> None:
    run(NANO, "study", *SMALL)
    done, calls = run(NANO, "study", FAKE_OUTCOMES="finished", **JOB)
    assert done.returncode == 0, done.stderr
    (call,) = calls
    assert call["srun"][:5] == ["--ntasks", "4", "-c", "1", "--kill-on-bad-exit=1"]
    assert call["srun"][-3:] == ["study", "--layout", "2x2"]
    assert done.stdout.splitlines()[-1] == "3 of 4 runs done: 3 finished"


def test_each_job_of_a_study_is_audited_first(run: Run, tmp_path: Path) -> None:
    run(NANO, "study", *SMALL)
    done, calls = run(NANO, "study", FAKE_OUTCOMES="finished", HPCPACE_AUDIT="strict", FAKE_AUDIT_STATUS="4", **JOB)
    assert (done.returncode, calls) == (4, [])
    (audit,) = [json.loads(line) for line in (tmp_path / "audits.jsonl").read_text().splitlines()]
    assert audit[:5] == ["--ntasks", "4", "-c", "1", "--kill-on-bad-exit=0"]
    assert audit[-3:] == ["audit", "--save", "study/audit/2x2/attempt-0/snapshot"]


def test_a_study_goes_on_behind_a_run_that_ended_its_ranks(run: Run) -> None:
    run(NANO, "study", *SMALL)
    done, calls = run(NANO, "study", FAKE_OUTCOMES="memory nothing memory finished", **JOB)
    assert done.returncode == 0, done.stderr
    assert len(calls) == 4
    assert done.stdout.splitlines()[-1] == "3 of 4 runs done: 2 out of memory, 1 finished"


def test_a_job_that_gets_nowhere_ends(run: Run) -> None:
    run(NANO, "study", *SMALL)
    done, calls = run(NANO, "study", FAKE_OUTCOMES="nothing " * 9, **JOB)
    assert done.returncode == 2
    assert len(calls) == 3
    assert "layout 2x2: 3 runs are left, but new starts make no progress (status 9)" in done.stderr


def test_a_wrong_option_is_refused_before_any_job(run: Run) -> None:
    done, jobs = run(NANO, "study", "--batches", "four")
    assert done.returncode == 2
    assert "give whole numbers" in done.stderr
    assert jobs == []


@pytest.mark.parametrize("script", [NANO, SCALING], ids=lambda path: path.stem)
def test_asks_for_the_folder_of_the_study(script: Path, run: Run) -> None:
    done, _ = run(script)
    assert done.returncode == 2
    assert "name the folder of the study" in done.stderr


def test_submits_each_run_of_the_scaling_study_with_its_place(run: Run, tmp_path: Path) -> None:
    done, jobs = run(SCALING, "study", "--nodes", "1,2", "--", "--preset", "small")
    assert done.returncode == 0, done.stderr
    assert [Path(job["HPCPACE_RUN_DIR"]).name for job in jobs] == ["n1x2-o1-block", "n2x2-o1-block", "n2x2-o1-cyclic"]
    assert [job["HPCPACE_SRUN_ARGS"].split() for job in jobs] == [
        *(["--distribution=block"], ["--distribution=block"], ["--distribution=cyclic"])
    ]
    assert {job["script"] for job in jobs} == {"gpt2_dp.sh"}
    assert jobs[2]["words"] == ["--mesh", "dp=4", "--steps", "120", "--preset", "small"]


def test_outside_of_a_lab_faults_of_the_network_are_left_out(run: Run) -> None:
    done, jobs = run(SCALING, "study", "--nodes", "4", "--placements", "block", "--faults")
    assert done.returncode == 0, done.stderr
    names = [Path(job["HPCPACE_RUN_DIR"]).name for job in jobs]
    assert names == ["n4x2-o1-block", *(f"n4x2-o1-block-{fault}" for fault in FAULTS_OF_RANKS)]
    assert done.stderr.count("left out: only a lab can inject its fault") == 2


def test_a_scaling_run_that_was_stopped_is_put_aside_and_done_anew(run: Run, tmp_path: Path) -> None:
    run(SCALING, "study", "--nodes", "1")
    study = ScalingFolder(tmp_path / "study")
    half = study.run_dir(study.runs()[0])
    half.new_attempt()
    _, jobs = run(SCALING, "study", "--nodes", "1")
    assert len(jobs) == 1
    assert not half.path.exists()


def test_the_table_shows_the_runs_that_are_done(run: Run, tmp_path: Path) -> None:
    run(SCALING, "study", "--nodes", "1")
    study = ScalingFolder(tmp_path / "study")
    done = study.run_dir(study.runs()[0])
    done.path.mkdir()
    content = {"throughput": {"samples_per_s": 512.0, "p50_ns": 2e8, "cv": 0.03}}
    done.summary_json.write_text(
        json.dumps({**content, "verdict": {"mode": "healthy", "headline": "", "findings": []}})
    )
    shown, jobs = run(SCALING, "study", "--table")
    assert jobs == []
    assert re.search(r"n1x2-o1-block +512 +1.00 +200 ms +0.03 +healthy", shown.stdout)


def test_lists_every_environment_variable_that_it_reads() -> None:
    text = "".join(
        (REPOSITORY / "sbatch" / f"{name}.sh").read_text() for name in ("study", "nano_cluster", "scaling_study")
    )
    shared = (REPOSITORY / "docs" / "slurm.md").read_text()
    listed = set(re.findall(r"^(?:#   |\| `)(HPCPACE_[A-Z_]+[A-Z])", text + shared, flags=re.MULTILINE))
    read = set(re.findall(r"\$\{?(HPCPACE_[A-Z_]+)", text)) - {"HPCPACE_LAB_NAME"}
    guide = (REPOSITORY / "docs" / "scale.md").read_text()
    assert read <= listed
    assert [
        name for name in re.findall(r"^#   (HPCPACE_[A-Z_]+[A-Z])", text, flags=re.MULTILINE) if name not in guide
    ] == []
