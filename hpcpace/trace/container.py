"""The HDF5 file of one rank for its writer, extended by whole chunks in SWMR mode."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.files import copy_file
from hpcpace.trace.encoding import DEFLATE_LEVEL, RESOLUTION_NS, compress_chunk
from hpcpace.trace.schema import FIRST_ROW, FIRST_STEP, TABLES, StepFlag, TableSchema, TraceHeader, header_values

# Readable by HDF5 1.10 and later; SWMR needs at least this version.
LIBRARY_VERSIONS = ("v110", "v110")
METADATA_BYTES, INDEX_BYTES = 1 << 16, 128
"""What HDF5 may write besides chunks: object headers along with those of one flush, and the index entry of each."""


def container_image(
    header: TraceHeader,
    dtypes: Mapping[str, np.dtype],
    *,
    first_rows: Mapping[str, int] | None = None,
    first_step: int = 0,
) -> bytes:
    """Return the bytes of a trace file with every object and attribute and no rows.

    It is made in memory, so that a plain write meets a full disk, and never HDF5.

    Args:
        header: root attributes.
        dtypes: of the rows of each table.
        first_rows: of tables whose first rows were dropped, how many.
        first_step: the first step of which nothing was dropped.
    """
    values = header_values(header)
    samples_unit, interfaces = values.pop("samples_unit"), values.pop("interfaces")

    def finish(file: h5py.File) -> None:
        for name, num_dropped in (first_rows or {}).items():
            file[name].attrs[FIRST_ROW] = num_dropped
        if first_step:
            file["steps"].attrs[FIRST_STEP] = first_step
        file["steps"].attrs["samples_unit"] = samples_unit
        file["network"].attrs.create("interfaces", interfaces, shape=(len(interfaces),), dtype=h5py.string_dtype())

    return file_image(values, {name: (TABLES[name], dtype) for name, dtype in dtypes.items()}, finish)


def file_image(
    attributes: Mapping[str, Any],
    tables: Mapping[str, tuple[TableSchema, np.dtype]],
    finish: Callable[[h5py.File], None] = lambda _: None,
) -> bytes:
    """Return the bytes of an HDF5 file with groups and columns and no rows.

    Args:
        attributes: root attributes.
        tables: schema of each group, and the dtype of its rows.
        finish: adds other attributes.
    """
    image = _empty_image(tuple((table, schema, dtype) for table, (schema, dtype) in tables.items()))
    with _in_memory(image) as file:
        file.attrs.update(attributes)
        finish(file)
        file.flush()
        return bytes(file.id.get_file_image())


@lru_cache(maxsize=4)
def _empty_image(tables: tuple[tuple[str, TableSchema, np.dtype], ...]) -> bytes:
    """Return the bytes of an HDF5 file with groups and columns, without rows and root attributes.

    Making it takes half of the time to write a short trace, and all traces of a program begin with the same.
    """
    with _in_memory() as file:
        for table, schema, dtype in tables:
            group = file.create_group(table)
            for column in dtype.names or ():
                dataset = group.create_dataset(
                    column,
                    shape=(0,),
                    maxshape=(None,),
                    chunks=(schema.chunk_rows,),
                    dtype=_stored_dtype(schema, column, dtype[column]),
                    shuffle=True,
                    compression="gzip",
                    compression_opts=DEFLATE_LEVEL,
                )
                if column in RESOLUTION_NS.get(schema.name, {}):
                    dataset.attrs["resolution_ns"] = RESOLUTION_NS[schema.name][column]
        file.flush()
        return bytes(file.id.get_file_image())


def _in_memory(image: bytes | None = None) -> h5py.File:
    """Open an HDF5 file in memory: a new one, or one that begins as an image."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(backing_store=False)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(*(getattr(h5py.h5f, f"LIBVER_{one.upper()}") for one in LIBRARY_VERSIONS))
    # HDF5 treats two in-memory files of the same name as one file, and each recorder has its own thread.
    name = f"image-{threading.get_ident()}".encode()
    if image is None:
        return h5py.File(h5py.h5f.create(name, h5py.h5f.ACC_TRUNC, fapl=access))
    access.set_file_image(image)
    return h5py.File(h5py.h5f.open(name, h5py.h5f.ACC_RDWR, fapl=access))


def _stored_dtype(table: TableSchema, column: str, dtype: np.dtype) -> np.dtype:
    """Return the type of a column in a file: enumerations carry their names."""
    names = table.enums.get(column)
    if names is None:
        return dtype
    enum: np.dtype = h5py.enum_dtype({member.name.lower(): member.value for member in names}, basetype=dtype)
    return enum


