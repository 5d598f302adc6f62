"""Open HDF5 files from untrusted sources.

An HDF5 file can refer to other files (external links, external raw storage, virtual layouts), load plugins as filters,
and claim more memory than there is. A trace needs none of that. So everything but a hard link to a plain group, column
or attribute of bounded size is refused before HDF5 looks into it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

import h5py
import numpy as np

from hpcpace.core.compat import hdf5_library

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
