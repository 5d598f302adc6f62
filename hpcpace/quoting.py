"""Text that others chose (names of devices and hosts, contents of files) made safe for terminals and for shells."""

from __future__ import annotations

import re
import reprlib
import shlex
from typing import Any

_MAX_LETTERS = 60
# Beyond these, reprlib writes "..." for what is inside.
_MAX_LEVELS, _MAX_ENTRIES = 3, 4
# Python refuses to write integers of more than 4,300 digits, and takes quadratic time for shorter ones.
_MAX_BITS = 256
_GAP = "..."
_MIN_WORD = 60
# Times the letters that are left, so that a text of megabytes is not searched for its longest word.
_MAX_PRECUT = 64


def printable(text: str) -> str:
    """Return a text with what would steer a terminal, or cannot be written, as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


class _Short(reprlib.Repr):
    """`repr` in bounded time, whatever a value contains; by what it is an instance of, where reprlib goes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _MAX_LEVELS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MAX_ENTRIES

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, bool):
            return repr(x)
        if isinstance(x, int):
            return repr(int(x)) if x.bit_length() <= _MAX_BITS else f"<an integer of {x.bit_length()} bits>"
        if isinstance(x, str):
            return repr(x[: _MAX_LETTERS + 1])
        if isinstance(x, (bytes, bytearray)):
            return repr(bytes(x[: _MAX_LETTERS + 1]))
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(x, kind):
                if level <= 0 and x:
                    return "{...}" if kind is dict else "[...]"
                written: str = getattr(self, f"repr_{kind.__name__}")(x, level)
                return written
        return repr(x) if x is None or isinstance(x, float) else f"<{type(x).__name__}>"


def shown(value: Any) -> str:
    """Return a value that a file contains as a message names it: at most 60 letters, printable, on one line.

    The time it takes is bounded, also for containers that contain each other and for integers of a million digits.
    """
    text = printable(re.sub(r"\s+", " ", _Short().repr(value)))
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."


def shortened(text: str, *, max_letters: int = 80) -> str:
    """Return a text that others chose, printable, and cut to a length: long words lose their middle first.

    The middle says least of a path, and names differ at their ends.
    """
    text = printable(_without_middle(text, _MAX_PRECUT * max_letters))
    while len(text) > max_letters:
        start, stop = max((found.span() for found in re.finditer(r"\S+", text)), key=lambda span: span[1] - span[0])
        left = max(stop - start - (len(text) - max_letters), min(_MIN_WORD, max_letters))
        if stop - start <= left:
            return _without_middle(text, max_letters)
        text = text[:start] + _without_middle(text[start:stop], left) + text[stop:]
    return text


def _without_middle(text: str, most: int) -> str:
    end = (most - len(_GAP)) // 2
    return text if len(text) <= most else f"{text[: most - len(_GAP) - end]}{_GAP}{text[-end:]}"


def one_line(text: str) -> str:
    """Return an error that lists its reasons line by line, as `- reason`, as one line."""
    return "; ".join(line.removeprefix("- ") for line in text.splitlines())


def shell_word(text: str) -> str:
    """Return a text as one word of a shell line to paste; plain names stay as they are."""
    return shlex.quote(printable(text))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii", "backslashreplace")
