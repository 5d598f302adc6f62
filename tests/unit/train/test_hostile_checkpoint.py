"""Checkpoints that somebody has changed to run code, to read other files, or to fill memory: each is refused."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from hpcpace.core.errors import DataError

WEIGHT = "tp0.stage0.0.weight"
SHARD = "shard-00001-model-00001-of-00001.safetensors"
Header = dict[str, Any]
Change = Callable[[Header], Any]


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _parts(checkpoint: Path) -> tuple[Header, bytes]:
    data = (checkpoint / SHARD).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def _file(header: Header | bytes, content: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def _change(checkpoint: Path, change: Change) -> None:
    header, content = _parts(checkpoint)
    change(header)
    (checkpoint / SHARD).write_bytes(_file(header, content))


def _offsets(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change what torch.distributed.checkpoint adds: where a part begins in its tensor."""

    def changed(header: Header) -> None:
        offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        change(offsets)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)

    return changed


def _refused(small_run, checkpoint: Path, seen: str) -> None:
    before = {name: value.clone() for name, value in small_run.state().items()}
    with pytest.raises(DataError, match=seen) as caught:
        small_run.checkpoints.load(checkpoint)
    assert str(checkpoint) in str(caught.value)
    assert "--resume never" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert torch.equal(small_run.state()[WEIGHT], before[WEIGHT])


def test_a_sound_checkpoint_is_loaded_bit_for_bit(small_run, checkpoint: Path) -> None:
    fresh = {name: value.clone() for name, value in small_run.state().items()}
    small_run.checkpoints.load(checkpoint)
    loaded, stored = small_run.state(), load_file(checkpoint / SHARD)
    assert len(stored) > 10
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    assert not torch.equal(loaded[WEIGHT], fresh[WEIGHT])


