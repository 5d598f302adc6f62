"""Write a pack: tables of several ranks, appended piece by piece and compressed by whole chunks."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.files import write_all
from hpcpace.core.pool import map_threads
from hpcpace.trace.container import reserve, stored_dtype
from hpcpace.trace.encoding import DEFLATE_LEVEL, RESOLUTION_NS, compress_again
from hpcpace.trace.opening import HDF5_LOCK
from hpcpace.trace.pack_schema import OPEN, PACK_CHUNK_ROWS, PACK_FORMAT, PACK_VERSION, pack_dtypes, table_schema
from hpcpace.trace.tables import Table, join_tables

_LIBRARY_VERSIONS = ("v110", "v110")
# What HDF5 may write besides chunks: object headers, and the index entry of each chunk.
_METADATA_BYTES, _INDEX_BYTES = 1 << 16, 128
# Where superblock version 3 says where the content of the file ends (HDF5 file format 3.0, section II.A).
_END_OFFSET = 28


class PackWriter:
    """The HDF5 file of a pack while it is written; nobody reads it before it has its name.

    Args:
        descriptor: of a new file that reads and writes; the caller keeps it.
        device_tables: the tables that have the columns of ranks with a device.

    Raises:
        OSError: the disk is full or broken.
    """

    def __init__(self, descriptor: int, *, device_tables: Collection[str]) -> None:
        self._descriptor = descriptor
        self._dtypes = pack_dtypes(device_tables)
        write_all(descriptor, _image(self._dtypes), 0)
        with HDF5_LOCK:
            self._file = h5py.File(f"/proc/self/fd/{descriptor}", "r+", libver=_LIBRARY_VERSIONS, locking=False)
        self._waiting: dict[str, list[Table]] = {name: [] for name in self._dtypes}
        self._num_written = dict.fromkeys(self._dtypes, 0)

    def append(self, name: str, rows: Table | Mapping[str, NDArray[np.generic]]) -> None:
        """Append rows to a table.

        Raises:
            OSError: the disk is full or broken; the file is to be thrown away.
        """
        table = Table({column: rows[column] for column in self._dtypes[name].names or ()})
        waiting = self._waiting[name]
        if len(table):
            waiting.append(table)
        num_rows = sum(map(len, waiting))
        num_whole = num_rows - num_rows % PACK_CHUNK_ROWS
        if num_whole:
            joined = join_tables(waiting)
            self._write(name, joined.select(slice(num_whole)))
            self._waiting[name] = [joined.select(np.arange(num_whole, num_rows))]

    def close(self) -> None:
        """Write what waits, and close the file.

        Raises:
            OSError: the disk is full or broken; the file is to be thrown away.
        """
        for name, waiting in self._waiting.items():
            if waiting:
                self._write(name, join_tables(waiting))
        with HDF5_LOCK:
            reserve(self._descriptor, self._file.id.get_filesize() + _METADATA_BYTES)
            self._file.close()
        # Give back what was reserved and not needed.
        os.ftruncate(self._descriptor, int.from_bytes(os.pread(self._descriptor, 8, _END_OFFSET), "little"))

    def abandon(self) -> None:
        """Close the file after an error; it is to be thrown away."""
        with HDF5_LOCK:
            self._file.close()

    def _write(self, name: str, rows: Table) -> None:
        if not len(rows):
            return
        begins = range(0, len(rows), PACK_CHUNK_ROWS)
        tasks = [(column, begin) for column in rows for begin in begins]
        chunks = list(
            map_threads(
                lambda task: compress_again(rows[task[0]][task[1] : task[1] + PACK_CHUNK_ROWS], PACK_CHUNK_ROWS), tasks
            )
        )
        first = self._num_written[name]
        with HDF5_LOCK:
            size_bytes = sum(_INDEX_BYTES + len(chunk) for chunk in chunks)
            reserve(self._descriptor, self._file.id.get_filesize() + size_bytes + _METADATA_BYTES)
            for column in rows:
                self._file[name][column].resize((first + len(rows),))
            for (column, begin), chunk in zip(tasks, chunks, strict=True):
                self._file[name][column].id.write_direct_chunk((first + begin,), chunk)
        self._num_written[name] = first + len(rows)


def _image(dtypes: Mapping[str, np.dtype]) -> bytes:
    """Return the bytes of a pack without rows, made in memory so that a plain write meets a full disk."""
    name = f"pack-image-{threading.get_ident()}"
    with HDF5_LOCK, h5py.File(name, "w", driver="core", backing_store=False, libver=_LIBRARY_VERSIONS) as file:
        file.attrs.update(format=PACK_FORMAT, format_version=PACK_VERSION)
        for table, dtype in dtypes.items():
            group = file.create_group(table)
            for column in dtype.names or ():
                dataset = group.create_dataset(
                    column,
                    shape=(0,),
                    maxshape=(None,),
                    chunks=(PACK_CHUNK_ROWS,),
                    dtype=stored_dtype(table_schema(table), column, dtype[column]),
                    shuffle=True,
                    compression="gzip",
                    compression_opts=DEFLATE_LEVEL,
                )
                resolutions = RESOLUTION_NS.get("collectives" if table == OPEN else table, {})
                if column in resolutions:
                    dataset.attrs["resolution_ns"] = resolutions[column]
        file.flush()
        image: bytes = file.id.get_file_image()
    return image
