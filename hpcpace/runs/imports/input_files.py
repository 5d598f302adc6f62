"""Files of other tools, opened, decoded and checked within bounds of memory and time.

Only regular files are opened, and gzip may not grow implausibly. Each value of JSON or of a pickle has a type and a
size before it is used: a pickle may have one text in a thousand places, or lists without end where numbers should be.
Libraries that allocate what a file asks for run in a process with limited memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from msgspec import Meta
from zlib_ng import zlib_ng

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.pickles import MAX_VALUES

_Result = TypeVar("_Result")


def call_bounded(function: Callable[[], _Result], *, max_bytes: int) -> _Result:
    """Return what a function returns in a forked process; what it raises is raised here. The results are pickled.

    Args:
        function: what to call.
        max_bytes: the memory that it may take beyond that of this process.

    Raises:
        MemoryError: it took more, or the process died.
    """
    # Forked, as in `hpcpace.core.pool`; one of `spawn` could not take `function`, which is a closure.
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(function, sender, max_bytes), daemon=True)
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        result, error = None, MemoryError()
    finally:
        receiver.close()
        process.join()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], Any], sender: Connection, max_bytes: int) -> None:
    _silence()
    limit = _data_bytes() + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: tuple[Any, Exception | None]
    try:
        answer = (function(), None)
    except Exception as error:
        answer = (None, error)
    try:
        sender.send(answer)
    finally:
        os._exit(0)  # without the ends of libraries that lack memory


def _silence() -> None:
    """Close what libraries write to when they lack memory."""
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)


def _data_bytes() -> int:
    """Return the memory of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


BLOCK_BYTES = 1 << 20
MAX_RATIO = 200
"""Profiles shrink 10 to 30 times; what grows more than this out of gzip was made to fill memory or time."""
_FREE_BYTES = 64 << 20
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_FIRST_FED_BYTES = 1 << 10
_DAMAGED: Any = zlib_ng.error


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of another tool.

    Attributes:
        path: its path, for messages.
        size_bytes: its size when it was found; no more is read of it. 0 for what is no regular file.
        folder: the folder in which it was found; None where the user gave its path.
    """

    path: Path
    size_bytes: int
    folder: Folder | None = None

    @classmethod
    def at(cls, path: Path) -> InputFile:
        """Return the file at a path that the user gave.

        Raises:
            TraceError: it is no regular file, or cannot be looked at.
        """
        return cls(path=path, size_bytes=size_of(path))

    @classmethod
    def all_in(cls, path: Path, suffixes: tuple[str, ...], *, max_files: int) -> list[InputFile]:
        """Return what a folder holds under names with a suffix, by name, but for folders.

        Raises:
            TraceError: it cannot be read, or has more than `max_files`.
        """
        try:
            folder = Folder.open(path)
            names = [name for name in folder.names() if name.endswith(suffixes)]
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
        if len(names) > max_files:
            raise TraceError(f"{path} has {len(names)} files, more than {max_files}: name a folder of fewer")
        return [
            cls(path=path / name, size_bytes=folder.size_bytes(name), folder=folder)
            for name in names
            if not folder.has_folder(name)
        ]

    def open(self) -> BinaryIO:
        """Open the file.

        Raises:
            TraceError: it cannot be opened, or is no regular file; in a folder, a link does not count as one.
        """
        try:
            if self.folder is not None:
                return os.fdopen(self.folder.open_file(self.path.name), "rb")
            # Opening a FIFO would wait for its writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            file = os.fdopen(descriptor, "rb")
        except (OSError, ValueError) as error:
            raise TraceError(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise _irregular(self.path)
        return file


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
        raise _irregular(path)
    return found.st_size


def _irregular(path: Path) -> TraceError:
    return TraceError(f"{path} is no regular file: name a file that the tool wrote")


def json_bytes(file: InputFile, progress: Callable[[int, int], None] = lambda *_: None) -> Iterator[bytes]:
    """Yield the content of a file, out of gzip where it is packed, in blocks of some `BLOCK_BYTES`.

    Args:
        file: what it is is seen from its first bytes, not from its name.
        progress: takes how many bytes of the file are read, of how many.

    Raises:
        TraceError: it cannot be read, is cut off or damaged as gzip, or grows implausibly out of it.
    """
    try:
        with file.open() as opened:
            blocks = _blocks(opened, file.size_bytes, progress)
            first = next(blocks, b"")
            if not first.startswith(_GZIP):
                yield first
                yield from blocks
            else:
                yield from _joined(_unpacked(file.path, first, blocks))
    except OSError as error:
        raise TraceError(f"cannot read {file.path}: {error.strerror or error}") from error


def _blocks(opened: BinaryIO, size: int, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """Yield what a file held when its size was taken: its owner may let it grow for ever."""
    num_read = 0
    while block := opened.read(min(BLOCK_BYTES, size - num_read)):
        num_read += len(block)
        progress(num_read, size)
        yield block


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts in blocks; what came before an error is yielded before it is raised."""
    held: list[bytes] = []
    num_held = 0
    try:
        for part in parts:
            held.append(part)
            num_held += len(part)
            if num_held >= BLOCK_BYTES:
                yield b"".join(held)
                held, num_held = [], 0
    except TraceError:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)


