"""Checkpoints that somebody has changed to run code, to read other files, or to fill memory: each is refused."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.device_mesh import DeviceMesh

from hpcpace.errors import DataError
from hpcpace.train.checkpoint_metadata import Piece
from hpcpace.train.checkpoint_reader import TensorPlanner, _tensor

Change = Callable[[Metadata], Any]
WEIGHT = "tp0.stage0.0.weight"


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _metadata(checkpoint: Path) -> Metadata:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def _change(checkpoint: Path, change: Change) -> None:
    metadata = _metadata(checkpoint)
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def _index(metadata: Metadata, name: str = WEIGHT) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == name)


def _point_weight_to(data: bytes, checkpoint: Path) -> None:
    """Let the checkpoint say that a weight is in a file with these data."""
    (checkpoint / "__9_9.distcp").write_bytes(data)
    _change(checkpoint, lambda m: m.storage_data.update({_index(m): _StorageInfo("__9_9.distcp", 0, len(data))}))


def _saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _refused(small_run, checkpoint: Path, seen: str) -> None:
    with pytest.raises(DataError, match=seen) as caught:
        small_run.checkpoints.load(checkpoint)
    assert str(checkpoint) in str(caught.value)
    assert "--resume never" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_sound_checkpoint_is_loaded_bit_for_bit(small_run, checkpoint: Path) -> None:
    fresh = {name: value.clone() for name, value in small_run.state().items()}
    small_run.checkpoints.load(checkpoint)
    loaded = small_run.state()
    stored = {name: torch.empty_like(value) for name, value in loaded.items()}
    dcp.load(stored, checkpoint_id=checkpoint)
    assert len(stored) > 10
    assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    assert not torch.equal(loaded[WEIGHT], fresh[WEIGHT])


def test_a_checkpoint_of_python_3_13_is_loaded(small_run, checkpoint: Path) -> None:
    """There the module of PosixPath is called pathlib._local."""
    path = checkpoint / ".metadata"
    data = pickle.dumps(_metadata(checkpoint), protocol=3)
    assert b"cpathlib\nPosixPath\n" in data
    path.write_bytes(data.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"))
    small_run.checkpoints.load(checkpoint)


def test_a_checkpoint_of_python_3_11_2_is_loaded(small_run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a member of an enumeration is pickled as a call of getattr, in other versions as one of its class."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    data = pickle.dumps(_metadata(checkpoint))
    assert b"getattr" in data
    (checkpoint / ".metadata").write_bytes(data)
    small_run.checkpoints.load(checkpoint)


HIDDEN: dict[str, Callable[[Metadata, Any], Any]] = {
    "all of it": lambda metadata, gadget: gadget,
    "planner_data": lambda metadata, gadget: replace(metadata, planner_data=gadget),
    "storage_meta": lambda metadata, gadget: replace(metadata, storage_meta=gadget),
    "checkpoint_id": lambda metadata, gadget: replace(metadata, storage_meta=StorageMeta(checkpoint_id=gadget)),
    "version": lambda metadata, gadget: replace(metadata, version=gadget),
    "a size": lambda metadata, gadget: replace(
        metadata,
        state_dict_metadata={WEIGHT: replace(metadata.state_dict_metadata[WEIGHT], size=gadget)},
    ),
    "a path": lambda metadata, gadget: replace(metadata, storage_data={_index(metadata): _StorageInfo(gadget, 0, 1)}),
    "a transformation": lambda metadata, gadget: replace(
        metadata, storage_data={_index(metadata): _StorageInfo("__0_0.distcp", 0, 1, gadget)}
    ),
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_code_in_the_metadata_is_not_run(small_run, checkpoint: Path, tmp_path: Path, hide: Any) -> None:
    marker = tmp_path / "marker"
    hidden = hide(_metadata(checkpoint), Call(os.system, f"touch {marker}"))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(hidden))
    with contextlib.suppress(dcp.CheckpointException):
        dcp.load(small_run.state(), checkpoint_id=checkpoint)
    assert marker.exists(), "the test is wrong: torch's own reader runs nothing"
    marker.unlink()
    _refused(small_run, checkpoint, "asks for 'posix.system', which no checkpoint needs")
    assert not marker.exists()


def test_an_entry_of_bytes_is_not_unpickled(small_run, checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    _point_weight_to(_saved(Call(os.system, f"touch {marker}")), checkpoint)

    def say_bytes(metadata: Metadata) -> None:
        info = metadata.storage_data.pop(_index(metadata))
        metadata.storage_data[MetadataIndex(WEIGHT)] = info
        metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()

    _change(checkpoint, say_bytes)
    dcp.load(small_run.state(), checkpoint_id=checkpoint)
    assert marker.exists(), "the test is wrong: torch's own planner unpickles nothing"
    marker.unlink()
    _refused(small_run, checkpoint, "BytesStorageMetadata', which no checkpoint needs")
    assert not marker.exists()


def test_the_planner_refuses_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    item: Any = type("Item", (), {"dest_index": MetadataIndex("name")})
    data = _saved(Call(os.system, f"touch {marker}"))
    with pytest.raises(ValueError, match="name is not a tensor"):
        TensorPlanner().load_bytes(item, io.BytesIO(data))
    assert not marker.exists()
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    planner.load_bytes(item, io.BytesIO(data))
    assert marker.exists(), "the test is wrong: torch's own planner unpickles nothing"


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (_saved, lambda file: torch.load(file, weights_only=False)),
        (lambda v: _saved(v, _use_new_zipfile_serialization=False), lambda file: torch.load(file, weights_only=False)),
        (pickle.dumps, pickle.load),
    ],
    ids=["zip", "legacy", "bare pickle"],
)
def test_code_in_a_file_of_tensors_is_not_run(
    small_run, checkpoint: Path, tmp_path: Path, save: Callable[[Any], bytes], load: Callable[[io.BytesIO], Any]
) -> None:
    marker = tmp_path / "marker"
    data = save(Call(os.system, f"touch {marker}"))
    load(io.BytesIO(data))
    assert marker.exists(), "the test is wrong: these data run nothing"
    marker.unlink()
    _point_weight_to(data, checkpoint)
    _refused(small_run, checkpoint, "starts no tensor")
    assert not marker.exists()


def _object_with_allowed_class() -> Any:
    return Call(DeviceMesh, "cpu", Call(torch.Size, (0,)))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (_object_with_allowed_class(), "asks for 'torch.distribut.*which no checkpoint needs"),
        ({"a": torch.zeros(2, 3)}, "it is not a plain tensor"),
        (torch.nn.Parameter(torch.zeros(2, 3)), "asks for 'torch._utils._rebuild_parameter'"),
        (torch.zeros(2, 3).to_sparse(), "asks for 'torch._utils._rebuild_sparse_tensor'"),
        (torch.zeros(2, 3, device="meta"), "asks for"),
        (torch.zeros(3, 2), "it has another shape"),
        (torch.zeros(2, 3, dtype=torch.float64), "its storage has another length or dtype"),
        (torch.zeros(2, 3, dtype=torch.int32), "its storage has another length or dtype"),
        (torch.zeros(1).expand(1 << 40), "it has another shape"),
    ],
)
def test_only_the_tensor_that_is_wanted_is_made(small_run, checkpoint: Path, value: Any, seen: str) -> None:
    _point_weight_to(_saved(value), checkpoint)
    _refused(small_run, checkpoint, seen)


def _rezipped(change: Callable[[bytes], bytes], storage: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a saved tensor with another pickle and storage."""
    saved, made = zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(2, 3)))), io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for record in saved.infolist():
            data = saved.read(record)
            if record.filename.endswith("/data.pkl"):
                data = change(data)
            archive.writestr(record.filename, storage if record.filename.endswith("/data/0") else data)
    return made.getvalue()


