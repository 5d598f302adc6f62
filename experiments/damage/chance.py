"""Random choices as the tables of damage need them, always the same for the same name and number."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Random(np.random.Generator):
    """A generator with the choices that kinds of damage make."""

    def of(self, choices: Sequence[Any]) -> Any:
        """Return one of several."""
        return choices[int(self.integers(len(choices)))]

    def one(self, *choices: Any) -> Any:
        """Return one of the arguments."""
        return self.of(choices)

    def count(self, least: int, stop: int) -> int:
        """Return a number from `least` to below `stop`."""
        return int(self.integers(least, stop))

    def size(self, least: int, most: int) -> int:
        """Return a number that is as often below as above the geometric mean of its bounds."""
        return int(least * (most / least) ** self.random())

    def text_size(self) -> int:
        """Return the size of a large text, 0.1 to 4 MB, small ones more often."""
        return self.size(100_000, 4_000_000)

    def maybe(self, share: float = 0.5) -> bool:
        """Return true in a share of the cases."""
        return bool(self.random() < share)

    def lines(self, least: int, most: int, line: Callable[[int], str]) -> str:
        """Return numbered lines, as many as `size` says."""
        return "\n".join(map(line, range(self.size(least, most)))) + "\n"

    def changed(self, content: bytes | bytearray, most: int) -> bytearray:
        """Return a content with up to that many bytes changed."""
        found = bytearray(content)
        for _ in range(self.count(1, most)):
            found[self.count(0, len(found))] = self.count(0, 256)
        return found


def random_of(name: str, number: int) -> Random:
    """Return the generator of an input, by the name of its kind and its number."""
    return Random(np.random.PCG64([zlib.crc32(name.encode()), number]))
