"""Lines of logs of any size as a stream: plain or gzip, UTF-8 or UTF-16, lines of any length, in files or folders."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedReader, FileIO
from pathlib import Path

from hpcpace.core.errors import UsageError
from hpcpace.core.log_text import utf8_blocks

MAX_LINE_BYTES = 4096
"""Longer lines are read as several."""

_MAX_FILES = 16_384
_CHUNK_BYTES = 1 << 18
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}


def log_files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Return the files at some paths, and whether they are named themselves; those of a folder are sorted by name.

    Raises:
        UsageError: a path does not exist, or is neither a folder nor something to read.
    """
    found: dict[Path, bool] = {}
    for path in paths:
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                entries = sorted(entry for entry in path.iterdir() if entry.is_file())[:_MAX_FILES]
                found = dict.fromkeys(entries, False) | found
                continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot read the NCCL log {path}: {reason}") from error
        found[path] = True
    return list(found.items())


def log_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a log with their numbers, in UTF-8, without holding more than a chunk of it.

    Raises:
        OSError, EOFError: it cannot be read, or ends within its compressed data.
        ValueError: it is no file, or is packed in another way than gzip.
    """
    # Opening a FIFO without a writer would wait forever; one with a writer is read to its end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    mode = os.fstat(descriptor).st_mode
    with BufferedReader(FileIO(descriptor, "rb"), _CHUNK_BYTES) as stream:
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ValueError("it is not a file")
        head = stream.peek(8)[:8]
        packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")
        if packed:
            raise ValueError(f"it is packed with {packed}: unpack it first")
        if head.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield from _lines(unpacked)
        else:
            yield from _lines(stream)


def _lines(stream: BufferedReader[FileIO] | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    number, rest = 1, b""
    for block in utf8_blocks(iter(lambda: stream.read1(_CHUNK_BYTES), b"")):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if len(line) < MAX_LINE_BYTES:
                yield number, line + b"\n"
            else:
                yield from ((number, part) for part in _parts(line + b"\n"))
            number += 1
        if len(rest) > MAX_LINE_BYTES:
            *whole, rest = _parts(rest)
            yield from ((number, part) for part in whole)
    if rest:
        yield number, rest


def _parts(line: bytes) -> Iterator[bytes]:
    return (line[begin : begin + MAX_LINE_BYTES] for begin in range(0, len(line), MAX_LINE_BYTES))