class Container:
    """An open trace file that takes whole chunks.

    HDF5 cannot be trusted after it has met a full disk, so space is first reserved through our own descriptor. A file
    longer than its HDF5 content is valid, and unneeded space is released.
    """

    def __init__(self, descriptor: int) -> None:
        """Open the file behind a descriptor that reads and writes; the caller keeps the descriptor."""
        self._descriptor = os.dup(descriptor)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        # The name leads to the open file itself, whatever is at its path by now (proc(5)). Locks fail on file
        # systems without them, and nobody else writes this file.
        self._file = h5py.File(f"/proc/self/fd/{descriptor}", "r+", libver=LIBRARY_VERSIONS, locking=False)
        self._file.swmr_mode = True
        self._hdf5_descriptor: int | None = self._file.id.get_vfd_handle()
        os.register_at_fork(after_in_child=partial(_forget_in_child, weakref.ref(self)))

    @property
    def is_removed(self) -> bool:
        """Whether the file was removed: it has no name left."""
        return os.fstat(self._descriptor).st_nlink == 0

    def append(self, name: str, first_row: int, rows: NDArray[np.void]) -> None:
        """Append a chunk to a table; `flush` makes it durable.

        Args:
            name: name of the table.
            first_row: the number of its rows in the file, whole chunks.
            rows: a chunk; only the table's last call may have fewer rows.

        Raises:
            OSError: the disk is full or broken; it is safe to call again with the same rows.
        """
        chunk_rows = TABLES[name].chunk_rows
        # On a disk that stays full, do not compress again at every flush.
        self._reserve(0)
        chunks = {column: compress_chunk(rows[column], chunk_rows) for column in rows.dtype.names or ()}
        self._reserve(sum(INDEX_BYTES + len(chunk) for chunk in chunks.values()))
        table = self._file[name].id
        columns = [(h5py.h5d.open(table, column.encode()), chunk) for column, chunk in chunks.items()]
        for dataset, _ in columns:
            dataset.set_extent((first_row + len(rows),))
        for dataset, chunk in columns:
            dataset.write_direct_chunk((first_row,), chunk)

    def copy_chunks(self, source: Container, name: str, num_dropped: int) -> None:
        """Append the chunks of a table of another file but the first ones, as they are.

        Raises:
            OSError: the disk is full or broken.
        """
        chunk_rows = TABLES[name].chunk_rows
        for column, values in source._file[name].items():
            num_rows = values.shape[0] - num_dropped * chunk_rows
            if num_rows <= 0:
                continue
            self._reserve(values.id.get_storage_size() + num_rows // chunk_rows * INDEX_BYTES)
            copied = self._file[name][column]
            copied.resize((num_rows,))
            for first_row in range(0, num_rows, chunk_rows):
                mask, chunk = values.id.read_direct_chunk((first_row + num_dropped * chunk_rows,))
                copied.id.write_direct_chunk((first_row,), chunk, mask)

    def mark_steps(self, first_step: int) -> None:
        """Mark the steps before some step as no longer known in detail; they are in the first chunk."""
        steps = self._file["steps"]
        flags, step = steps["flags"], steps["step"][: TABLES["steps"].chunk_rows]
        if len(step) and step[0] < first_step:
            marked = mark_steps(flags[: len(step)], step, first_step)
            chunk = compress_chunk(marked, TABLES["steps"].chunk_rows)
            self._reserve(len(chunk))
            flags.id.write_direct_chunk((0,), chunk)

    def flush(self, *, is_last: bool = False) -> None:
        """Write all chunks to the file.

        Args:
            is_last: whether to wait until the disk has them: some file systems report only then that they are full.

        Raises:
            OSError: the disk is full or broken.
        """
        self._file.flush()
        if is_last:
            os.fsync(self._descriptor)

    def release(self) -> None:
        """Release space that was reserved but not needed, including by a reservation that failed halfway."""
        os.ftruncate(self._descriptor, self._file.id.get_filesize())

    def copy_to(self, descriptor: int) -> None:
        """Close the file and copy its content to another one, even if its own name is gone.

        Raises:
            OSError: the other file cannot be written.
        """
        self._close_file()
        copy_file(self._descriptor, descriptor)

    def close(self) -> None:
        """Close the file so that any HDF5 program can open it."""
        try:
            self._close_file()
        finally:
            self._finalizer()

    def forget(self) -> None:
        """Point HDF5 in a forked child at an empty file.

        When the child exits, HDF5 closes all open files, and would overwrite the parent's file with an old state.
        """
        if self._hdf5_descriptor is not None:
            empty = os.memfd_create("hpcpace-forked")
            os.dup2(empty, self._hdf5_descriptor)
            os.close(empty)

    def _close_file(self) -> None:
        self._hdf5_descriptor = None
        self._file.close()

    def _reserve(self, size_bytes: int) -> None:
        reserve(self._descriptor, self._file.id.get_filesize() + size_bytes + METADATA_BYTES)


def reserve(descriptor: int, end: int) -> None:
    """Make a file that HDF5 writes at least so long, so that a full disk shows before HDF5 meets it.

    Raises:
        OSError: the disk is full or broken.
    """
    begin = os.fstat(descriptor).st_size
    if end > begin:
        os.posix_fallocate(descriptor, begin, end - begin)


def _forget_in_child(reference: weakref.ref[Container]) -> None:
    container = reference()
    if container is not None:
        container.forget()


def mark_steps(flags: NDArray[np.uint8], step: NDArray[np.int32], first_step: int) -> NDArray[np.uint8]:
    """Return the marks of steps, of which those before `first_step` are no longer known in detail."""
    plain = np.uint8(StepFlag.PLAIN | StepFlag.WARMUP)
    marked: NDArray[np.uint8] = np.where(step < first_step, flags | plain, flags)
    return marked
