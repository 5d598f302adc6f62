"""Files of other tools, opened, decoded and checked within bounds of memory and time; Chrome's traces as a stream.

Only regular files are opened, and gzip may not grow implausibly. Each value of JSON or of a pickle has a type and a
size before it is used: a pickle may have one text in a thousand places, or lists without end where numbers should be.
Libraries that allocate what a file asks for run in a process with limited memory.

The array of events is cut where one object ends and the next one begins, and each piece is decoded by msgspec into the
fields that are used here. A cut inside an object or a text leaves a bracket or quote open, so its piece is no JSON: a
wrong cut cannot pass. The likely cut is tried first; where it was wrong, brackets and quotes are counted, in time that
is linear in the text.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from hpcpace.core.codec import MAX_VALUES
from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable

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


_OPEN, _CLOSE, _QUOTE = 1, -1, 2
_SIGNS = np.zeros(256, np.int8)
_SIGNS[list(b"[{")], _SIGNS[list(b"]}")], _SIGNS[ord('"')] = _OPEN, _CLOSE, _QUOTE


class JsonStructure:
    """The structure of a text that begins outside of any text value, such as what follows the bracket of a list."""

    def __init__(self, text: bytes) -> None:
        codes = np.frombuffer(text, np.uint8)
        signs = _SIGNS[codes]
        signs[_escaped(codes)] = 0
        self._at = np.flatnonzero(signs)
        self._signs = signs[self._at]
        is_quote = self._signs == _QUOTE
        self._is_text = (np.cumsum(is_quote, dtype=np.int32) & 1).astype(np.bool_)
        self._depth = np.cumsum(np.where(is_quote | self._is_text, 0, self._signs), dtype=np.int32)

    @cached_property
    def stop(self) -> int:
        """Where the bracket is that closes what the text began inside of; -1 if there is none."""
        is_outside = self._depth < 0
        return int(self._at[is_outside.argmax()]) if is_outside.any() else -1

    @cached_property
    def ends(self) -> NDArray[Any]:
        """What follows each object or list that is in no other one, before `stop`: indices, ascending."""
        is_end = (self._depth == 0) & (self._signs == _CLOSE) & ~self._is_text
        ends: NDArray[Any] = self._at[is_end] + 1
        return ends[ends <= self.stop] if self.stop >= 0 else ends

    def first_member(self, quotes: list[int]) -> int:
        """Return which of some quotes is the first to begin a name or a value of the outermost object; -1 if none."""
        at = np.array(quotes, np.int64)
        place = np.searchsorted(self._at, at, side="right") - 1  # not -1, because the object begins before
        is_member = (self._at[place] == at) & self._is_text[place] & (self._depth[place] == 1)
        return int(is_member.argmax()) if is_member.any() else -1


def _escaped(codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the indices of what follows an odd number of backslashes."""
    slashes = np.flatnonzero(codes == ord("\\"))
    if not len(slashes):
        return slashes
    is_apart = np.diff(slashes) > 1
    firsts, lasts = slashes[np.append(True, is_apart)], slashes[np.append(is_apart, True)]
    after: NDArray[Any] = lasts[(lasts - firsts) % 2 == 0] + 1
    return after[after < len(codes)]


_BETWEEN = re.compile(rb"\}(?=\s*,\s*\{)")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_NUMBER = re.compile(rb"([:,\[]\s*)-?(?:nan|inf|infinity)\b", re.IGNORECASE)
"""What profilers write for a quotient by zero, and what is no JSON; read as null, which no time may be."""
_PIECE_BYTES = 1 << 20
_SEARCHED = 1 << 16
# An event has some hundred bytes, some ten thousand with a stack. JSON takes up to 25 times its bytes in memory.
_MAX_EVENT_BYTES = 4 << 20
# Of what is around the events: process groups of a job have some hundred bytes a rank.
_MAX_FACTS_BYTES = 8 << 20
# Versions of the profiler differ in single events, and counting one costs as much time as reading a hundred good ones.
_MAX_ODD = 1 << 16


