"""Text of logs and of terminals from bytes of any origin: UTF-16, gzip and colours are undone, in constant memory.

Most of a log of gigabytes is passed over without being split into lines: a piece in which none of some words occurs has
nothing to say. In front of a line stand times, and labels of launchers, containers and loggers, in any order. Known are
`srun -l`, `mpirun --tag-output`, `pdsh` and `clush`, `kubectl logs --prefix`, the runtime of containers, Docker, Ray,
the journal, torchrun and glog, and times in the usual forms, with or without a date and a zone.
"""

from __future__ import annotations

import codecs
import gzip
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, FileIO
from pathlib import Path

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S

MAX_LINE_BYTES = 4096
"""`log_lines` yields longer lines as several."""

_CHUNK_BYTES = 1 << 18  # memory: of a log that is read in lines
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
# memory: of a line without an end, such as a progress bar, so much is kept together
_MAX_PIECE_BYTES = 1 << 20
# format: what a message may take, so that one that is cut by the end of a kept line is found in the next piece
_OVERLAP_BYTES = 4 << 10
_MAX_WRAPPED = 8  # format: lines of one message, which has some 500 letters
_COLOURS = re.compile(rb"\x1b\[[0-9;?]{0,32}[ -/]{0,4}[@-~]")
_BYTE_ORDERS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def encoding_of(start: bytes) -> str:
    """Return the encoding of a text by its first bytes: one of the two of UTF-16, or UTF-8, which ASCII is, too.

    Windows writes UTF-16, at times without its byte order mark: then every other byte of two Latin letters is a zero.
    """
    if start[:2] in _BYTE_ORDERS:
        return _BYTE_ORDERS[start[:2]]
    zeros = [byte == 0 for byte in start[:4]]
    return "utf-16-le" if zeros == [False, True] * 2 else "utf-16-be" if zeros == [True, False] * 2 else "utf-8"


def pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a log in UTF-8, in pieces about as large as its blocks that end with a line where lines have ends.

    The last lines are in one piece, so that those of one message are together where a log is cut.
    """
    held = b""
    for block in utf8_blocks(blocks):
        end = block.rfind(b"\n", 0, max(len(block) - _OVERLAP_BYTES, 0)) + 1
        if end:
            yield held + block[:end]
            held = block[end:]
        else:
            held += block
        if len(held) > _MAX_PIECE_BYTES:
            yield held
            held = held[-_OVERLAP_BYTES:]
    if held:
        yield held


def utf8_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks of a text in UTF-8; what cannot be decoded from UTF-16 becomes a replacement character."""
    blocks = iter(blocks)
    first = next(blocks, b"")
    encoding = encoding_of(first)
    if encoding == "utf-8":
        yield first
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first).removeprefix("\ufeff").encode("utf-8", "replace")
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def plain_text(data: bytes) -> str:
    """Return text without colours and other marks for a terminal; what is no UTF-8 becomes a replacement character."""
    return _plain(b"".join(utf8_blocks([data])))


def _plain(utf8: bytes) -> str:
    return without_colours(utf8).decode("utf-8", "replace").removeprefix("\ufeff")


def without_colours(line: bytes) -> bytes:
    """Return text without what makes a terminal change colours or move its cursor."""
    return _COLOURS.sub(b"", line) if b"\x1b" in line else line


