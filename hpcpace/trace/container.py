"""The HDF5 file of one rank, as its writer sees it: born complete, then grown by whole chunks in SWMR mode."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import DEFLATE_LEVEL, RESOLUTION_NS, compress_chunk
from hpcpace.trace.header import header_values
from hpcpace.trace.schema import TABLES, TraceHeader

# What HDF5 1.10 and later read; SWMR needs at least this.
_LIBRARY_VERSIONS = ("v110", "v110")
# Object headers that HDF5 may write beside the chunks of one flush, and what the index takes of each chunk.
_METADATA_BYTES = 65_536
_INDEX_BYTES = 128
# A live writer needs microseconds to end a write; the pauses between so many attempts are some in all.
_READ_ATTEMPTS = 16
# Where superblock version 3 says that the file is open for writing (HDF5 file format 3.0, section II.A).
_SUPERBLOCK_VERSION_OFFSET, _SUPERBLOCK_VERSION = 8, 3
_CONSISTENCY_FLAGS_OFFSET = 11

_HEAPS_BYTES = 1 << 17
_HEAP_SIGNATURE = b"GCOL\x01\x00\x00\x00"
_HEAP_HEADER = struct.Struct("<HHIQ")


def container_image(header: TraceHeader, dtypes: Mapping[str, np.dtype]) -> bytes:
    """Return the bytes of a trace file that has every object and attribute and no rows.

    Made in memory, so that a full disk is met by a plain write and never by HDF5.
    """
    values = header_values(header)
    samples_unit, interfaces = values.pop("samples_unit"), values.pop("interfaces")
    # HDF5 takes two files in memory of one name for the same file, and each recorder has a thread of its own.
    file_name = f"image-{threading.get_ident()}"
    with h5py.File(file_name, "w", driver="core", backing_store=False, libver=_LIBRARY_VERSIONS) as file:
        file.attrs.update(values)
        for name, dtype in dtypes.items():
            group = file.create_group(name)
            for column in dtype.names or ():
                dataset = group.create_dataset(
                    column,
                    shape=(0,),
                    maxshape=(None,),
                    chunks=(TABLES[name].chunk_rows,),
                    dtype=_stored_dtype(name, column, dtype[column]),
                    shuffle=True,
                    compression="gzip",
                    compression_opts=DEFLATE_LEVEL,
                )
                if column in RESOLUTION_NS.get(name, {}):
                    dataset.attrs["resolution_ns"] = RESOLUTION_NS[name][column]
        file["steps"].attrs["samples_unit"] = samples_unit
        file["network"].attrs.create("interfaces", interfaces, shape=(len(interfaces),), dtype=h5py.string_dtype())
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def open_for_reading(path: Path) -> h5py.File:
    """Open a trace file that is closed, still written, or left by a killed rank.

    Raises:
        OSError: no file, not one of HDF5, or one on which HDF5 would hang.
    """
    _check_heaps(path)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    # A reader of a live file tries again where a checksum is wrong, 100 times with pauses that double each time: on a
    # damaged file that is for ever. h5py does not wrap the setting; its library has it (HDF5 1.10, H5Pset...).
    set_attempts = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts
    set_attempts(ctypes.c_int64(access.id), ctypes.c_uint(_READ_ATTEMPTS))
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ, access))


def _check_heaps(path: Path) -> None:
    """Refuse a file whose texts HDF5 would look for without end: those of variable length stand in a global heap.

    Where the length of an object of the heap is damaged so that the next one begins where this one does, HDF5 1.14 goes
    round in circles. Heaps of a trace are written when it is made (HDF5 file format 3.0, section III.E).
    """
    with open(path, "rb") as file:
        content = file.read(_HEAPS_BYTES)
    begin = content.find(_HEAP_SIGNATURE)
    while begin >= 0:
        end = min(begin + int.from_bytes(content[begin + 8 : begin + 16], "little"), len(content))
        place = begin + _HEAP_HEADER.size
        while place + _HEAP_HEADER.size <= end:
            number, _, _, size = _HEAP_HEADER.unpack_from(content, place)
            # The object of number 0 is the space that is left, with its header.
            length = size if number == 0 else (_HEAP_HEADER.size + -(-size // 8) * 8) % (1 << 64)
            if length < _HEAP_HEADER.size:
                raise OSError(f"object {number} of the global heap at byte {begin} cannot have {size} bytes")
            place += length
        begin = content.find(_HEAP_SIGNATURE, begin + 1)


def is_marked_open(path: Path) -> bool:
    """Return whether the writer of an HDF5 file has it open still, or was killed.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(_CONSISTENCY_FLAGS_OFFSET + 1)
    return len(start) > _CONSISTENCY_FLAGS_OFFSET and (
        start[_SUPERBLOCK_VERSION_OFFSET] == _SUPERBLOCK_VERSION and start[_CONSISTENCY_FLAGS_OFFSET] != 0
    )


