"""Reading sysfs and procfs below a root, live or copied, without trusting what is found there.

Every fact is either read, or unreadable with a reason. Nothing here waits, follows a link out of the root or a cycle of
links, or reads more than a bounded number of bytes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from hpcpace.core.text import printable

_MAX_BYTES = 16_384
_MAX_ENTRIES = 4_096
_MAX_LINKS = 16

P = ParamSpec("P")
T = TypeVar("T")


class Unreadable(Exception):
    """A fact that cannot be read or determined; the message says which, or why.

    Attributes:
        fact: its name in `Snapshot.unreadable`, which has the reason; empty if the message has it.
    """

    def __init__(self, message: str, fact: str = "") -> None:
        super().__init__(message)
        self.fact = fact


class Tree:
    """Files below a root; `unreadable` collects the reasons for what could not be read, by name of the fact."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.unreadable: dict[str, str] = {}
        self._is_live = str(root) == "/"

    @property
    def is_live(self) -> bool:
        """Whether this is the running machine and not a copied tree."""
        return self._is_live

    def fact(self, name: str, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `read` returns; None if it raises Unreadable or ValueError, with the reason kept under `name`."""
        try:
            return read(*args, **kwargs)
        except Unreadable as error:
            self.unreadable[name] = str(error)
        except ValueError as error:
            self.unreadable[name] = printable(str(error))[:120]
        return None

    def text(self, path: str, *, most_bytes: int = _MAX_BYTES) -> str:
        """Return the content of a file without surrounding whitespace.

        Raises:
            Unreadable: missing, not permitted, not a regular file, longer than `most_bytes`, or not UTF-8.
        """
        content = self.content(path, most_bytes=most_bytes + 1)
        if len(content) > most_bytes:
            raise Unreadable(f"longer than {most_bytes} bytes")
        try:
            return content.decode().strip("\0 \t\r\n")
        except UnicodeDecodeError:
            raise Unreadable("not UTF-8") from None

    def beginning(self, path: str, *, most_bytes: int = _MAX_BYTES) -> str:
        """Return the complete lines at the beginning of a file that may be long.

        Raises:
            Unreadable: as for `text`, except for the length.
        """
        content = self.content(path, most_bytes=most_bytes)
        whole = content if len(content) < most_bytes else content[: content.rfind(b"\n") + 1]
        return whole.decode("utf-8", "replace")

    def content(self, path: str, *, most_bytes: int) -> bytes:
        """Return up to `most_bytes` of a file as bytes.

        Raises:
            Unreadable: missing, not permitted, or not a regular file.
        """
        try:
            # Without O_NONBLOCK, opening a FIFO in a copied tree would wait forever.
            descriptor = os.open(self._place(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise Unreadable(_reason(error)) from None
        try:
            if not self._is_live and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable("not a regular file")
            return _read(descriptor, most_bytes)
        except OSError as error:
            raise Unreadable(_reason(error)) from None
        finally:
            os.close(descriptor)

    def number(self, path: str) -> int:
        """Return the integer that a file holds.

        Raises:
            Unreadable: as for `text`, or it is not an integer.
        """
        text = self.text(path)
        if not re.fullmatch(r"-?\d{1,19}", text):
            raise Unreadable("empty" if not text else f"{text[:40]!r} is not an integer")
        return int(text)

    def word(self, path: str) -> str:
        """Return the first line of a file, made printable and at most 200 characters long.

        Raises:
            Unreadable: as for `text`, or it is empty.
        """
        text = self.text(path)
        if not text:
            raise Unreadable("empty")
        return printable(text.split("\n")[0])[:200]

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder.

        Raises:
            Unreadable: missing, not permitted, or not a folder.
        """
        try:
            found = os.listdir(self._place(path))
        except (OSError, ValueError) as error:
            raise Unreadable(_reason(error)) from None
        return sorted(found)[:_MAX_ENTRIES]

    def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        try:
            return os.path.exists(self._place(path))
        except (Unreadable, ValueError):
            return False

    def resolve(self, path: str) -> str:
        """Return the path below the root that a path resolves to, with all links followed.

        Raises:
            Unreadable: missing, or the links form a cycle or lead out of the root.
        """
        parts = [part for part in path.split("/") if part]
        done: list[str] = []
        links = 0
        while parts:
            part = parts.pop(0)
            if part == "..":
                if not done:
                    raise Unreadable("a link leads out of the tree")
                done.pop()
                continue
            if part == ".":
                continue
            target = self._link_target("/".join([*done, part]))
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise Unreadable("too many links: they may form a cycle")
            if target.startswith("/"):
                done = []
            parts = [piece for piece in target.split("/") if piece] + parts
        return "/".join(done)

    def word_or_empty(self, path: str) -> str:
        """Return the first line of a file as `word` does; an empty text if it cannot be read."""
        try:
            return self.word(path)
        except Unreadable:
            return ""

    def link_name(self, path: str) -> str:
        """Return the last name of a link's target; empty without a link, which is a fact, not a failure."""
        try:
            return printable(self.resolve(path).split("/")[-1])[:60]
        except Unreadable:
            return ""

    def _link_target(self, path: str) -> str | None:
        """Return the target of a link, None if the path is not a link."""
        try:
            return os.readlink(os.path.join(self.root, path))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise Unreadable(_reason(error)) from None
        except ValueError as error:
            raise Unreadable(_reason(error)) from None

    def _place(self, path: str) -> str:
        # Links of the kernel's own tree stay inside it; only those of a copy may not.
        return f"/{path}" if self._is_live else os.path.join(self.root, self.resolve(path))


def _read(descriptor: int, most_bytes: int) -> bytes:
    # procfs returns at most a page per read.
    pieces: list[bytes] = []
    left = most_bytes
    while left > 0:
        piece = os.read(descriptor, left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError):
        return "a name with a zero byte"
    number = getattr(error, "errno", None)
    return (os.strerror(number) if number else str(error)).lower()
