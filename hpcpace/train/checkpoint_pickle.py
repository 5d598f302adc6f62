"""Pickles of a checkpoint: the few names of torch that one needs, all of which become records without effect."""

from __future__ import annotations

from typing import Any

import torch

from hpcpace.inert_pickle import PERSISTENT, Record, read_pickle, record_kind

_DCP = "torch.distributed.checkpoint"
_DTYPES = "bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 bool"
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# By module and name. Dtypes are singletons that cannot be called; a storage's class says its dtype and nothing else.
_NAMES: dict[tuple[str, str], type[Record] | torch.dtype] = {
    **{
        (f"{_DCP}.metadata", name): record_kind(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): record_kind("_StorageInfo"),
    ("torch", "Size"): record_kind("Size"),
    ("torch.serialization", "_get_layout"): record_kind("_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"): record_kind("_rebuild_tensor_v2"),
    ("collections", "OrderedDict"): record_kind("OrderedDict"),
    # Members of enumerations, in Python 3.11.0 to 3.11.3: by a look-up that is not made here.
    ("builtins", "getattr"): record_kind("getattr"),
    # The writer's own path, which nobody reads; Python 3.13 calls its module so.
    ("pathlib", "PosixPath"): record_kind("PosixPath"),
    ("pathlib._local", "PosixPath"): record_kind("PosixPath"),
    **{("torch", name): getattr(torch, name) for name in _DTYPES.split()},
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    PERSISTENT: record_kind("storage"),
}


def read_checkpoint_pickle(data: bytes) -> Any:
    """Return what a pickle holds, of plain values, dtypes and records.

    Raises:
        ValueError: it is not a pickle, or asks for what no checkpoint needs.
    """
    return read_pickle(data, names=_NAMES, source="checkpoint")
