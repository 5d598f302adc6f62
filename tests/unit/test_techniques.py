"""How techniques are compared: losses at a number of tokens, paired over seeds, and what pays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import techniques
from experiments.techniques import PLAIN, SEEDS, TECHNIQUES, Curve, curve, interval, pays


def test_losses_are_read_between_evaluations_and_no_further_than_was_trained() -> None:
    found = Curve(tokens=np.array([100.0, 200.0]), losses=np.array([[4.0, 3.0], [5.0, 3.0]]))
    assert found.at(150).tolist() == [3.5, 4.0]
    assert found.at(900).tolist() == [3.0, 3.0]


def test_the_interval_is_that_of_students_t() -> None:
    low, high = interval(np.array([0.1, 0.2, 0.3]))
    assert (low, high) == (pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5), pytest.approx(0.2 + 4.303 * 0.1 / 3**0.5))


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([-0.20, -0.21, -0.19], "yes"),
        ([0.20, 0.21, 0.19], "no"),
        ([-0.20, 0.21, 0.0], "no difference"),
        ([-0.001, -0.001, -0.001], "no difference"),
    ],
)
def test_a_technique_pays_where_all_of_the_interval_is_better(differences: list[float], expected: str) -> None:
    assert pays(np.array(differences)) == expected


def test_what_computes_the_same_has_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    for seed in SEEDS:
        attempt = tmp_path / "losses" / f"plain-{seed}" / "attempt-0"
        attempt.mkdir(parents=True)
        evaluations = [{"num_steps": steps, "loss": 1.0 + seed} for steps in (12, 24)]
        (attempt / "run.json").write_text("{}")
        (attempt / "result.json").write_text(json.dumps({"evaluations": evaluations}))
    same = next(technique for technique in TECHNIQUES if technique.same_loss)
    assert (curve(tmp_path, same).losses == curve(tmp_path, PLAIN).losses).all()
    assert curve(tmp_path, PLAIN).tokens.tolist() == [12 * PLAIN.tokens_per_step, 24 * PLAIN.tokens_per_step]


def test_each_technique_has_a_folder_of_its_own() -> None:
    assert len({technique.folder for technique in techniques.TECHNIQUES}) == len(TECHNIQUES)
