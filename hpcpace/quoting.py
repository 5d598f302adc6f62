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
    """Return a text that others chose, printable, without its middle if it is long: names differ at their ends."""
    if len(text) > max_letters:
        half = max_letters // 2
        text = f"{text[:half]}...{text[-half:]}"
    escaped = printable(text)
    return escaped if len(escaped) <= 2 * max_letters else f"{escaped[:max_letters]}...{escaped[-max_letters:]}"


def one_line(text: str) -> str:
    """Return an error that lists its reasons line by line, as `- reason`, as one line."""
    return "; ".join(line.removeprefix("- ") for line in text.splitlines())


def shell_word(text: str) -> str:
    """Return a text as one word of a shell line to paste; plain names stay as they are."""
    return shlex.quote(printable(text))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii", "backslashreplace")
