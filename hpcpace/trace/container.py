"""The HDF5 file of one rank, as its writer sees it: born complete, then grown by whole chunks in SWMR mode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import DEFLATE_LEVEL, RESOLUTION_NS, compress_chunk
from hpcpace.trace.header import header_values
from hpcpace.trace.schema import CHUNK_ROWS, TABLES, TraceHeader

# What HDF5 1.10 and later read; SWMR needs at least this.
_LIBRARY_VERSIONS = ("v110", "v110")
# Chunk indices and object headers that HDF5 may write beside the chunks of one flush.
_METADATA_BYTES = 65_536


def container_image(header: TraceHeader, dtypes: Mapping[str, np.dtype]) -> bytes:
    """Return the bytes of a trace file that has every object and attribute and no rows.

    Made in memory, so that a full disk is met by a plain write and never by HDF5.
    """
    values = header_values(header)
    samples_unit, interfaces = values.pop("samples_unit"), values.pop("interfaces")
    with h5py.File("image", "w", driver="core", backing_store=False, libver=_LIBRARY_VERSIONS) as file:
        file.attrs.update(values)
        for name, dtype in dtypes.items():
            group = file.create_group(name)
            for column in dtype.names or ():
                group.create_dataset(
                    column,
                    shape=(0,),
                    maxshape=(None,),
                    chunks=(CHUNK_ROWS,),
                    dtype=_stored_dtype(name, column, dtype[column]),
                    shuffle=True,
                    compression="gzip",
                    compression_opts=DEFLATE_LEVEL,
                )
            if name in RESOLUTION_NS:
                group.attrs["resolution_ns"] = RESOLUTION_NS[name]
        file["steps"].attrs["samples_unit"] = samples_unit
        file["network"].attrs.create("interfaces", interfaces, shape=(len(interfaces),), dtype=h5py.string_dtype())
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


class Container:
    """An open trace file that takes whole chunks.

    HDF5 cannot be trusted after it met a full disk, so space is reserved through a descriptor of our own first; a file
    longer than its HDF5 content is valid, and a clean close cuts it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Locks fail on file systems without them, and nobody else writes this file.
            self._file = h5py.File(path, "r+", libver=_LIBRARY_VERSIONS, locking=False)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._reserved_bytes = 0
        self._file.swmr_mode = True

    @property
    def is_removed(self) -> bool:
        """Whether the file has lost its last name."""
        return os.fstat(self._descriptor).st_nlink == 0

    def append(self, first_rows: Mapping[str, int], tables: Mapping[str, NDArray[np.void]]) -> None:
        """Write rows behind those that are there, and flush.

        Args:
            first_rows: the number of rows in the file, by table; a multiple of CHUNK_ROWS.
            tables: the rows to write, by table. A length that is no multiple of CHUNK_ROWS is for the last call.

        Raises:
            OSError: the disk is full or broken; calling again with the same rows is safe.
        """
        chunks = {
            (name, column, start): compress_chunk(column, rows[column][start : start + CHUNK_ROWS])
            for name, rows in tables.items()
            for column in rows.dtype.names or ()
            for start in range(0, len(rows), CHUNK_ROWS)
        }
        self._reserve(sum(map(len, chunks.values())))
        for name, rows in tables.items():
            for column in rows.dtype.names or ():
                self._file[name][column].resize((first_rows[name] + len(rows),))
        for (name, column, start), chunk in chunks.items():
            self._file[name][column].id.write_direct_chunk((first_rows[name] + start,), chunk)
        self._file.flush()

    def copy_to(self, path: Path) -> None:
        """Close the file and copy what it held to another path, also where its own name is gone."""
        self._file.close()
        with open(self._descriptor, "rb", closefd=False) as source, open(path, "wb") as target:
            source.seek(0)
            while block := source.read(1 << 20):
                target.write(block)

    def close(self) -> None:
        """Close the file and leave it as any HDF5 program can open it."""
        try:
            self._file.close()
        finally:
            os.close(self._descriptor)

    def _reserve(self, size_bytes: int) -> None:
        end = self._file.id.get_filesize() + size_bytes + _METADATA_BYTES
        if end > self._reserved_bytes:
            os.posix_fallocate(self._descriptor, 0, end)
            self._reserved_bytes = end


def _stored_dtype(table: str, column: str, dtype: np.dtype) -> np.dtype:
    names = TABLES[table].enums.get(column)
    if names is None:
        return dtype
    enum: np.dtype = h5py.enum_dtype({member.name.lower(): member.value for member in names}, basetype=dtype)
    return enum
