"""Reading the tensors of a checkpoint without running code from it.

Torch's FileSystemReader unpickles `.metadata`, its DefaultLoadPlanner unpickles every entry that is called bytes there,
and tensors are looked for wherever `.metadata` says, also outside of the checkpoint. Each of these runs what a stranger
has put there. The reader here takes tensors only, from regular files of a folder that is held, whose owner and mode
are checked (checkpoint_access), and lets them have no more memory than the model's own.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hpcpace.files import Folder, read_most
from hpcpace.inert_pickle import Record
from hpcpace.quoting import printable
from hpcpace.train.checkpoint_access import open_checkpoint_file, unreadable
from hpcpace.train.checkpoint_metadata import Piece, parse_metadata
from hpcpace.train.checkpoint_pickle import read_checkpoint_pickle

METADATA = ".metadata"
# What torch.save adds to the elements: records of some bytes each, and their names.
_MOST_ADDED_BYTES = 1 << 16
_MOST_REASON = 160


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Plans to load tensors, and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuse what torch would unpickle."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class CheckpointReader(dcp.StorageReader):
    """Reads the tensors of a checkpoint.

    Args:
        folder: the checkpoint, held and checked.
        most_metadata_bytes: limit of what it says that it holds.

    Raises:
        DataError: what it says that it holds cannot be read, or somebody else could have written it.
    """

    def __init__(self, folder: Folder, *, most_metadata_bytes: int) -> None:
        self._folder = folder
        descriptor = open_checkpoint_file(folder, METADATA)
        try:
            self._metadata, self._pieces = parse_metadata(read_most(descriptor, most_metadata_bytes))
        except (OSError, ValueError) as error:
            raise unreadable(folder.path, f"{METADATA}: {error}") from error
        finally:
            os.close(descriptor)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Change nothing: a reader has one checkpoint."""

    # Without the `kwargs` of the base class torch asks for no other file when this one is not as it should be.
    def read_metadata(self) -> Metadata:
        """Return what the checkpoint says that it holds."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: what is where is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the tensors of a plan into those that the planner has for them.

        Raises:
            DataError: a file cannot be read, or somebody else could have written it.
            ValueError: a tensor is not what the checkpoint says.
        """
        with ExitStack() as held:
            files: dict[str, io.BufferedReader] = {}
            for item in plan.items:
                if item.type != LoadItemType.TENSOR:
                    raise ValueError(f"{item.dest_index.fqn} is not a tensor")
                piece = self._pieces[item.storage_index]
                if piece.file not in files:
                    descriptor = open_checkpoint_file(self._folder, piece.file)
                    files[piece.file] = held.enter_context(os.fdopen(descriptor, "rb"))
                source = _read_piece(files[piece.file], piece)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                if (target.dtype, target.shape) != (source.dtype, source.shape):
                    raise ValueError(
                        f"{item.dest_index.fqn} is of {source.dtype}, not {target.dtype}, or has another shape"
                    )
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return that torch is not to choose this reader by itself."""
        return False


def _read_piece(file: io.BufferedReader, piece: Piece) -> Tensor:
    """Return a tensor, on the CPU."""
    most_bytes = math.prod(piece.shape) * piece.dtype.itemsize + _MOST_ADDED_BYTES
    if piece.size_bytes > most_bytes:
        raise ValueError(f"{piece.size_bytes} bytes of {piece.file} are said to be a tensor of {most_bytes} at most")
    if piece.offset_bytes + piece.size_bytes > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{piece.file} ends before byte {piece.offset_bytes + piece.size_bytes}")
    file.seek(piece.offset_bytes)
    try:
        return _tensor(file.read(piece.size_bytes), piece)
    except Exception as error:  # zipfile raises whatever damaged data lead to
        reason = printable(str(error))[:_MOST_REASON]
        raise ValueError(f"byte {piece.offset_bytes} of {piece.file} starts no tensor: {reason}") from error


def _tensor(data: bytes, piece: Piece) -> Tensor:
    """Return the tensor that torch.save has written, if it is a plain one and the one that is wanted.

    torch.load(weights_only=True) runs no code either. Yet it calls all that torch deems harmless with any arguments: a
    DeviceMesh begins to talk to other ranks, and a dictionary of keys that hold each other never ends.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = archive.infolist()
        is_stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
        if not is_stored or sum(record.file_size for record in records) > len(data):
            raise ValueError("it is compressed")
        root = records[0].filename.partition("/")[0] if records else ""
        program = archive.getinfo(f"{root}/data.pkl")
        if program.file_size > _MOST_ADDED_BYTES:
            raise ValueError(f"its pickle has {program.file_size} bytes")
        storage, offset, size, stride = _plain_tensor(read_checkpoint_pickle(archive.read(program)))
        _, dtype, key, _, num_elements = storage
        elements = archive.getinfo(f"{root}/data/{key}")
        if dtype is not piece.dtype or num_elements * dtype.itemsize != elements.file_size:
            raise ValueError("its storage has another length or dtype")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if (
            size != tuple(piece.shape)
            or offset < 0
            or min(stride, default=0) < 0
            or (0 not in size and last >= num_elements)
        ):
            raise ValueError("it has another shape, or reaches beyond its storage")
        if 0 in size:
            return torch.empty(size, dtype=dtype)
        return torch.frombuffer(bytearray(archive.read(elements)), dtype=dtype).as_strided(size, stride, offset)


def _plain_tensor(value: Any) -> tuple[tuple[Any, ...], int, tuple[int, ...], tuple[int, ...]]:
    """Return storage, offset, size and stride of the tensor that a pickle asks for."""
    if not isinstance(value, Record) or value.kind != "_rebuild_tensor_v2" or not 6 <= len(value.arguments) <= 7:
        raise ValueError("it is not a plain tensor")
    storage, offset, size, stride = value.arguments[:4]
    if not isinstance(storage, Record) or storage.kind != "storage" or len(storage.arguments) != 5:
        raise ValueError("it has no storage")
    if not isinstance(storage.arguments[2], str) or type(storage.arguments[4]) is not int:
        raise ValueError("its storage has no name or length")
    numbers = [offset, *size, *stride] if isinstance(size, tuple) and isinstance(stride, tuple) else [None]
    if any(type(number) is not int for number in numbers):
        raise ValueError("its shape is not of whole numbers")
    return storage.arguments, offset, size, stride