def test_a_checkpoint_that_was_taken_apart_and_put_together_is_loaded(small_run, checkpoint: Path) -> None:
    """What the tests below change is what is refused."""
    _change(checkpoint, lambda header: None)
    small_run.checkpoints.load(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.pt", "model.safetensors.index.json"])
def test_code_in_other_files_is_not_run(small_run, checkpoint: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(Call(os.system, f"touch {marker}"))
    pickle.loads(data)
    assert marker.exists(), "the test is wrong: these data run nothing"
    marker.unlink()
    (checkpoint / name).write_bytes(data)
    small_run.checkpoints.load(checkpoint)
    assert not marker.exists()


def test_code_in_a_file_of_tensors_is_not_run(small_run, checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for data in (
        pickle.dumps(Call(os.system, f"touch {marker}")),
        _file(pickle.dumps(Call(os.system, f"touch {marker}")), b""),
    ):
        (checkpoint / SHARD).write_bytes(data)
        _refused(small_run, checkpoint, "header")
    torch.save(Call(os.system, f"touch {marker}"), checkpoint / SHARD)
    _refused(small_run, checkpoint, "header")
    assert not marker.exists()


@pytest.mark.parametrize("name", [SHARD, "other.safetensors"])
def test_a_link_in_a_checkpoint_is_not_followed(small_run, checkpoint: Path, tmp_path: Path, name: str) -> None:
    if (checkpoint / name).exists():
        shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    _refused(small_run, checkpoint, f"{name}: it is a symbolic link, which is not followed")


@pytest.mark.parametrize("name", [SHARD, "other.safetensors"])
def test_a_fifo_in_a_checkpoint_is_not_waited_for(small_run, checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    _refused(small_run, checkpoint, "it is no regular file")


def test_a_folder_in_a_checkpoint_is_not_searched(small_run, checkpoint: Path) -> None:
    (checkpoint / "inner.safetensors").mkdir()
    _refused(small_run, checkpoint, "no regular file")


def _weight(**changes: Any) -> Change:
    return lambda header: header[WEIGHT].update(changes)


HUGE = 1 << 40


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda h: h.pop(WEIGHT), "header"),  # its bytes belong to no tensor
        (lambda h: h.update(other=h.pop(WEIGHT)), "."),
        (lambda h: h.update({"x" * 100_000: h[WEIGHT]}), "."),
        (lambda h: h.update({"\x1b[2J": h[WEIGHT]}), "."),
        (_weight(shape=[HUGE, 3]), "header"),
        (_weight(shape=[3]), "header"),
        (_weight(shape=[2, 3, 1]), "."),
        (_weight(shape=[3, 2]), "."),
        (_weight(shape=[-2, -3]), "header"),
        (_weight(shape=[1 << 63, 1 << 63]), "header"),
        (_weight(shape="23"), "header"),
        (_weight(dtype="I32"), "has type torch.int32, not torch.float32"),
        (_weight(dtype="F64"), "header"),
        (_weight(dtype="F4"), "."),
        (_weight(dtype="code"), "header"),
        (_weight(data_offsets=[0, HUGE]), "header"),
        (_weight(data_offsets=[-8, 16]), "header"),
        (_weight(data_offsets=[24, 0]), "header"),
        (lambda h: h.pop("__metadata__"), "."),
        (lambda h: h.update(__metadata__={"DCP_SHARDING_INFO": "[" * 100_000}), "."),
        (lambda h: h.update(__metadata__={"DCP_SHARDING_INFO": "{}"}), "."),
        (lambda h: h.update(__metadata__={"DCP_SHARDING_INFO": "5"}), "."),
        (_offsets(lambda o: o.pop(WEIGHT)), "."),
        (_offsets(lambda o: o.update({WEIGHT: 5})), "."),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=["a", "b"])), "."),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=[1, 0])), r"has shape \(3, 3\), not \(2, 3\)"),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=[-1, 0])), "."),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=[HUGE, 0])), "."),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=[0])), "."),
        (_offsets(lambda o: o[WEIGHT].update(saved_offsets=[0] * 100_000)), "."),
    ],
)
def test_headers_that_contradict_themselves_or_the_model_are_refused(
    small_run, checkpoint: Path, change: Change, seen: str
) -> None:
    _change(checkpoint, change)
    if _parts(checkpoint)[0].get("__metadata__") is None:
        small_run.checkpoints.load(checkpoint)  # safetensors of others do not say where parts begin: they are whole
        return
    _refused(small_run, checkpoint, seen)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, b"\0" * 7, struct.pack("<Q", 1 << 62) + b"{}", _file(b"{" * 10_000, b""), _file(b"null", b"")],
)
def test_what_is_no_file_of_tensors_is_refused(small_run, checkpoint: Path, data: bytes) -> None:
    (checkpoint / SHARD).write_bytes(data)
    _refused(small_run, checkpoint, f"{SHARD}': ")


def test_a_file_that_was_cut_off_is_refused(small_run, checkpoint: Path) -> None:
    whole = (checkpoint / SHARD).read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 9):
        (checkpoint / SHARD).write_bytes(whole[:length])
        _refused(small_run, checkpoint, f"{SHARD}': .*(header|incomplete|metadata)")


def test_a_tensor_that_is_there_twice_is_refused(small_run, checkpoint: Path) -> None:
    """As in a folder into which somebody copied a file of another checkpoint."""
    shutil.copy(checkpoint / SHARD, checkpoint / "shard-00002-model-00001-of-00001.safetensors")
    _refused(small_run, checkpoint, "do not make up its shape")


def test_a_checkpoint_without_its_file_is_refused(small_run, checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    _refused(small_run, checkpoint, r"Missing key in checkpoint state_dict: tp0.stage0.0.\w+")


def test_tensors_of_the_model_have_no_more_memory_than_it(small_run, checkpoint: Path) -> None:
    """A file may be as large as somebody likes: only what the model has is read from it."""
    header, content = _parts(checkpoint)
    header["other"] = {"dtype": "U8", "shape": [1 << 32], "data_offsets": [len(content), len(content) + (1 << 32)]}
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) | {"other": {"saved_offsets": [0]}}
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    (checkpoint / SHARD).write_bytes(_file(header, content))
    os.truncate(checkpoint / SHARD, (checkpoint / SHARD).stat().st_size + (1 << 32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    small_run.checkpoints.load(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
