from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hpcpace.config import TrainConfig
from hpcpace.errors import DataError
from hpcpace.train.checkpoint import CHECKPOINT_SCHEMA, _identity, find_checkpoint, read_history
from hpcpace.train.plan import plan_training


def _plan(**settings: Any):
    return plan_training(TrainConfig(**settings), 1)


def _checkpoint(run: Path, num_steps: int, *, digest: str = "d", **settings: Any) -> Path:
    path = run / "checkpoints" / f"step-{num_steps:08d}"
    path.mkdir(parents=True)
    content = {
        "schema": CHECKPOINT_SCHEMA,
        "identity": _identity(_plan(**settings), digest),
        "num_steps": num_steps,
        "losses": [1.0] * num_steps,
        "evaluations": [],
    }
    (path / "progress.json").write_text(json.dumps(content))
    return path


def test_the_last_whole_checkpoint_of_a_run_counts(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    _checkpoint(tmp_path, 99)
    last = _checkpoint(tmp_path, 100)
    (tmp_path / "checkpoints" / ".step-00000200.writing").mkdir()
    (tmp_path / "checkpoints" / "step-00000300").mkdir()  # without progress.json, which is written last
    assert find_checkpoint(tmp_path) == last
    assert find_checkpoint(last) == last


@pytest.mark.parametrize("settings", [{"steps": 400}, {"eval_every": 5}, {"inject": ("rank=0,size=5%",)}, {}])
def test_settings_that_shape_no_loss_may_change(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = _checkpoint(tmp_path, 3)
    history = read_history(path, _plan(**settings), data_digest="d")
    assert (history.num_steps, history.losses) == (3, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "digest", "seen"),
    [
        ({"learning_rate": 1.0}, "d", "trained with learning_rate 0.0003, not 1.0"),
        ({"seq_len": 64}, "d", "trained with seq_len 128, not 64"),
        ({"model": "resnet18"}, "d", "trained with model 'gpt2', not 'resnet18'"),
        ({}, "other", "trained with data 'd', not 'other'"),
    ],
)
def test_settings_that_shape_losses_must_stay(tmp_path: Path, settings: dict[str, Any], digest: str, seen: str) -> None:
    path = _checkpoint(tmp_path, 3)
    with pytest.raises(DataError, match=seen):
        read_history(path, _plan(**settings), data_digest=digest)


def test_the_mesh_must_stay(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 3)
    with pytest.raises(DataError, match="trained with mesh 'dp=1,pp=1,tp=1', not 'dp=2,pp=1,tp=1'"):
        read_history(path, plan_training(TrainConfig(), 2), data_digest="d")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("{", "cannot read the checkpoint"),
        ("{}", "cannot read the checkpoint"),
        ("[]", "cannot read the checkpoint"),
        ('{"schema": "x", "identity": {}, "num_steps": 1, "losses": [], "evaluations": []}', "has schema 'x'"),
    ],
)
def test_refuses_a_checkpoint_that_cannot_be_read(tmp_path: Path, content: str, seen: str) -> None:
    path = _checkpoint(tmp_path, 3)
    (path / "progress.json").write_text(content)
    with pytest.raises(DataError, match=seen):
        read_history(path, _plan(), data_digest="d")
