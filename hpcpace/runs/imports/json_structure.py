"""The brackets and quotes of a JSON text: where its values end, found in time that is linear in the text.

Nothing is decoded. Of a text that is no JSON the answers mean nothing, and whoever decodes what they delimit finds out.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