# A tuple of two times the same tuple, and so on, which has 2**40 parts as a text.
HUGE_TEXT = b")" + b"q\xf0h\xf0\x86" * 40


_LONG_NAME = b"X" + (30_000).to_bytes(4, "little") + b"\x1b" * 30_000


# In the pickle of a tensor of 2 times 3: size (2, 3) as K\x02K\x03\x86, stride (3, 1), 6 elements before the t.
@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (_rezipped(lambda data: data, bytes(1 << 22), zipfile.ZIP_DEFLATED), "it is compressed"),
        (_rezipped(lambda data: data, bytes(1 << 24)), "said to be a tensor of 65560 at most"),
        (_rezipped(lambda data: data, bytes(20)), "its storage has another length"),
        (_rezipped(lambda data: data, bytes(25)), "its storage has another length"),
        (_rezipped(lambda data: data.replace(b"K\x06tq", b"J\x00\x00\x00\x40tq"), bytes(24)), "another length"),
        (_rezipped(lambda data: data.replace(b"K\x03K\x01\x86", b"J\x00\x00\x00\x40K\x01\x86"), bytes(24)), "reaches"),
        (_rezipped(lambda data: data.replace(b"K\x03K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"), bytes(24)), "reaches"),
        (_rezipped(lambda data: data.replace(b"QK\x00", b"QK\x05"), bytes(24)), "reaches"),
        (_rezipped(lambda data: data.replace(b"QK\x00", b"QN"), bytes(24)), "its shape is not of whole"),
        (
            _rezipped(lambda data: data.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"), bytes(24)),
            "no item named",
        ),
        (_rezipped(lambda data: data.replace(b"X\x01\x00\x00\x000", HUGE_TEXT), bytes(24)), "hold each other more"),
        # The keys of the hooks, a dictionary that torch.load would make.
        (_rezipped(lambda data: data.replace(b")R", b"]" + HUGE_TEXT + b"N\x86a\x85R"), bytes(24)), "hold each other"),
        (_rezipped(lambda data: data.replace(b"X\x01\x00\x00\x000", _LONG_NAME), bytes(24)), "no item named"),
        (_rezipped(lambda data: data.replace(b"K\x06tq", b")tq"), bytes(24)), "its storage has no name or length"),
        (
            _rezipped(lambda data: data[:2] + b"]" * 65500 + data[2:], bytes(24)),
            "said to be a tensor of",
        ),
        (_rezipped(lambda data: data[:-3], bytes(24)), "starts no tensor"),
        (_saved(torch.zeros(2, 3))[:-40], "starts no tensor"),
        (b"", "starts no tensor"),
    ],
)
def test_a_tensor_takes_no_more_memory_than_the_one_that_is_wanted(
    small_run, checkpoint: Path, data: bytes, seen: str
) -> None:
    _point_weight_to(data, checkpoint)
    _refused(small_run, checkpoint, seen)