def _unpacked(path: Path, block: bytes, more: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of gzip, which may have several members."""
    inflate = zlib_ng.decompressobj(_GZIP_WINDOW)
    num_in, num_out, num_fed = 0, 0, _FIRST_FED_BYTES
    while block:
        at = 0
        while at < len(block):
            if inflate.eof:
                if not _GZIP.startswith(block[at : at + len(_GZIP)]):
                    return  # zeros or a signature behind the last member
                inflate, num_fed = zlib_ng.decompressobj(_GZIP_WINDOW), _FIRST_FED_BYTES
            # zlib copies what it was fed and did not use, so it gets no more than twice what it used last.
            fed = block[at : at + num_fed]
            try:
                out = inflate.decompress(fed, BLOCK_BYTES)
            except _DAMAGED as error:
                raise TraceError(f"{path} is damaged after {num_out >> 20} MiB of its content ({error})") from error
            num_used = len(fed) - len(inflate.unconsumed_tail) - len(inflate.unused_data)
            at += num_used
            num_fed = min(max(2 * num_used, _FIRST_FED_BYTES), BLOCK_BYTES)
            num_out += len(out)
            if num_out > _FREE_BYTES and num_out > MAX_RATIO * (num_in + at):
                raise TraceError(
                    f"{path} grows more than {MAX_RATIO} times out of gzip: refused; unpack it if it is a profile"
                )
            if out:
                yield out
        num_in += len(block)
        block = next(more, b"")
    if not inflate.eof:
        raise TraceError(f"{path} is cut off: its gzip data end after {num_out >> 20} MiB of content; copy it again")


MAX_LETTERS = 200
"""Of a name: of a group, an operation, a host. Hashes, and lists of dimensions, take some 60."""
MAX_NUMBER = (1 << 62) - 1
"""Sums and differences of two still fit into 64 bits."""

Name = Annotated[str, Meta(max_length=MAX_LETTERS)]
WholeNumber = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


def json_value(data: bytes) -> Any:
    """Return what a text of JSON says.

    Raises:
        ValueError: it is none, is cut off, or has so many values that they would fill the memory.
    """
    if (num_values := sum(data.count(sign) for sign in (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has {num_values} values, more than {MAX_VALUES}")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is no JSON: not in UTF-8") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) - 1 or "Unterminated" in error.msg:
            raise ValueError("it is cut off") from None
        raise ValueError(f"it is no JSON: {error.msg} in line {error.lineno}") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"it is no JSON: {error}") from None


def is_whole(value: Any, *, lowest: int = 0, highest: int = MAX_NUMBER) -> bool:
    """Return whether a value is a whole number within bounds; true and false are none."""
    return type(value) is int and lowest <= value <= highest
