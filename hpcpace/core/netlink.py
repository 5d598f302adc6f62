"""Messages of netlink sockets, by which the kernel reports what neither sysfs nor procfs has; reading needs no root.

Formats: netlink(7), rtnetlink(7), linux/genetlink.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ERROR, DONE = 2, 3
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_REQUEST = 1
# The upper bits of an attribute's number are flags.
_NUMBER = 0x3FFF


def message(kind: int, body: bytes, *, flags: int = 0) -> bytes:
    """Return a request."""
    return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body


def attribute(number: int, value: bytes) -> bytes:
    """Return an attribute of a request."""
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, number) + value + bytes(aligned(size) - size)


def messages(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and body of each message; a damaged one ends them."""
    while len(content) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(content)
        if not _HEADER.size <= length <= len(content):
            return
        yield kind, content[_HEADER.size : length]
        content = content[aligned(length) :]


def attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and value of each attribute; a damaged one ends them."""
    while len(content) >= _ATTRIBUTE.size:
        length, number = _ATTRIBUTE.unpack_from(content)
        if not _ATTRIBUTE.size <= length <= len(content):
            return
        yield number & _NUMBER, content[_ATTRIBUTE.size : length]
        content = content[aligned(length) :]


def check_error(kind: int, body: bytes) -> None:
    """Raise what an error message says.

    Raises:
        OSError: the message is an error.
    """
    if kind == ERROR:
        raise OSError(-struct.unpack_from("=i", body)[0], "refused")


def aligned(length: int) -> int:
    """Return a length up to the next message or attribute."""
    return (length + 3) & ~3
