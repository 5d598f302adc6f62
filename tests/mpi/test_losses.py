"""The same seed and global batch give the same losses on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("train_program.py")
CASES = {
    1: ["dp=1"],
    2: [
        *("dp=2", "pp=2", "tp=2", "dp=2 zero=1 steps=8", "dp=2 zero=3 steps=8"),
        *("pp=2 schedule=gpipe steps=8", "pp=2 schedule=interleaved steps=8"),
    ],
    4: [
        *("dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2", "pp=4", "dp=2,tp=2 zero=3 steps=8"),
        *("dp=2,pp=2 zero=1 schedule=gpipe steps=8", "dp=2,pp=2 zero=3 schedule=interleaved steps=8"),
        "dp=4 hierarchical=1 steps=8",
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of a single process, by dtype."""
    return {}


def _losses(mpiexec, folder, n, dtype, cases):
    result = mpiexec(n, PROGRAM, "losses", folder, dtype, *cases)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("n", only_nightly([4], [1, 2]))
def test_every_mesh_has_the_losses_of_a_single_process(mpiexec, python, alone, tmp_path, n):
    if "float32" not in alone:
        result = python(PROGRAM, "losses", tmp_path / "alone", "float32", "dp=1")
        assert result.returncode == 0, result.stderr
        alone["float32"] = json.loads(result.stdout)["dp=1"]
    reference = alone["float32"]
    assert len(reference) == 20
    assert reference[-1] < 0.9 * reference[0]
    found = _losses(mpiexec, tmp_path / "run", n, "float32", CASES[n])
    num_steps = {case: 8 if "steps=8" in case else 20 for case in CASES[n]}
    assert found == {case: pytest.approx(reference[:num], rel=1e-4) for case, num in num_steps.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", only_nightly(["bfloat16"], ["float64"]))
def test_other_types_train_on_a_mesh_of_all_kinds(mpiexec, tmp_path, dtype):
    found = _losses(mpiexec, tmp_path / "run", 4, dtype, ["pp=2,tp=2", "dp=2,pp=2"])
    assert found["pp=2,tp=2"] == pytest.approx(found["dp=2,pp=2"], rel=1e-2 if dtype == "bfloat16" else 1e-9)
    assert found["dp=2,pp=2"][-1] < 0.9 * found["dp=2,pp=2"][0]


@pytest.mark.nightly
def test_both_copies_of_the_tied_weight_are_trained_and_stay_the_same(mpiexec):
    result = mpiexec(2, PROGRAM, "tied")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["same_at_first"]
    assert found["same_at_last"]
    assert found["moved"] > 1e-3


def test_ranks_that_read_different_texts_are_refused(mpiexec, tmp_path):
    result = mpiexec(2, PROGRAM, "own_text", tmp_path / "run")
    assert result.returncode == 2
    assert result.stderr.count("reads different data from rank 0") == 1
    assert "Traceback" not in result.stderr
