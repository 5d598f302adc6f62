"""HDF5 files: opened from untrusted sources, and that of one rank for its writer, extended by whole chunks.

An HDF5 file can refer to other files (external links, external raw storage, virtual layouts), load plugins as filters,
and claim more memory than there is. A trace needs none of that. So everything but a hard link to a plain group, column
or attribute of bounded size is refused before HDF5 looks into it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.compat import hdf5_library
from hpcpace.core.files import close_own, copy_file, opening_aside, set_aside
from hpcpace.trace.schema import (
    DEFLATE_LEVEL,
    FIRST_ROW,
    FIRST_STEP,
    RESOLUTION_NS,
    TABLES,
    StepFlag,
    TableSchema,
    TraceHeader,
    compress_chunk,
    header_values,
)

# A live writer finishes a write within microseconds; this many attempts take longer than that.
_READ_ATTEMPTS = 16
# Where superblock version 3 says that the file is open for writing (HDF5 file format 3.0, section II.A).
_SUPERBLOCK_VERSION_OFFSET, _SUPERBLOCK_VERSION = 8, 3
_CONSISTENCY_FLAGS_OFFSET = 11

_HEAP_SIGNATURE = b"GCOL\x01\x00\x00\x00"
_HEAP_HEADER = struct.Struct("<HHIQ")
_BLOCK_BYTES = 1 << 22

MAX_ATTRIBUTE_BYTES = 1 << 16
"""The most bytes of one attribute; the texts of a header have some dozens."""
_MAX_HEAP_BYTES = 1 << 20
"""The most bytes of all global heaps of a file together."""
_MIN_HEAP_BYTES = 1 << 10
_MAX_OBJECT_BYTES = 1 << 20
_MAX_VALUES = 256

FILTERS = (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32)
"""The filters that a column may have, in the order in which they are applied."""
MIN_HDF5 = (2, 0, 0)
"""The first HDF5 with fixes for the published faults of 1.14 that a file can exploit (HDFGroup/cve_hdf5)."""
FOREIGN_ERRORS = (
    OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError, OverflowError,
)  # fmt: skip
"""What h5py and HDF5 raise for damaged or foreign files."""
HDF5_LOCK = threading.Lock()
"""To be held while a file is open: HDF5 is not thread-safe, and h5py's own lock does not cover what is set directly."""
_KINDS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING)


def open_trace(descriptor: int) -> h5py.File:
    """Open the trace file behind a descriptor: closed, still being written, or left by a killed rank.

    Args:
        descriptor: of a regular file, open for reading; the caller keeps it.

    Raises:
        OSError: not an HDF5 file, or one on which HDF5 would hang or fill the memory.
    """
    _check_heaps(descriptor)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    # A reader of a live file retries 100 times if a checksum is wrong, with pauses that double each time: for ever on a
    # damaged file.
    hdf5_library().H5Pset_metadata_read_attempts(ctypes.c_int64(access.id), ctypes.c_uint(_READ_ATTEMPTS))
    # The name leads to the open file itself, whatever is at its path by now (proc(5)).
    name = f"/proc/self/fd/{descriptor}".encode()
    return h5py.File(h5py.h5f.open(name, h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ, access))


def is_marked_open(descriptor: int) -> bool:
    """Return whether the writer of an HDF5 file still has it open, or was killed.

    Raises:
        OSError: the file cannot be read.
    """
    start = os.pread(descriptor, _CONSISTENCY_FLAGS_OFFSET + 1, 0)
    return len(start) > _CONSISTENCY_FLAGS_OFFSET and (
        start[_SUPERBLOCK_VERSION_OFFSET] == _SUPERBLOCK_VERSION and start[_CONSISTENCY_FLAGS_OFFSET] != 0
    )


def open_group(parent: h5py.h5g.GroupID, name: str) -> h5py.h5g.GroupID | None:
    """Return a group below another one, None if nothing has the name.

    Raises:
        ValueError: it is a link to another place, not a group, or larger than any in a trace.
    """
    if not _is_hard_link(parent, name):
        return None
    found = h5py.h5o.open(parent, name.encode())
    if not isinstance(found, h5py.h5g.GroupID):
        raise ValueError("it is no group")
    check_object(found)
    return found


def open_column(group: h5py.h5g.GroupID, name: str) -> tuple[h5py.h5d.DatasetID, h5py.h5p.PropDCID] | None:
    """Return a dataset of a group and its creation properties, None if nothing has the name.

    Raises:
        ValueError: it is a link to another place, not a dataset, or stores its values in a way that no trace does.
    """
    if not _is_hard_link(group, name):
        return None
    found = h5py.h5o.open(group, name.encode())
    if not isinstance(found, h5py.h5d.DatasetID):
        raise ValueError("it is no dataset")
    # Check this first: asking a virtual layout for its extent opens the files that it names.
    properties = found.get_create_plist()
    if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise ValueError("it has a layout other than chunked or contiguous")
    if properties.get_external_count():
        raise ValueError("it keeps its values in other files")
    return found, properties


def filters_of(properties: h5py.h5p.PropDCID) -> tuple[int, ...]:
    """Return the filters of a dataset in the order in which they were applied.

    Raises:
        ValueError: one is neither shuffle, deflate nor fletcher32, or they come in another order.
    """
    filters = tuple(properties.get_filter(index)[0] for index in range(min(properties.get_nfilters(), 8)))
    if filters != tuple(known for known in FILTERS if known in filters):
        raise ValueError(f"it has filters {list(filters)}; a trace has shuffle, deflate and fletcher32 only")
    return filters


