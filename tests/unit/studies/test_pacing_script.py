"""sbatch/pacing_trial.sh against an sbatch that notes its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcpace.core.rundir import RunDirectory
from hpcpace.core.settings import load_config
from hpcpace.pace.settings import PaceSettings

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "sbatch" / "pacing_trial.sh"
FAKES = REPOSITORY / "tests" / "data" / "fake_study"

Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(*words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        path = f"{FAKES}:{Path(sys.executable).parent}:/usr/bin:/bin"
        clean = {"HOME": str(tmp_path), "PATH": path, "FAKE_CALLS": str(calls), "HPCPACE_PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", str(SCRIPT), *words],
            cwd=tmp_path,
            env={**clean, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        noted = calls.read_text().splitlines() if calls.exists() else []
        return done, [json.loads(line) for line in noted]

    return call


def test_the_table_is_named_as_a_line_to_paste(run: Run, tmp_path: Path) -> None:
    study = 'two  words it\'s "a" $(touch ran) `touch ran` $HOME *; touch ran; #ü\ntouch ran'
    options = "--nodes", "1", "--ranks-per-node", "1", "--policies", "none", "--repetitions", "1"
    done, jobs = run(study, *options)
    assert done.returncode == 0, done.stderr
    assert jobs[0]["HPCPACE_RUN_DIR"] == str(tmp_path / study / "runs" / "n1x1-none-0")
    line = done.stdout.partition("; then: ")[2]
    stub = "bash() { printf '%s\\0' \"$@\"; }\n"
    pasted = subprocess.run(["bash", "-c", stub + line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert pasted.stdout.split("\0") == [str(SCRIPT), str(tmp_path / study), "--table", ""]
    assert not (tmp_path / "ran").exists()


def _names(jobs: list[dict[str, Any]]) -> list[str]:
    return [Path(job["HPCPACE_RUN_DIR"]).name for job in jobs]


def test_submits_each_policy_on_each_number_of_nodes_as_often_as_asked(run: Run) -> None:
    done, jobs = run(
        "study", "--nodes", "1,2", "--ranks-per-node", "2", "--policies", "none,slack", "--repetitions", "2"
    )
    assert done.returncode == 0, done.stderr
    assert _names(jobs) == [
        *("n1x2-none-0", "n1x2-slack-0", "n2x2-none-0", "n2x2-slack-0"),
        *("n1x2-slack-1", "n1x2-none-1", "n2x2-slack-1", "n2x2-none-1"),
    ]
    assert {(job["script"], job["job_name"], job["dependency"]) for job in jobs} == {
        ("gpt2_dp.sh", "pacing_trial", "singleton")
    }
    assert [job["nodes"] for job in jobs[:4]] == [1, 1, 2, 2]


def test_by_default_both_readings_of_the_published_rule_are_among_the_policies(run: Run) -> None:
    _, jobs = run("study", "--nodes", "4")
    policies = Counter(job["HPCPACE_PACE_POLICY"] for job in jobs)
    assert policies == dict.fromkeys(("none", "published-window", "published-spread", "slack", "auto"), 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"none": "false", "slack": "false", "auto": "true", "coschedule": "true"}),
        (("--with-trial",), {"none": "true", "slack": "true", "auto": "true", "coschedule": "true"}),
    ],
)
def test_policies_are_on_from_the_start_unless_a_trial_is_asked_for(
    words: tuple[str, ...], expected: dict[str, str], run: Run
) -> None:
    _, jobs = run("study", "--nodes", "1", "--repetitions", "1", "--policies", ",".join(expected), *words)
    assert {job["HPCPACE_PACE_POLICY"]: job["HPCPACE_PACE_TRIAL"] for job in jobs} == expected


def test_hpcpace_takes_the_settings_that_the_script_passes_on(run: Run) -> None:
    _, jobs = run("study", "--nodes", "1", "--repetitions", "1")
    for job in jobs:
        names = ("HPCPACE_PACE_POLICY", "HPCPACE_PACE_TRIAL")
        pace = load_config(environ={name: job[name] for name in names}).of(PaceSettings)
        assert (pace.policy, str(pace.trial).lower()) == tuple(job[name] for name in names)


def test_passes_options_of_the_training_on(run: Run) -> None:
    _, jobs = run("study", "--nodes", "1", "--steps", "50", "--repetitions", "1", "--", "--preset", "small")
    assert {tuple(job["words"]) for job in jobs} == {("--steps", "50", "--preset", "small")}


def test_what_is_done_is_not_done_again_and_what_was_stopped_is_put_aside(run: Run, tmp_path: Path) -> None:
    words = ("study", "--nodes", "1", "--policies", "none,slack", "--repetitions", "1")
    runs = tmp_path / "study" / "runs"
    RunDirectory(runs / "n1x4-none-0").new_attempt().result_json.write_text("{}")
    RunDirectory(runs / "n1x4-slack-0").new_attempt()
    _, jobs = run(*words)
    assert _names(jobs) == ["n1x4-slack-0"]
    assert not (runs / "n1x4-slack-0").exists()
    RunDirectory(runs / "n1x4-slack-0").new_attempt().result_json.write_text("{}")
    done, jobs = run(*words)
    assert jobs == []
    assert "all 2 runs are done" in done.stdout


def test_the_table_is_of_the_runs_and_not_of_the_audits_beside_them(run: Run, tmp_path: Path) -> None:
    runs = tmp_path / "study" / "runs"
    for name in ("n1x4-none-0", "n1x4-none-0-audit", "n1x4-slack-0", "n1x4-slack-0-audit"):
        (runs / name / "attempt-0").mkdir(parents=True)
    done, _ = run("study", "--table", "--bins", HPCPACE_PYTHON="echo")
    assert done.returncode == 0, done.stderr
    script, *words = done.stdout.split()
    assert Path(script) == REPOSITORY / "analysis" / "pacing_table.py"
    assert words == ["study/runs/n1x4-none-0", "study/runs/n1x4-slack-0", "--bins"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name the folder of the study"),
        (("--nodes", "1"), "name the folder of the study"),
        (("study", "--node", "1"), "No such option"),
        (("study", "--nodes"), "Option '--nodes' requires an argument"),
        (("study", "--nodes", "1,x"), "'1,x': give whole numbers"),
        (("study", "--policies", "none,slow"), "policy 'slow': choose from none, observe"),
        (("study", "--repetitions", "0"), "0 is not in the range 1<=x<=1000"),
    ],
)
def test_a_wrong_option_is_refused_before_any_job(words: tuple[str, ...], said: str, run: Run) -> None:
    done, jobs = run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert jobs == []