class ChromeEvents:
    """The events of one file.

    Attributes:
        facts: members of the outermost object beside the events, complete after the last batch.
        problem: what is wrong with the file after all batches, such as that it is cut off; empty if nothing is.
        num_events: events so far.
    """

    def __init__(self, blocks: Iterator[bytes], path: Path, event: Any) -> None:
        """Begin to read.

        Args:
            blocks: content of the file.
            path: its path, for messages.
            event: the msgspec.Struct that an event becomes.
        """
        self._blocks, self._path = blocks, path
        self._decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[event]).decode
        self._split: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[msgspec.Raw]).decode
        self._decode_one = msgspec.json.Decoder(event).decode
        # Texts in another encoding than UTF-8 are a ValueError, values nested too deep a RecursionError.
        self._errors = (msgspec.DecodeError, ValueError, RecursionError)
        self._num_odd, self._first_odd, self._end_reason = 0, "", ""
        self.facts: dict[str, Any] = {}
        self.problem = ""
        self.num_events = 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of events.

        Raises:
            TraceError: the file cannot be read, or is no JSON of this format.
        """
        left, enough, is_over = self._skip_head(), _PIECE_BYTES, False
        while not self._end_reason and (block := self._next_block()):
            left += block
            if is_over:
                if len(left) > _MAX_FACTS_BYTES:
                    break
            elif len(left) >= enough:
                events, left, is_over = self._piece(left)
                # Without a whole event, twice as much is awaited: a long one is not searched for every block.
                enough = _PIECE_BYTES if events else 2 * len(left)
                if events:
                    yield events
                elif not is_over and len(left) > _MAX_EVENT_BYTES:
                    left = b""
                    self._end_reason = f"{self._path} has an event of more than {_MAX_EVENT_BYTES >> 20} MiB"
        before = -1
        while not is_over and len(left) != before:
            before = len(left)
            events, left, is_over = self._piece(left)
            yield events
        if self._end_reason:
            self._end_early(self._end_reason)
        elif not is_over:
            self._end_early(f"{self._path} is cut off; copy it again")
        else:
            self._take_tail(left)
        if self._num_odd and not self.num_events:
            raise TraceError(f"{self._path} is no profile: {self._first_odd}")
        if self._num_odd:
            odd = f"{self._path}: {plural(self._num_odd, 'event')} left out, such as one with {self._first_odd}"
            self.problem = "; ".join(filter(None, (self.problem, odd)))

    def _next_block(self) -> bytes:
        """Return the next block; empty at the end, and where the file cannot be read further."""
        try:
            return next(self._blocks, b"")
        except TraceError as error:
            self._end_reason = str(error)
            return b""

    def _end_early(self, reason: str) -> None:
        """Say why no more events are read.

        Raises:
            TraceError: there is none.
        """
        if not self.num_events:
            raise TraceError(f"{reason} (before its first event)")
        self.problem = f"{reason} (after event {self.num_events}; what comes before that is used)"

    def _skip_head(self) -> bytes:
        """Return what follows the bracket before the first event."""
        head = b""
        while not self._is_no_profile(head) and (block := self._next_block()):
            head += block
            if head.lstrip()[:1] == b"[":
                return head.lstrip()[1:]
            begin, end = _begin_of_events(head)
            if end:
                try:
                    self.facts = json.loads(head[:begin] + b'"traceEvents": 0}')
                    del self.facts["traceEvents"]
                except (ValueError, RecursionError):
                    break
                return head[end:]
        if self._end_reason or not head:
            raise TraceError(self._end_reason or f"{self._path} is empty")
        raise TraceError(
            f"{self._path} has no traceEvents: it is no profile in Chrome's format (it begins with"
            f" {printable(head[:20].decode('utf-8', 'replace'))})"
        )

    def _is_no_profile(self, head: bytes) -> bool:
        return len(head) > _MAX_FACTS_BYTES or head.lstrip()[:1] not in (b"{", b"")

    def _piece(self, left: bytes) -> tuple[list[Any], bytes, bool]:
        """Return the whole events of a text, what follows them, and whether it follows the end of all events."""
        likely = max((found.end() for found in _BETWEEN.finditer(left, max(len(left) - _SEARCHED, 0))), default=0)
        if likely and (events := self._decoded(left[:likely])) is not None:
            return events, left[likely:], False
        structure = JsonStructure(left)
        is_over = structure.stop >= 0
        cut = structure.stop if is_over else int(structure.ends[-1]) if len(structure.ends) else 0
        events = self._decoded(left[:cut])
        if events is None:
            self._end_reason = f"{self._path} is damaged"
            return self._before_damage(left, structure.ends), b"", False
        return events, left[cut + is_over :], is_over

    def _before_damage(self, text: bytes, ends: NDArray[Any]) -> list[Any]:
        """Return the events of a damaged text that end before the damage, whose place a binary search finds."""
        num_good, num_at_most = 0, len(ends)
        has_no_numbers = _NO_NUMBER.search(text) is not None
        while num_good < num_at_most:
            middle = (num_good + num_at_most + 1) // 2
            part = _as_list(text[: ends[middle - 1]])
            if self._parts(_NO_NUMBER.sub(rb"\1null", part) if has_no_numbers else part) is None:
                num_at_most = middle - 1
            else:
                num_good = middle
        return self._decoded(text[: ends[num_good - 1]] if num_good else b"") or []

    def _decoded(self, text: bytes) -> list[Any] | None:
        """Return the events of a text, or None if it is none of whole events."""
        text = _as_list(text)
        events = self._of_list(text)
        if events is None and (numbered := _NO_NUMBER.sub(rb"\1null", text)) != text:
            events = self._of_list(numbered)
        self.num_events += len(events or ())
        return events

    def _of_list(self, text: bytes) -> list[Any] | None:
        """Return the events of a list, or None if it is no JSON; those of another form are counted and left out."""
        try:
            return self._decode(text)
        except self._errors:
            parts = self._parts(text)
        return None if parts is None else self._one_by_one(parts)

    def _parts(self, text: bytes) -> list[Any] | None:
        """Return the events of a list, not yet decoded, or None if it is no JSON."""
        try:
            return self._split(text)
        except self._errors:
            return None

    def _one_by_one(self, parts: list[Any]) -> list[Any]:
        events = []
        for part in parts:
            try:
                events.append(self._decode_one(part))
            except self._errors as error:
                self._num_odd += 1
                self._first_odd = self._first_odd or printable(str(error))[:120]
                if self._num_odd > _MAX_ODD:
                    self._end_reason = f"{self._path} has more than {_MAX_ODD} events of another form"
                    break
        return events

    def _take_tail(self, tail: bytes) -> None:
        tail = tail.strip()
        try:
            if len(tail) > _MAX_FACTS_BYTES:
                raise ValueError
            self.facts |= json.loads(b"{" + tail.removeprefix(b",")) if tail else {}
        except (ValueError, RecursionError):
            self.problem = f"{self._path}: what follows the events is damaged, and left out"


def _as_list(text: bytes) -> bytes:
    """Return events as JSON, without the comma that stands between the first of them and the one before it."""
    return b"[" + text.lstrip().removeprefix(b",") + b"]"


def _begin_of_events(head: bytes) -> tuple[int, int]:
    """Return where the member traceEvents of the outermost object begins, and where its first event; (0, 0) if not."""
    found = list(_EVENTS.finditer(head))
    first = JsonStructure(head).first_member([one.start() for one in found]) if found else -1
    return (found[first].start(), found[first].end()) if first >= 0 else (0, 0)
