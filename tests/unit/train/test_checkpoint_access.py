"""Whose a checkpoint is, and who can write to it: what others could have written is refused, our own never."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from hpcpace.core.environment import rank_info
from hpcpace.core.errors import DataError, TrainingFailed
from hpcpace.train import checkpoint_folder
from hpcpace.train.checkpoint import StartPoint, agree_on_start, find_checkpoint
from hpcpace.train.checkpoint_folder import read_history

NOBODY = 65534
SHARD = "shard-00001-model-00001-of-00001.safetensors"
PARTS = ("checkpoints", "step-00000001", SHARD, "progress.json")


def _part(checkpoint: Path, name: str) -> Path:
    return {"checkpoints": checkpoint.parent, checkpoint.name: checkpoint}.get(name, checkpoint / name)


def _resume(small_run) -> StartPoint:
    """Do what --resume auto does in a run that was started before."""
    (small_run.path / "attempt-0").mkdir(exist_ok=True)
    info = rank_info({}, host="here")
    start = agree_on_start(small_run.plan, info=info, name="run", run_dir=small_run.path, data_digest="d")
    if start.checkpoint is not None:
        small_run.checkpoints.load(start.checkpoint)
    return start


@pytest.fixture
def chown() -> Callable[[Path], None]:
    return lambda path: os.chown(path, NOBODY, NOBODY)


def test_a_checkpoint_of_the_user_is_resumed(small_run, checkpoint: Path) -> None:
    assert _resume(small_run).checkpoint == checkpoint


@pytest.mark.parametrize("way", ["give_away", pytest.param("chown", marks=pytest.mark.root)])
@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_of_somebody_else_is_refused(
    small_run, checkpoint: Path, name: str, way: str, request: pytest.FixtureRequest
) -> None:
    path = _part(checkpoint, name)
    request.getfixturevalue(way)(path)
    with pytest.raises(DataError) as caught:
        _resume(small_run)
    message = str(caught.value)
    assert f"the checkpoint {checkpoint} is not loaded: {path} belongs to " in message
    assert "uid 65534" in message
    assert f"cp -r {checkpoint} COPY" in message
    assert message.endswith("or --resume never")


@pytest.mark.parametrize(
    ("added", "who"),
    [(stat.S_IWGRP, "by the group"), (stat.S_IWOTH, "by everybody"), (stat.S_IWOTH | stat.S_ISVTX, "by everybody")],
)
@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_that_others_can_write_to_is_refused(
    small_run, checkpoint: Path, name: str, added: int, who: str
) -> None:
    path = _part(checkpoint, name)
    path.chmod(stat.S_IMODE(path.stat().st_mode) | added)
    with pytest.raises(DataError) as caught:
        _resume(small_run)
    folder = path if path.is_dir() else path.parent
    assert f"{path} can be written to {who}" in str(caught.value)
    assert f"chmod -R go-w {folder}, or --resume never" in str(caught.value)


def test_the_advice_that_a_refusal_gives_is_enough(small_run, checkpoint: Path) -> None:
    for path in (checkpoint.parent, checkpoint, *checkpoint.iterdir()):
        path.chmod(0o777)
    with pytest.raises(DataError) as caught:
        _resume(small_run)
    advice = str(caught.value).partition("if all in it is yours, ")[2].partition(", or")[0]
    assert advice == f"chmod -R go-w {checkpoint.parent}"
    assert os.system(advice) == 0
    assert _resume(small_run).checkpoint == checkpoint


@pytest.mark.root
def test_a_copy_of_a_checkpoint_of_somebody_else_is_resumed(small_run, checkpoint: Path, tmp_path: Path) -> None:
    for path in (checkpoint, *checkpoint.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    assert os.system(f"cp -r {checkpoint} {tmp_path}/copy") == 0
    assert read_history(tmp_path / "copy", small_run.plan, data_digest="d").num_steps == 1
    small_run.checkpoints.load(tmp_path / "copy")


def test_a_checkpoint_of_root_is_resumed(small_run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda d: os.stat_result((*fstat(d)[:4], 0, *fstat(d)[5:])))
    assert _resume(small_run).checkpoint == checkpoint


def test_a_run_in_a_folder_that_everybody_can_write_to_is_resumed(small_run, checkpoint: Path) -> None:
    """As in /tmp: what others put in the place of the folder of checkpoints is not the user's own."""
    small_run.path.parent.chmod(0o1777)
    small_run.path.chmod(0o1777)
    assert _resume(small_run).checkpoint == checkpoint


