"""`hpcpace train` inside launchers and by itself."""

from __future__ import annotations

import json

import pytest
from cases import only_nightly

TRAIN = ("-m", "hpcpace", "train", "gpt2")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    only_nightly(
        [
            (["--mesh", "dp=3"], "needs 3 ranks, but the job has 2"),
            (["--steps", "x"], "'x' is not a valid integer"),
            (["--inject", "host=elsewhere,size=10%"], "fault on host 'elsewhere'"),
        ],
        [
            (["--mesh", "pp=2", "--batch-size", "7"], "use --batch-size 8"),
            (["--data", "/no/such/file"], "no file at /no/such/file"),
            (["--ranks", "3"], "--ranks is 3, but"),
        ],
    ),
)
def test_what_all_ranks_refuse_is_said_once(mpiexec, arguments, seen):
    result = mpiexec(2, *TRAIN, *arguments)
    assert result.returncode == 2
    assert result.stderr.count(seen) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("launcher", only_nightly(["mpiexec"], ["torchrun"]))
def test_trains_inside_a_launcher(request, tmp_path, launcher):
    arguments = ["--mesh", "dp=1,pp=2", "--steps", "4", "--warmup-steps", "1", "--run-dir", tmp_path / "run"]
    result = request.getfixturevalue(launcher)(2, *TRAIN, *arguments)
    assert result.returncode == 0, result.stderr
    _check_run(tmp_path / "run", result.stdout, num_steps=4)


def test_starts_its_own_ranks(python, tmp_path):
    result = python(*TRAIN, "--ranks", 2, "--steps", 4, "--warmup-steps", 1, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    _check_run(tmp_path / "run", result.stdout, num_steps=4)


@pytest.mark.nightly
def test_the_exit_code_of_its_own_ranks_is_passed_on(python, tmp_path):
    result = python(*TRAIN, "--ranks", 2, "--inject", "host=elsewhere,size=10%", "--run-dir", tmp_path / "run")
    assert result.returncode == 2
    assert result.stderr.count("fault on host 'elsewhere'") == 1


@pytest.mark.quick
def test_a_run_records_model_data_and_faults(python, tmp_path):
    fault = "rank=0,phase=forward,size=30%"
    result = python(*TRAIN, "--steps", 4, "--inject", fault, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "run" / "attempt-0" / "run.json").read_text())
    assert record["model"]["num_parameters"] == 842_496
    assert record["data"]["synthetic"] is False
    assert record["inject"][0]["spec"] == fault
    assert record["inject"][0]["share"] == pytest.approx(0.3)


def _check_run(run, stdout, *, num_steps):
    result = json.loads((run / "attempt-0" / "result.json").read_text())
    assert len(result["losses"]) == num_steps
    assert result["losses"][-1] < result["losses"][0]
    assert f"hpcpace report {run}" in stdout
    assert sorted(path.name for path in (run / "attempt-0" / "trace").iterdir()) == ["rank-00000.h5", "rank-00001.h5"]
