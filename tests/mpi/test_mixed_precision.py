"""Training in bfloat16 with float32 parameters: close to float32, the same bits each time, on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("workload_program.py")
TRAIN = ("-m", "hpcpace", "train")
SHORT = ("--warmup-steps", 1, "--seq-len", 16)
TEXT = {"steps": 6, "seq_len": 32, "learning_rate": 1e-3, "eval_every": 6, "eval_batches": 2}
IMAGES = {"model": "resnet18", "steps": 2, "batch_size": 4, "learning_rate": 1e-3, "eval_every": 2, "eval_batches": 1}
CASES = {
    1: {"gpt2": TEXT, "resnet18": {**IMAGES, "steps": 6, "batch_size": 16, "eval_every": 6}},
    2: {
        **{name: {"mesh": name, **TEXT} for name in only_nightly(["tp=2"], ["dp=2", "pp=2"])},
        **{f"zero={zero}": {"zero": zero, **TEXT} for zero in only_nightly([3], [1])},
        **{f"resnet18 zero={zero}": {"zero": zero, **IMAGES} for zero in only_nightly([1], [0, 3])},
    },
}


def trained(mpiexec, n, folder, cases):
    result = mpiexec(n, PROGRAM, "losses", folder, json.dumps(cases))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("n", only_nightly([2], [1]))
def test_bfloat16_trains_like_float32_and_the_same_each_time(mpiexec, tmp_path, n):
    single = CASES[n]
    mixed = {f"{name} bf16": {**settings, "dtype": "bf16"} for name, settings in single.items()}
    first, second = (trained(mpiexec, n, tmp_path / str(len(cases)), cases) for cases in (single | mixed, mixed))
    assert {name: first[name] for name in mixed} == second
    for name in single:
        losses, (evaluation,) = first[f"{name} bf16"]
        expected, (expected_evaluation,) = first[name]
        assert losses != expected, name  # float32 would be close, too
        bound = 5e-2 if "resnet18" in name else 1e-3  # batch norm over few images amplifies rounding
        assert losses == pytest.approx(expected, rel=bound), name
        assert evaluation["loss"] == pytest.approx(expected_evaluation["loss"], rel=bound), name
        assert np.isfinite(losses).all(), name
        if len(losses) > 2:
            assert np.mean(losses[-2:]) < 0.95 * losses[0], name


@pytest.fixture(scope="module")
def run(python, tmp_path_factory):
    """A run in bfloat16 with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ("--steps", 3, "--checkpoint-every", 2, "--dtype", "bf16", "--run-dir", folder)
    result = python(*TRAIN, "gpt2", *SHORT, *arguments)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.nightly
def test_a_run_records_the_type_of_its_computation(python, run):
    attempt = run / "attempt-0"
    record, outcome = (json.loads((attempt / name).read_text()) for name in ("run.json", "result.json"))
    assert record["model"]["dtype"] == record["config"]["train"]["dtype"] == outcome["dtype"] == "bfloat16"
    report = python("-m", "hpcpace", "report", run)
    assert "finished, computed in bfloat16, at most" in report.stdout
    listed = python("-m", "hpcpace", "list", run.parent, "--json")
    assert [row["dtype"] for row in json.loads(listed.stdout)] == ["bfloat16"]


def test_a_checkpoint_of_another_type_is_refused_in_one_line(python, run):
    result = python(*TRAIN, "gpt2", *SHORT, "--no-trace", "--steps", 4, "--dtype", "float32", "--run-dir", run)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "was trained with dtype 'bfloat16', not 'float32'" in line