def test_files_of_other_ranks_are_looked_at_too(small_run, checkpoint: Path) -> None:
    (checkpoint / "shard-00007.safetensors").touch()
    (checkpoint / "shard-00007.safetensors").chmod(0o666)
    with pytest.raises(DataError, match=r"shard-00007\.safetensors can be written to by everybody"):
        _resume(small_run)


@pytest.mark.parametrize("name", ["checkpoints", "step-00000001", "progress.json", SHARD, "notes"])
def test_links_in_the_folder_of_checkpoints_are_not_followed(
    small_run, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    path = _part(checkpoint, name)
    if path.exists():
        shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{name}: it is (no folder, or )?a symbolic link"):
        _resume(small_run)


def test_a_run_and_a_checkpoint_may_be_named_by_a_link(small_run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link-to-run").symlink_to(small_run.path)
    found = find_checkpoint(tmp_path / "link-to-run")
    assert found == tmp_path / "link-to-run" / "checkpoints" / checkpoint.name
    (tmp_path / "last").symlink_to(checkpoint)
    assert find_checkpoint(tmp_path / "last") == tmp_path / "last"
    small_run.checkpoints.load(tmp_path / "last")


def test_a_checkpoint_that_is_exchanged_after_it_was_opened_is_not_read(
    small_run, checkpoint: Path, tmp_path: Path
) -> None:
    with checkpoint_folder.open_checkpoint(checkpoint) as folder:
        checkpoint.rename(tmp_path / "moved")
        checkpoint.mkdir()
        (checkpoint / SHARD).write_text("exchanged")
        descriptor = checkpoint_folder.open_checkpoint_file(folder, SHARD)
    assert os.read(descriptor, 9) != b"exchanged"
    os.close(descriptor)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_a_checkpoint_is_written_so_that_it_is_resumed(small_run, umask: Callable[[int], int], mask: int) -> None:
    umask(mask)
    small_run.train()
    path = small_run.save()
    wanted = {name: value.clone() for name, value in small_run.state().items()}
    small_run.train()
    assert _resume(small_run).checkpoint == path
    assert all(torch.equal(value, wanted[name]) for name, value in small_run.state().items())
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()}
    assert modes == dict.fromkeys((SHARD, "progress.json"), 0o644 & ~mask)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent)} == {0o755 & ~mask}


def test_a_folder_of_checkpoints_of_the_user_is_closed_to_others(small_run) -> None:
    folder = small_run.path / "checkpoints"
    folder.mkdir(parents=True)
    folder.chmod(0o3777)
    small_run.train()
    path = small_run.save()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o3755
    assert _resume(small_run).checkpoint == path


def test_no_checkpoint_is_written_into_a_folder_of_somebody_else(small_run, give_away: Callable[[Path], None]) -> None:
    folder = small_run.path / "checkpoints"
    folder.mkdir(parents=True)
    give_away(folder)
    with pytest.raises(TrainingFailed, match=r"belongs to .*, not to you; give a --run-dir of your own"):
        small_run.save()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["checkpoints", ".step-00000001.writing"])
def test_a_checkpoint_is_not_written_through_a_link(small_run, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = small_run.path / "checkpoints" / name if name.startswith(".") else small_run.path / name
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    with pytest.raises(TrainingFailed):
        small_run.save()
    assert not list(elsewhere.iterdir())