def attribute_values(place: h5py.h5g.GroupID | h5py.h5d.DatasetID, names: Collection[str]) -> dict[str, Any]:
    """Return those attributes of an object that have one of some names, by name.

    Raises:
        ValueError: one is not a number, text or list of texts, or larger than any in a trace.
    """
    values = {}
    for name in names:
        if not h5py.h5a.exists(place, name.encode()):
            continue
        attribute = h5py.h5a.open(place, name.encode())
        kind, space = attribute.get_type(), attribute.get_space()
        num_values = space.get_simple_extent_npoints()
        size_bytes = kind.get_size() * num_values
        if size_bytes > MAX_ATTRIBUTE_BYTES or num_values > _MAX_VALUES:
            raise ValueError(f"attribute {name} has {num_values} values in {size_bytes} bytes: too many")
        if kind.get_class() not in _KINDS:
            raise ValueError(f"attribute {name} is neither number nor text")
        if kind.get_class() == h5py.h5t.STRING or space.get_simple_extent_type() != h5py.h5s.SCALAR:
            holder = h5py.Dataset(place) if isinstance(place, h5py.h5d.DatasetID) else h5py.Group(place)
            values[name] = holder.attrs[name]
        else:  # as h5py does, without opening the attribute again: most are numbers
            value = np.zeros((), stored_dtype(kind.encode()))
            attribute.read(value)
            values[name] = value[()]
    return values


@lru_cache(maxsize=128)
def stored_dtype(encoded: bytes) -> np.dtype:
    """Return the dtype of an HDF5 type, cached because the conversion is slow and a trace has few types."""
    dtype: np.dtype = h5py.h5t.decode(encoded).dtype
    return dtype


def check_object(place: h5py.h5g.GroupID) -> None:
    """Refuse a group whose header, links or attributes are larger than in any trace.

    Raises:
        ValueError: they are; nothing of them has been read.
    """
    found = h5py.h5o.get_info(place)
    sizes = (found.hdr.space.total, found.meta_size.obj.heap_size, found.meta_size.attr.heap_size)
    if max(sizes) > _MAX_OBJECT_BYTES:
        raise ValueError(f"it has {max(sizes)} bytes of attributes or links; a trace has some thousand")
    properties = place.get_create_plist()
    if hdf5_library().H5Pget_nfilters(ctypes.c_int64(properties.id)):
        raise ValueError("it has filters")


def _is_hard_link(parent: h5py.h5g.GroupID, name: str) -> bool:
    if not parent.links.exists(name.encode()):
        return False
    if parent.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise ValueError("it is a link to another place, which is not followed")
    return True


def _check_heaps(descriptor: int) -> None:
    """Refuse a file on whose texts HDF5 would hang, or which fill the memory.

    Texts of variable length are objects of a global heap, which HDF5 reads whole. If the damaged length of an object
    makes the next one begin at the same place, HDF5 1.14 loops for ever (HDF5 file format 3.0, section III.E).
    """
    left_bytes = _MAX_HEAP_BYTES
    for begin, header in _heaps(descriptor):
        size_bytes = int.from_bytes(header[len(_HEAP_SIGNATURE) :], "little")
        # There can be as many nested heaps as the file has bytes.
        left_bytes -= max(size_bytes, _MIN_HEAP_BYTES)
        if left_bytes < 0:
            raise OSError(f"the global heap at byte {begin} claims {size_bytes} bytes; a trace has some thousand")
        _check_heap(os.pread(descriptor, size_bytes, begin), begin)


def _check_heap(content: bytes, begin: int) -> None:
    place = 16
    while place + _HEAP_HEADER.size <= len(content):
        number, _, _, size = _HEAP_HEADER.unpack_from(content, place)
        # Object 0 is the free space, including its header.
        length = size if number == 0 else (_HEAP_HEADER.size + -(-size // 8) * 8) % (1 << 64)
        if length < _HEAP_HEADER.size:
            raise OSError(f"object {number} of the global heap at byte {begin} cannot have {size} bytes")
        if number and size > MAX_ATTRIBUTE_BYTES:
            raise OSError(f"a text has {size} bytes; a trace has {MAX_ATTRIBUTE_BYTES} at most")
        place += length


def _heaps(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield where a global heap may begin, anywhere in the file, with its signature and size; skip holes."""
    place, end = 0, os.fstat(descriptor).st_size
    header_bytes = len(_HEAP_SIGNATURE) + 8
    while place < end:
        place, stop = _extent(descriptor, place, end)
        while place < stop:
            # Read a few bytes of the next block as well: a heap may begin at the end of this one.
            block_bytes = min(_BLOCK_BYTES, stop - place)
            content = os.pread(descriptor, block_bytes + header_bytes, place)
            found = content.find(_HEAP_SIGNATURE)
            while 0 <= found < block_bytes:
                yield place + found, content[found : found + header_bytes]
                found = content.find(_HEAP_SIGNATURE, found + 1)
            place += block_bytes
        place = stop


def _extent(descriptor: int, place: int, end: int) -> tuple[int, int]:
    """Return begin and end of the next data of a file that may be sparse; lseek(2)."""
    try:
        begin = os.lseek(descriptor, place, os.SEEK_DATA)
        return begin, min(os.lseek(descriptor, begin, os.SEEK_HOLE), end)
    except OSError:
        return end, end


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
        self._descriptor = set_aside(os.dup(descriptor))
        self._finalizer = weakref.finalize(self, close_own, self._descriptor)
        # The name leads to the open file itself, whatever is at its path by now (proc(5)). Locks fail on file
        # systems without them, and nobody else writes this file.
        with opening_aside():
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
