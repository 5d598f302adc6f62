"""Files of other tools, opened within bounds: regular files only, and never more out of gzip than is plausible."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng

from hpcpace.errors import TraceError

BLOCK_BYTES = 4 << 20
MOST_RATIO = 200
"""Profiles shrink 10 to 30 times; what grows more than this out of gzip was made to fill memory or time."""
_FREE_BYTES = 64 << 20
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_DAMAGED: Any = zlib_ng.error


def size_of(path: Path) -> int:
    """Return the size of a regular file.

    Raises:
        TraceError: it is none, or cannot be looked at.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise TraceError(f"{path} is no regular file: name a file that the tool wrote")
    return found.st_size


def json_bytes(path: Path, told: Callable[[int, int], None] = lambda *_: None) -> Iterator[bytes]:
    """Yield the content of a file, out of gzip where it is packed, a block at a time.

    Args:
        path: the file; what it is is seen from its first bytes, not from its name.
        told: takes how many bytes of the file are read, of how many.

    Raises:
        TraceError: it cannot be read, is cut off or damaged as gzip, or grows implausibly out of it.
    """
    size = size_of(path)
    num_read = 0
    try:
        with open(path, "rb") as file:
            block = file.read(BLOCK_BYTES)
            if block[:2] != _GZIP:
                while block:
                    num_read += len(block)
                    told(num_read, size)
                    yield block
                    block = file.read(BLOCK_BYTES)
                return
            yield from _unpacked(path, file.read, block, size, told)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def _unpacked(
    path: Path, read: Callable[[int], bytes], block: bytes, size: int, told: Callable[[int, int], None]
) -> Iterator[bytes]:
    inflate = zlib_ng.decompressobj(_GZIP_WINDOW)
    num_read, num_out = 0, 0
    while block:
        num_read += len(block)
        told(num_read, size)
        while block:
            try:
                out = inflate.decompress(block, BLOCK_BYTES)
            except _DAMAGED as error:
                raise TraceError(f"{path} is damaged after {num_out >> 20} MiB of its content ({error})") from error
            num_out += len(out)
            if num_out > _FREE_BYTES and num_out > MOST_RATIO * num_read:
                raise TraceError(
                    f"{path} grows more than {MOST_RATIO} times out of gzip: refused; unpack it if it is a profile"
                )
            if out:
                yield out
            if inflate.eof:
                block = inflate.unused_data
                if not block.startswith(_GZIP):
                    block = b""  # zeros or a signature behind the last member
                    break
                inflate = zlib_ng.decompressobj(_GZIP_WINDOW)
            else:
                block = inflate.unconsumed_tail
        block = read(BLOCK_BYTES)
    if not inflate.eof:
        raise TraceError(f"{path} is cut off: its gzip data end after {num_out >> 20} MiB of content; copy it again")
