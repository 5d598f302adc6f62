"""Text that others chose (names of devices and hosts, contents of files) made safe for terminals and for shells."""

from __future__ import annotations

import shlex


def printable(text: str) -> str:
    """Return a text with what would steer a terminal, or cannot be written, as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def one_line(text: str) -> str:
    """Return an error that lists its reasons line by line, as `- reason`, as one line."""
    return "; ".join(line.removeprefix("- ") for line in text.splitlines())


def shell_word(text: str) -> str:
    """Return a text as one word of a shell line to paste; plain names stay as they are."""
    return shlex.quote(printable(text))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii", "backslashreplace")