class Container:
    """An open trace file that takes whole chunks.

    HDF5 cannot be trusted after it met a full disk, so space is reserved through a descriptor of our own first; a file
    longer than its HDF5 content is valid, and what was not needed is given back.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Locks fail on file systems without them, and nobody else writes this file.
            self._file = h5py.File(path, "r+", libver=_LIBRARY_VERSIONS, locking=False)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._file.swmr_mode = True
        self._hdf5_descriptor: int | None = self._file.id.get_vfd_handle()
        os.register_at_fork(after_in_child=partial(_forget_in_child, weakref.ref(self)))

    @property
    def is_removed(self) -> bool:
        """Whether the file has lost its last name."""
        return os.fstat(self._descriptor).st_nlink == 0

    def append(self, first_rows: Mapping[str, int], tables: Mapping[str, NDArray[np.void]]) -> None:
        """Write rows behind those that are there, and flush.

        Args:
            first_rows: the number of rows in the file, by table; whole chunks.
            tables: the rows to write, by table. Rows that do not fill a chunk are for the last call.

        Raises:
            OSError: the disk is full or broken; calling again with the same rows is safe.
        """
        # On a disk that stays full, the work of compressing is not done again at every flush.
        self._reserve(0)
        chunks = {
            (name, column, start): compress_chunk(rows[column][start : start + chunk_rows], chunk_rows)
            for name, rows in tables.items()
            for chunk_rows in (TABLES[name].chunk_rows,)
            for column in rows.dtype.names or ()
            for start in range(0, len(rows), chunk_rows)
        }
        self._reserve(sum(_INDEX_BYTES + len(chunk) for chunk in chunks.values()))
        for name, rows in tables.items():
            for column in rows.dtype.names or ():
                self._file[name][column].resize((first_rows[name] + len(rows),))
        for (name, column, start), chunk in chunks.items():
            self._file[name][column].id.write_direct_chunk((first_rows[name] + start,), chunk)
        self._file.flush()
        self._release()

    def copy_to(self, path: Path) -> None:
        """Close the file and copy what it held to another path, also where its own name is gone."""
        self._close_file()
        with open(self._descriptor, "rb", closefd=False) as source, open(path, "wb") as target:
            source.seek(0)
            while block := source.read(1 << 20):
                target.write(block)

    def close(self) -> None:
        """Close the file and leave it as any HDF5 program can open it."""
        try:
            self._close_file()
        finally:
            os.close(self._descriptor)

    def forget(self) -> None:
        """Point HDF5 in a forked child at an empty file.

        When the child ends, HDF5 closes what it finds open, and would write its old idea of the file over the parent's.
        """
        if self._hdf5_descriptor is not None:
            empty = os.memfd_create("hpcpace-forked")
            os.dup2(empty, self._hdf5_descriptor)
            os.close(empty)

    def _close_file(self) -> None:
        self._hdf5_descriptor = None
        self._file.close()

    def _reserve(self, size_bytes: int) -> None:
        begin = os.fstat(self._descriptor).st_size
        end = self._file.id.get_filesize() + size_bytes + _METADATA_BYTES
        if end > begin:
            os.posix_fallocate(self._descriptor, begin, end - begin)

    def _release(self) -> None:
        os.ftruncate(self._descriptor, self._file.id.get_filesize())


def _forget_in_child(reference: weakref.ref[Container]) -> None:
    container = reference()
    if container is not None:
        container.forget()


def _stored_dtype(table: str, column: str, dtype: np.dtype) -> np.dtype:
    names = TABLES[table].enums.get(column)
    if names is None:
        return dtype
    enum: np.dtype = h5py.enum_dtype({member.name.lower(): member.value for member in names}, basetype=dtype)
    return enum
