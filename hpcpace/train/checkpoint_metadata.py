"""What a checkpoint says that it holds: `.metadata` of torch.distributed.checkpoint, checked field by field.

Torch's own objects are made here, of checked values, and only of tensors: a checkpoint of hpcpace has no other entries,
while torch would unpickle those of other kinds. A tensor may only be said to be in a file of the checkpoint itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcpace.inert_pickle import Record
from hpcpace.quoting import shown
from hpcpace.train.checkpoint_pickle import read_checkpoint_pickle

_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_MOST = 1 << 62
_MOST_DIMS = 16
# A list in a pickle may be in many places; a chunk that is written down takes more bytes than these.
_LEAST_CHUNK_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where a tensor is, or the part of one that a rank has written.

    Attributes:
        file: name of a file of the checkpoint.
        offset_bytes: where it begins there.
        size_bytes: how long it is there.
        dtype: its elements.
        shape: its shape.
    """

    file: str
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size


def parse_metadata(data: bytes) -> tuple[Metadata, dict[MetadataIndex, Piece]]:
    """Return what `.metadata` says, as torch wants it for planning, and where each piece is.

    Raises:
        ValueError: it is not metadata of tensors, or contradicts itself.
    """
    fields = _fields(read_checkpoint_pickle(data), "Metadata")
    stored = {_index(key): _fields(value, "_StorageInfo") for key, value in _table(fields, "storage_data").items()}
    tensors: dict[str, TensorStorageMetadata] = {}
    pieces: dict[MetadataIndex, Piece] = {}
    most_chunks = len(data) // _LEAST_CHUNK_BYTES
    for key, value in _table(fields, "state_dict_metadata").items():
        name, tensor = _name(key), _tensor(value, most_chunks)
        most_chunks -= len(tensor.chunks)
        tensors[name] = tensor
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            if index not in stored:
                raise ValueError(f"it does not say where {shown(name)} is")
            if index in pieces:
                raise ValueError(f"{shown(name)} has a chunk twice")
            pieces[index] = _piece(stored[index], tensor.properties.dtype, chunk.sizes)
    _check_apart(pieces)
    return Metadata(state_dict_metadata={**tensors}), pieces


def _check_apart(pieces: Mapping[MetadataIndex, Piece]) -> None:
    """Refuse pieces that share bytes: a thousand tensors would be read of the bytes of one."""
    ordered = sorted(pieces.values(), key=lambda piece: (piece.file, piece.offset_bytes))
    for one, following in pairwise(ordered):
        if one.file == following.file and one.offset_bytes + one.size_bytes > following.offset_bytes:
            raise ValueError(f"two tensors are at byte {following.offset_bytes} of {following.file}")


def _piece(info: Mapping[str, Any], dtype: torch.dtype, shape: torch.Size) -> Piece:
    file = info.get("relative_path")
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"it leads to {shown(file)}, which is not a file of a checkpoint")
    if info.get("transform_descriptors") is not None:
        raise ValueError("its tensors are compressed or encrypted, which hpcpace does not do")
    offset, size = info.get("offset"), info.get("length")
    return Piece(file=file, offset_bytes=_number(offset), size_bytes=_number(size), dtype=dtype, shape=shape)


def _tensor(value: Any, most_chunks: int) -> TensorStorageMetadata:
    fields = _fields(value, "TensorStorageMetadata")
    size, chunks = _size(fields.get("size")), fields.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > most_chunks:
        raise ValueError("a tensor has no list of chunks, or one that is too long")
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(fields.get("properties"))),
        size=size,
        chunks=[_chunk(chunk, size) for chunk in chunks],
    )
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(size):
        raise ValueError(f"the chunks of a tensor do not make up its shape {shown(tuple(size))}")
    return tensor


def _chunk(value: Any, size: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    is_inside = len(offsets) == len(sizes) == len(size) and all(
        offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
    )
    if not is_inside:
        raise ValueError(f"a chunk is outside of its tensor of shape {shown(tuple(size))}")
    return ChunkStorageMetadata(offsets=offsets, sizes=sizes)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    return MetadataIndex(_name(fields.get("fqn")), _size(fields.get("offset")))


def _dtype(value: Any) -> torch.dtype:
    # TensorProperties.__getstate__: the dtype, then what is deprecated.
    state = value.state if isinstance(value, Record) and value.kind == "TensorProperties" else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
        raise ValueError("a tensor has no dtype")
    return state[0]


def _size(value: Any) -> torch.Size:
    if not isinstance(value, Record) or value.kind != "Size" or len(value.arguments) != 1:
        raise ValueError("a tensor has no size")
    sizes = value.arguments[0]
    if not isinstance(sizes, tuple | list) or len(sizes) > _MOST_DIMS:
        raise ValueError("a tensor has no size, or too many dimensions")
    return torch.Size([_number(size) for size in sizes])


def _fields(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Record) or value.kind != kind or not isinstance(value.state, dict):
        found = value.kind if isinstance(value, Record) else type(value).__name__
        raise ValueError(f"expected a {kind.removeprefix('_')}, found a {found}")
    return value.state


def _table(fields: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    table = fields.get(name)
    if not isinstance(table, dict):
        raise ValueError(f"it has no {name}")
    return table


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a tensor has no name")
    return value


def _number(value: Any) -> int:
    # A bool is an int to Python; larger numbers overflow in torch.
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("an offset or a size is not a whole number, negative or too large")
    return value