def test_the_pickle_of_a_large_tensor_is_short() -> None:
    """Else it could have as many lists as the tensor has bytes."""
    data = _rezipped(lambda data: data[:2] + b"]" * (1 << 17) + data[2:], bytes(24))
    piece = Piece(file="", offset_bytes=0, size_bytes=0, dtype=torch.float32, shape=torch.Size((1 << 20,)))
    with pytest.raises(ValueError, match="its pickle has 131226 bytes"):
        _tensor(data, piece)


def test_the_changes_to_the_pickle_of_a_tensor_are_what_is_refused(small_run, checkpoint: Path) -> None:
    _point_weight_to(_rezipped(lambda data: data, bytes(24)), checkpoint)
    small_run.checkpoints.load(checkpoint)
    assert not small_run.state()[WEIGHT].any()


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.distcp", "../../../secret.distcp", "/etc/passwd", "sub/__0_0.distcp", "./__0_0.distcp", ".", ".."),
        *(
            "",
            "__0_0.distcp/",
            "__0_0.distcp\n",
            "__0_0.distcp\0",
            "__\N{ARABIC-INDIC DIGIT ZERO}_0.distcp",
            "progress.json",
            "__0_0.distcp.pt",
        ),
        *(5, None, ["__0_0.distcp"], Path("__0_0.distcp")),
    ],
)
def test_a_tensor_is_looked_for_in_the_checkpoint_only(small_run, checkpoint: Path, path: Any) -> None:
    secret = checkpoint.parent / "secret.distcp"
    shutil.copy(checkpoint / "__0_0.distcp", secret)

    def lead_away(metadata: Metadata) -> None:
        info = metadata.storage_data[_index(metadata)]
        metadata.storage_data[_index(metadata)] = replace(info, relative_path=path)

    _change(checkpoint, lead_away)
    _refused(small_run, checkpoint, "which is not a file of a checkpoint")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("__0_0.distcp", r"__0_0.distcp: it is a symbolic link, which is not followed"),
        (".metadata", r"\.metadata: it is a symbolic link, which is not followed"),
    ],
)
def test_a_link_in_a_checkpoint_is_not_followed(
    small_run, checkpoint: Path, tmp_path: Path, name: str, seen: str
) -> None:
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    _refused(small_run, checkpoint, seen)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_fifo_in_a_checkpoint_is_not_waited_for(small_run, checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    _refused(small_run, checkpoint, "it is no regular file")


def test_no_other_metadata_are_looked_for(small_run, checkpoint: Path) -> None:
    (checkpoint / ".metadata").rename(checkpoint / "__0.metadata")
    _refused(small_run, checkpoint, r"\.metadata: No such file")


def test_metadata_that_are_longer_than_the_model_needs_are_not_read(small_run, checkpoint: Path) -> None:
    with (checkpoint / ".metadata").open("ab") as file:
        file.truncate(1 << 40)
    _refused(small_run, checkpoint, "it has more than")


def _many_tensors_share_many_chunks(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata[WEIGHT]
    tensor.chunks[:] = tensor.chunks * 20_000
    metadata.state_dict_metadata.update({f"{number}": tensor for number in range(20_000)})


def _resized(**changes: Any) -> Change:
    def change(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata[WEIGHT]
        chunk = tensor.chunks[0]
        tensor.chunks[0] = replace(
            chunk, sizes=changes.get("sizes", chunk.sizes), offsets=changes.get("offsets", chunk.offsets)
        )
        tensor.size = changes.get("size", tensor.size)
        tensor.properties.dtype = changes.get("dtype", tensor.properties.dtype)

    return change


def _stored(**changes: Any) -> Change:
    return lambda m: m.storage_data.update({_index(m): replace(m.storage_data[_index(m)], **changes)})


def _all_stored(**changes: Any) -> Change:
    return lambda m: m.storage_data.update({key: replace(info, **changes) for key, info in m.storage_data.items()})


def _halved_twice(metadata: Metadata) -> None:
    """Let a tensor be made up of one half of it, two times."""
    tensor = metadata.state_dict_metadata[WEIGHT]
    half = replace(tensor.chunks[0], sizes=torch.Size((1, 3)))
    tensor.chunks[:] = [half, half]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda m: m.state_dict_metadata[WEIGHT].chunks.clear(), r"do not make up its shape \(2, 3\)"),
        (lambda m: m.state_dict_metadata.pop(WEIGHT), "Missing key in checkpoint state_dict: tp0.stage0.0.weight"),
        (lambda m: m.storage_data.pop(_index(m)), "it does not say where 'tp0.stage0.0.weight' is"),
        (lambda m: m.storage_data.clear(), "it does not say where"),
        (lambda m: setattr(m, "storage_data", None), "it has no storage_data"),
        (lambda m: setattr(m, "state_dict_metadata", []), "it has no state_dict_metadata"),
        (lambda m: m.storage_data.update({"a": 1}), "expected a MetadataIndex, found a str"),
        (lambda m: m.state_dict_metadata.update({WEIGHT: 5}), "expected a TensorStorageMetadata, found a int"),
        (lambda m: m.state_dict_metadata.update({WEIGHT: m.storage_meta}), "found a StorageMeta"),
        (_many_tensors_share_many_chunks, "hold each other more than|has more than"),
        (_resized(size=torch.Size((1 << 40, 3)), sizes=torch.Size((1 << 40, 3))), "Size mismatch"),
        (_resized(size=(2, 3)), "a tensor has no size"),
        (_resized(size=torch.Size([1] * 17), sizes=torch.Size([1] * 17), offsets=torch.Size([0] * 17)), "too many dim"),
        (_resized(sizes=torch.Size((1 << 40, 3))), "a chunk is outside of its tensor"),
        (_resized(offsets=torch.Size((1, 0))), "a chunk is outside of its tensor"),
        (_resized(sizes=torch.Size((2, 3, 1))), "a chunk is outside of its tensor"),
        (_resized(dtype=torch.float64), "its storage has another length or dtype"),
        (_resized(dtype="float32"), "a tensor has no dtype"),
        (_stored(offset=-1), "negative or too large"),
        (_stored(offset=1 << 80), "negative or too large"),
        (_stored(offset=1 << 61), "ends before byte"),
        (_stored(offset=1), "two tensors are at byte"),
        (_all_stored(offset=0), "two tensors are at byte 0 of __0_0.distcp"),
        (lambda m: m.state_dict_metadata[WEIGHT].chunks.append(m.state_dict_metadata[WEIGHT].chunks[0]), "make up its"),
        (_halved_twice, "has a chunk twice"),
        (_stored(relative_path=f"__{'0' * 100_000}_0.distcp"), "which is not a file of a checkpoint"),
        (_stored(offset=1 << 40, length=1 << 40), "said to be a tensor of 65560 at most"),
        (_stored(length=True), "negative or too large"),
        (_stored(length=2.5), "negative or too large"),
        (_stored(relative_path="__8_8.distcp"), "__8_8.distcp: No such file"),
        (_stored(transform_descriptors=["stream.zstd/1"]), "compressed or encrypted"),
    ],
)
def test_metadata_that_contradict_themselves_or_the_model_are_refused(
    small_run, checkpoint: Path, change: Change, seen: str
) -> None:
    _change(checkpoint, change)
    _refused(small_run, checkpoint, seen)


def test_a_message_does_not_repeat_what_a_stranger_wrote(small_run, checkpoint: Path) -> None:
    """Control characters could clear the terminal, and a long text hide the reason."""
    _change(checkpoint, _stored(relative_path="\x1b[2J" + "x" * 100_000))
    _refused(small_run, checkpoint, "leads to")


def test_metadata_of_shared_lists_take_little_memory(small_run, checkpoint: Path) -> None:
    _change(checkpoint, _many_tensors_share_many_chunks)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            small_run.checkpoints.load(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
