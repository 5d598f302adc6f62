from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hpcpace.core.errors import DataError
from hpcpace.train.checkpoint import find_checkpoint
from hpcpace.train.checkpoint_folder import CHECKPOINT_SCHEMA, identity_of, read_history
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig


@pytest.fixture(autouse=True)
def usual_umask(umask: Callable[[int], int]) -> None:
    """Let the checkpoints that are made by hand here be those of the user alone."""


def _plan(**settings: Any):
    return plan_training(TrainConfig(**settings), 1)


def _checkpoint(run: Path, num_steps: int, *, digest: str = "d", **settings: Any) -> Path:
    path = run / "checkpoints" / f"step-{num_steps:08d}"
    path.mkdir(parents=True)
    content = {
        "schema": CHECKPOINT_SCHEMA,
        "identity": identity_of(_plan(**settings), digest),
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


def _changed(**changes: Any) -> str:
    content = {"schema": CHECKPOINT_SCHEMA, "identity": identity_of(_plan(), "d"), "num_steps": 1, "losses": [1.0]}
    return json.dumps({**content, "evaluations": [], **changes})


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("", "cannot read the checkpoint"),
        ("{", "cannot read the checkpoint"),
        ("{}", "it has schema None, not hpcpace-checkpoint/2"),
        ("[]", r"it is \[\]: expected an object"),
        ("NaN", "it is nan: expected an object"),
        (b"\xff\xfe\x00", "cannot read the checkpoint"),
        (b"\x80abc", "cannot read the checkpoint"),
        ("[" * 100_000, "recursion"),
        ('{"a":' * 100_000, "recursion"),
        (" " * (17 << 20), "it has more than"),
        ('{"schema": "x", "identity": {}, "num_steps": 1, "losses": [], "evaluations": []}', "has schema 'x'"),
        (_changed(schema=["\x1b[2J"] * 10_000), "it has schema"),
        (_changed(identity=None), "identity is None: expected an object"),
        (_changed(identity=[["seed", 0]]), r"identity is \[\['seed', 0\]\]: expected an object"),
        (_changed(identity={}), "was trained with batch_size None, not 8"),
        (_changed(identity={"\x1b[2J" + "x" * 10_000: 1}), r"trained with '\\x1b\[2Jxxx"),
        (_changed(identity={**identity_of(_plan(), "d"), "seed": float("nan")}), "was trained with seed nan, not 0"),
        (
            _changed(identity={**identity_of(_plan(), "d"), "seed": [[[0]]]}),
            r"was trained with seed \[\[\[0\]\]\], not 0",
        ),
        (_changed(num_steps=None), "num_steps is None: expected an integer"),
        (_changed(num_steps=float("nan")), "num_steps is nan: expected an integer"),
        (_changed(num_steps=float("inf")), "num_steps is inf: expected an integer"),
        (_changed(num_steps=1.0), r"num_steps is 1\.0: expected an integer"),
        (_changed(num_steps=-1), "num_steps is -1: expected an integer"),
        (_changed(num_steps=True), "num_steps is True: expected an integer"),
        (_changed(num_steps="1"), "num_steps is '1': expected an integer"),
        (_changed(num_steps=2), "it has 1 losses for 2 steps"),
        (_changed(losses="1"), "losses is '1': expected a list"),
        (_changed(losses=["1"]), r"losses\[0\] is '1': expected a number"),
        (_changed(losses=[None]), r"losses\[0\] is None: expected a number"),
        (_changed(losses=[[1.0]]), r"losses\[0\] is \[1\.0\]: expected a number"),
        (_changed(losses=[True]), r"losses\[0\] is True: expected a number"),
        (_changed(losses={"0": 1.0}), r"losses is \{'0': 1\.0\}: expected a list"),
        (_changed(losses=[10**400]), r"losses\[0\] is <an integer of 1329 bits>: Number out of range"),
        (_changed().replace("1.0", "1" * 5000), "digits"),
        (_changed(evaluations=None), "evaluations is None: expected a list"),
        (_changed(evaluations=[5]), r"evaluations\[0\] is 5: expected an object"),
        (_changed(evaluations=[{"loss": "1"}]), r"evaluations\[0\]\.loss is '1': expected an integer or a number"),
        (
            _changed(evaluations=[{"loss": [[[]]]}]),
            r"evaluations\[0\]\.loss is \[\[\[\]\]\]: expected",
        ),
    ],
)
def test_refuses_a_checkpoint_that_cannot_be_read(tmp_path: Path, content: str | bytes, seen: str) -> None:
    path = _checkpoint(tmp_path, 3)
    (path / "progress.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=seen) as caught:
        read_history(path, _plan(), data_digest="d")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_refuses_progress_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = _checkpoint(tmp_path, 3)
    (path / "progress.json").unlink()
    make(path / "progress.json")
    assert find_checkpoint(tmp_path) == path
    with pytest.raises(DataError, match=r"progress\.json: it is"):
        read_history(path, _plan(), data_digest="d")


def test_losses_that_are_no_numbers_any_more_are_kept(tmp_path: Path) -> None:
    """A training that has diverged is resumed as any other."""
    path = _checkpoint(tmp_path, 3)
    (path / "progress.json").write_text(_changed(losses=[float("nan")]))
    losses = read_history(path, _plan(), data_digest="d").losses
    assert len(losses) == 1
    assert losses[0] != losses[0]


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_path_without_a_run_holds_no_checkpoint(tmp_path: Path, what: str) -> None:
    if what == "a file":
        (tmp_path / "run").touch()
    assert find_checkpoint(tmp_path / "run") is None


def test_a_file_in_the_place_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(DataError, match="checkpoints: it is no folder"):
        find_checkpoint(tmp_path)
