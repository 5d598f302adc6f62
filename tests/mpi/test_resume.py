"""A training goes on after a stop as if there had been none, whatever stopped it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("workload_program.py")
TRAIN = ("-m", "hpcpace", "train", "gpt2")
SHORT = ("--warmup-steps", 0, "--no-trace", "--seq-len", 16)
SMALL = {"seq_len": 32, "eval_batches": 1}
IMAGES = {"model": "resnet18", "batch_size": 4, "eval_batches": 1}
# Two ranks add in one order only, and so does a pipeline. Replicas beyond two add up in the order of DDP's buckets,
# which torch makes anew after the first step of a process.
EXACT = {
    1: {"alone": SMALL},
    2: {
        "dp": {"mesh": "dp=2", **SMALL},
        "pp": {"mesh": "pp=2", **SMALL},
        "tp": {"mesh": "tp=2", **SMALL},
        "zero1": {"zero": 1, **SMALL},
        "zero3": {"zero": 3, **SMALL},
        "local": {"sync_every": 3, **SMALL},
        "outer": {"sync_every": 3, "outer_learning_rate": 0.7, **SMALL},
        "interleaved": {"mesh": "pp=2", "schedule": "interleaved", **SMALL},
        "resnet18": IMAGES,
        "mixed": {"dtype": "bf16", **SMALL},
        "mixed zero3": {"dtype": "bf16", "zero": 3, **SMALL},
    },
}
CLOSE = {"dp4": {"mesh": "dp=4", **SMALL}, "dp2pp2": {"mesh": "dp=2,pp=2", **SMALL}}


def _found(mpiexec, n, *arguments):
    result = mpiexec(n, PROGRAM, *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("n", only_nightly([2], [1]))
def test_losses_and_evaluations_after_a_stop_are_those_without_one(mpiexec, tmp_path, n):
    found = _found(mpiexec, n, "resumed", tmp_path, json.dumps(EXACT[n]))
    for name, run in found.items():
        assert run["first_step"] == 4, name
        assert len(run["whole"][0]) == 9
        assert [row["num_steps"] for row in run["whole"][1]] == [3, 6, 9]
        assert run["resumed"] == run["whole"], name


@pytest.mark.nightly
def test_losses_after_a_stop_of_four_ranks_are_those_without_one_but_for_rounding(mpiexec, tmp_path):
    found = _found(mpiexec, 4, "resumed", tmp_path, json.dumps(CLOSE))
    assert {name: run["first_step"] for name, run in found.items()} == {"dp4": 4, "dp2pp2": 4}
    for name, run in found.items():
        assert run["resumed"][0] == pytest.approx(run["whole"][0], rel=1e-5), name


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(mpiexec, tmp_path):
    found = _found(mpiexec, 2, "stopped", tmp_path / "run")
    assert len(set(found["num_steps"])) == 1
    assert 3 <= found["num_steps"][0] < 100_000
    assert found["first_step"] == found["num_steps"][0]
    assert found["stopped_by"] == ["a signal to another rank", ""]
    result = json.loads((tmp_path / "run" / "attempt-0" / "result.json").read_text())
    assert result["outcome"] == "stopped"


def test_a_job_killed_in_the_middle_of_a_checkpoint_leaves_the_one_before(mpiexec, python, tmp_path):
    run = tmp_path / "run"
    assert mpiexec(2, PROGRAM, "killed", run).returncode != 0
    folder = run / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".step-00000006.writing", "step-00000003"]
    arguments = ("--ranks", 2, "--steps", 9, "--warmup-steps", 0, "--checkpoint-every", 3, "--no-trace")
    again = python(*TRAIN, *arguments, "--run-dir", run)
    assert again.returncode == 0, again.stderr
    result = json.loads((run / "attempt-1" / "result.json").read_text())
    assert (result["first_step"], len(result["losses"])) == (3, 9)
    assert json.loads((run / "attempt-1" / "run.json").read_text())["resumed"] == {
        "checkpoint": str(folder / "step-00000003"),
        "num_steps": 3,
    }
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000009"]


@pytest.mark.nightly
def test_another_run_begins_from_a_checkpoint_that_is_named(python, tmp_path):
    first = python(*TRAIN, *SHORT, "--steps", 2, "--checkpoint-every", 2, "--run-dir", tmp_path / "a")
    assert first.returncode == 0, first.stderr
    for resume in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "step-00000002"):
        run = tmp_path / f"from-{resume.name}"
        result = python(*TRAIN, *SHORT, "--steps", 3, "--resume", resume, "--run-dir", run)
        assert result.returncode == 0, result.stderr
        assert json.loads((run / "attempt-0" / "result.json").read_text())["first_step"] == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where a run of two steps with a checkpoint is, once the first test has made it."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "seen"),
    only_nightly(
        [(["--steps", 3, "--batch-size", 4], "was trained with batch_size 8, not 4")],
        [
            (["--steps", 2], "steps, and --steps is 2: use more --steps"),
            (["--steps", 3, "--seed", 1], "was trained with seed 0, not 1"),
            (
                ["--steps", 3, "--resume", "/no/such/run", "--run-dir", "new"],
                "/no/such/run holds no complete checkpoint",
            ),
        ],
    ),
)
def test_refuses_a_checkpoint_that_does_not_fit(python, finished, tmp_path, monkeypatch, arguments, seen):
    monkeypatch.chdir(tmp_path)
    if not finished.exists():
        made = python(*TRAIN, *SHORT, "--steps", 2, "--checkpoint-every", 2, "--run-dir", finished)
        assert made.returncode == 0, made.stderr
    result = python(*TRAIN, *SHORT, "--run-dir", finished, *arguments)
    assert result.returncode == 2
    assert seen in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.nightly
def test_a_training_that_is_to_begin_anew_leaves_no_later_checkpoints(python, tmp_path):
    run = tmp_path / "run"
    for options in (("--steps", 4), ("--steps", 2, "--resume", "never", "--seed", 1)):
        result = python(*TRAIN, *SHORT, *options, "--checkpoint-every", 2, "--run-dir", run)
        assert result.returncode == 0, result.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((run / "attempt-1" / "result.json").read_text())["first_step"] == 0


def test_a_checkpoint_that_cannot_be_written_is_a_warning(mpiexec, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("no folder")
    result = mpiexec(2, *TRAIN, *SHORT, "--steps", 4, "--checkpoint-every", 2, "--run-dir", run)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("warning: cannot write the checkpoint") == 2
    assert result.stderr.count("checkpoints: it is no folder") == 2
    assert result.stderr.count("; training goes on") == 2


class Call:
    """Pickled as a call of os.system."""

    def __init__(self, command):
        self._command = command

    def __reduce__(self):
        return os.system, (self._command,)


SHARD_OF_RANK_1 = "shard-00002-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    """Where a run of two ranks, each with a file in the checkpoint, is once the first test has made it."""
    return tmp_path_factory.mktemp("two-stages") / "run"


def _let_everybody_write(checkpoint):
    checkpoint.parent.chmod(0o777)


def _hide_code(checkpoint):
    (checkpoint / SHARD_OF_RANK_1).write_bytes(pickle.dumps(Call(f"touch {checkpoint}/marker")))


def _cut_off_rank_1(checkpoint):
    os.truncate(checkpoint / SHARD_OF_RANK_1, 1000)


@pytest.mark.parametrize(
    ("damage", "seen"),
    only_nightly(
        [(_hide_code, f"'{SHARD_OF_RANK_1}': ")],
        [
            (_let_everybody_write, "can be written to by everybody (mode 0777); if all in it is yours, chmod -R go-w"),
            (_cut_off_rank_1, f"'{SHARD_OF_RANK_1}': "),
        ],
    ),
)
def test_ranks_refuse_a_checkpoint_together(mpiexec, two_stages, tmp_path, damage, seen):
    arguments = (*TRAIN, *SHORT, "--mesh", "pp=2", "--checkpoint-every", 2)
    if not two_stages.exists():
        made = mpiexec(2, *arguments, "--steps", 2, "--run-dir", two_stages)
        assert made.returncode == 0, made.stderr
    run = tmp_path / "run"
    shutil.copytree(two_stages, run)
    checkpoint = run / "checkpoints" / "step-00000002"
    damage(checkpoint)
    result = mpiexec(2, *arguments, "--steps", 4, "--run-dir", run)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count(seen) == 1
    assert "Traceback" not in result.stderr
    assert not (checkpoint / "marker").exists()
    assert [path.name for path in run.glob("attempt-*")] == ["attempt-0"]