def lines_with(piece: bytes, words: Sequence[bytes], goes_on: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield the lines of a piece in which one of some words occurs, without their ends.

    Args:
        piece: of a log, in UTF-8, best one in which one of the words is known to occur.
        words: some of them.
        goes_on: whether a line goes on in the following one: a terminal or a viewer may have wrapped it.
    """
    lines, begin = piece.split(b"\n"), 0
    for number, line in enumerate(lines):
        if number < begin or not any(word in line for word in words):
            continue
        text = _plain(line)
        for following in lines[number + 1 : number + _MAX_WRAPPED]:
            if not goes_on(text, more := _plain(following)):
                break
            text = text.rstrip("\r") + more
            begin = max(begin, number + 1) + 1
        yield text


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


_MAX_PARTS = 6  # format: labels of a launcher, a container, a logger and a shell, each with a time
_YEAR_DAYS = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
# Names of months are those of any language, as `Nov 29`, `29 nov.` or `11月 29`.
_DATE = (
    r"(?:\d{4}[-/](?P<month>\d\d?)[-/](?P<day>\d\d?)|[\d/.\-]{8,10}"
    r"|(?:[^\W_]{2,10}\.?,? +)?[^\W_]{1,10}\.? +[^\W_]{1,10}[.,]?(?: \d{4})?)"
)
_ZONE = r"(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d|CES?T|[ECMP][SD]T|[BIJKM]ST|MSK)(?![\w:]))?"
_PART = re.compile(
    rf"[\[(]?(?:{_DATE}(?:T|,? +))?{_CLOCK}{_ZONE}[\])]?(?: std(?:out|err) [FP](?= ))?(?: ?[-|:,](?= ))?(?: |\t|$)"
    r"|(?P<glog>[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d{6,9} +(?:\d{1,10} +)?[\w./\-]{1,100}:\d{1,7}\])(?: |$)"
    r"| {0,6}(?P<task>\d{1,6}):(?: |(?=\t|$|\[))"
    r"|\[(?:[\w.\-]{1,100}@)?\d{1,6},(?P<mpi_rank>\d{1,6})\]<std(?:out|err|diag)>: ?"
    r"|\((?P<actor>[^\s()]{1,80}) pid=\d{1,10}(?:, ip=[^\s()]{1,60})?\)(?: |$)"
    r"|(?P<host>[A-Za-z0-9][\w.\-]{0,100})(?<!Error)(?<!Exception):(?: |(?=\t|$))"
    r"|(?P<logged_by>[A-Za-z][\w.\-]{0,100}) [\w./@\-]{1,100}\[\d{1,10}\]:(?: |$)"
    r"|\[(?P<bracketed>[^\]\s]{1,120})\](?P<colon>:?)(?: |(?=\t|$|\[))"
    r"|(?P<container>[\w.\-]{1,100}) +\|(?: |$)"
)
_NAME = re.compile(r"[A-Za-z][\w.\-]{0,100}")


@dataclass(frozen=True, kw_only=True)
class Front:
    """The front of a line.

    Attributes:
        text: the line without it.
        labels: it without times and without blanks at its begin.
        task: the rank by a label of Slurm or mpirun; None without one.
        host: the last name in it; empty without one.
        actor: the class of the Ray actor; empty without one.
        at_ns: its first time with a date, in a year of 366 days that has no number, in UTC where it has an offset from
            that; None without one.
    """

    text: str
    labels: str
    task: int | None
    host: str
    actor: str
    at_ns: int | None


def front_of(line: str) -> Front:
    """Return what stands in front of a line. Blanks behind a label but the first one belong to the line."""
    task, host, actor, at_ns = None, "", "", None
    labels: list[str] = []
    end = 0
    for _ in range(_MAX_PARTS):
        part = _PART.match(line, end)
        if part is None:
            break
        end = part.end()
        if part["second"]:
            at_ns = _at_ns(part) if at_ns is None else at_ns
        if part["second"] or part["glog"]:
            continue
        labels.append(part[0].lstrip())
        number = part["task"] or part["mpi_rank"]
        task = int(number) if number and task is None else task
        actor = part["actor"] or actor
        named = part["bracketed"] if part["colon"] and _NAME.fullmatch(part["bracketed"]) else ""
        host = part["host"] or part["logged_by"] or named or host
    return Front(text=line[end:], labels="".join(labels), task=task, host=host, actor=actor, at_ns=at_ns)


def _at_ns(part: re.Match[str]) -> int | None:
    if not part["month"]:
        return None
    month, day, hour, minute, second = (int(part[name]) for name in ("month", "day", "hour", "minute", "second"))
    found = year_ns(month, day, hour, minute, second, int((part["fraction"] or "").ljust(9, "0")))
    if found is None or (part["zone"] or "")[:1] not in ("+", "-"):
        return found
    hours, minutes = int(part["zone"][1:3]), int(part["zone"][-2:])
    offset_ns = (hours * 60 + minutes) * 60 * NS_PER_S
    return found - offset_ns if part["zone"][0] == "+" else found + offset_ns


def year_ns(month: int, day: int, hour: int, minute: int, second: int, nanosecond: int) -> int | None:
    """Return a time as nanoseconds since the begin of a year of 366 days; None where there is no such month."""
    if not 1 <= month <= len(_YEAR_DAYS):
        return None
    seconds = (((_YEAR_DAYS[month - 1] + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    return seconds * NS_PER_S + nanosecond
