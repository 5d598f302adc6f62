"""Keys of the live view: bytes from a terminal to names of keys, and names of keys to what is shown."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hpcpace.watch.view import Choice, Sort

_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"q": "q", b"Q": "q", b"s": "s", b"?": "?", b"h": "?",
}  # fmt: skip
_MOVES = {"up": -1, "down": 1, "page up": -10, "page down": 10}
_MOST_BYTES = 64


def key_names(content: bytes) -> list[str]:
    """Return the names of the keys whose bytes a terminal has sent; others are left out."""
    found = []
    while content:
        known = max((code for code in _NAMES if content.startswith(code)), key=len, default=content[:1])
        if known in _NAMES:
            found.append(_NAMES[known])
        content = content[len(known) :]
    return found


def after_key(choice: Choice, key: str, num_ranks: int) -> Choice | None:
    """Return what is shown after a key; None if it quits."""
    if key == "q":
        return None
    if key == "?":
        return replace(choice, is_help=not choice.is_help)
    if key == "escape":
        return replace(choice, opened=False, is_help=False)
    if key == "enter":
        return replace(choice, opened=not choice.opened and not choice.is_help, is_help=False)
    if key == "s":
        sorts = list(Sort)
        return replace(choice, sort=sorts[(sorts.index(choice.sort) + 1) % len(sorts)], cursor=0, opened=False)
    return replace(choice, cursor=min(max(choice.cursor + _MOVES[key], 0), max(num_ranks - 1, 0)))


class Keyboard:
    """Reads keys from a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def keys(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed, as soon as there is one or the time is over."""
        try:
            if not select.select([self._descriptor], [], [], max(timeout_s, 0.0))[0]:
                return []
            content = os.read(self._descriptor, _MOST_BYTES)
        except InterruptedError:
            return []
        return key_names(content) if content else ["q"]  # the terminal is gone


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Let a terminal send each key at once and show none of them, until the block ends."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
