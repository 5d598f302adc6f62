"""Text of logs and of terminals from bytes of any origin: UTF-16 and colours are undone, in constant memory.

Most of a log of gigabytes is passed over without being split into lines: a piece in which none of some words occurs has
nothing to say.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence

# memory: of a line without an end, such as a progress bar, so much is kept together
_MAX_LINE_BYTES = 1 << 20
# format: what a message may take, so that one that is cut by the end of a kept line is found in the next piece
_OVERLAP_BYTES = 4 << 10
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
    """Yield a log in UTF-8, in pieces about as large as its blocks that end with a line where lines have ends."""
    held = b""
    for block in utf8_blocks(blocks):
        end = block.rfind(b"\n") + 1
        if end:
            yield held + block[:end]
            held = block[end:]
        else:
            held += block
        if len(held) > _MAX_LINE_BYTES:
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


def lines_with(piece: bytes, words: Sequence[bytes]) -> Iterator[str]:
    """Yield the lines of a piece in which one of some words occurs, without their ends."""
    if not any(word in piece for word in words):
        return
    for line in piece.split(b"\n"):
        if any(word in line for word in words):
            yield _plain(line)
