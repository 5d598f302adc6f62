"""Byte-pair encoding as GPT-2 does it, from its two vocabulary files (Radford et al. 2019, section 2.2).

A text is cut into words, a space in front belonging to its word; the bytes of a word are joined pair by pair, always
the pair that stands first in merges.txt, until no pair of it is left. Both files write a byte as one printable
character. No tokenizer library is among the packages that a login node has, and the algorithm is forty lines.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import DataError

VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
# Unicode's White_Space; Python's own \s has four separators more.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_MOST_WORDS_KEPT = 1_000_000


class BytePairEncoder:
    """Maps text to GPT-2's token numbers.

    Args:
        numbers: the number of each token, written in byte characters.
        merges: the pairs that may be joined, in order of precedence.
    """

    def __init__(self, numbers: dict[str, int], merges: Iterable[tuple[str, str]]) -> None:
        self._numbers = numbers
        self._precedence = {pair: index for index, pair in enumerate(merges)}
        self._encode_word = lru_cache(_MOST_WORDS_KEPT)(self._encode_new_word)

    @property
    def num_tokens(self) -> int:
        """One more than the largest token number."""
        return max(self._numbers.values()) + 1

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the token numbers of a text: uint32, (num_tokens,).

        Raises:
            KeyError: the vocabulary lacks a token that merging leads to.
        """
        tokens = array("I")
        for match in word_pattern().finditer(text):
            tokens.extend(self._encode_word(match[0]))
        return np.array(tokens, dtype=np.uint32)

    def _encode_new_word(self, word: str) -> tuple[int, ...]:
        characters = byte_characters()
        parts = [characters[byte] for byte in word.encode("utf-8", errors="surrogatepass")]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._precedence.get(pair, sys.maxsize))
            if best not in self._precedence:
                break
            parts = _joined(parts, best)
        return tuple(self._numbers[part] for part in parts)


def load_encoder(folder: Path) -> BytePairEncoder:
    """Read vocab.json and merges.txt of a folder.

    Raises:
        DataError: a file is missing or cannot be read as what it should be.
    """
    remedy = f"name the folder of GPT-2's {VOCABULARY_FILE} and {MERGES_FILE} with --vocabulary"
    path = folder / VOCABULARY_FILE
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        path = folder / MERGES_FILE
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"no file at {path}: {remedy}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}): {remedy}") from error
    if not isinstance(numbers, dict) or not all(type(number) is int and number >= 0 for number in numbers.values()):
        raise DataError(f"{folder / VOCABULARY_FILE} does not map tokens to numbers: {remedy}")
    missing = [character for character in byte_characters() if character not in numbers]
    if missing:
        raise DataError(f"{folder / VOCABULARY_FILE} lacks {len(missing)} of the 256 byte tokens: {remedy}")
    # The first line is a comment with the version.
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    if any(len(pair) != 2 or "".join(pair) not in numbers for pair in pairs):
        raise DataError(f"{path} has lines that join no two tokens into one of {VOCABULARY_FILE}: {remedy}")
    return BytePairEncoder(numbers, [(pair[0], pair[1]) for pair in pairs])


@cache
def byte_characters() -> tuple[str, ...]:
    """Return the printable character that stands for each byte.

    Printable characters of Latin-1 stand for themselves, the other bytes in order for the characters from 256 on.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in own else next(others)) for byte in range(256))


@cache
def word_pattern() -> re.Pattern[str]:
    r"""Return GPT-2's pattern of words, in which `re` lacks the classes \p{L} and \p{N}."""
    letters, numbers = _character_class("L"), _character_class("N")
    return re.compile(
        rf"'(?:s|t|re|ve|m|ll|d)| ?[{letters}]+| ?[{numbers}]+| ?[^{_SPACE}{letters}{numbers}]+"
        rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )


def _character_class(category: str) -> str:
    """Return all characters of a general category of Unicode as the ranges of a class in `re`."""
    codes = (code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == category)
    ranges = []
    # In a run of neighbours, code and position grow alike.
    for _, run in groupby(enumerate(codes), key=lambda item: item[1] - item[0]):
        members = [code for _, code in run]
        ranges.append(f"{re.escape(chr(members[0]))}-{re.escape(chr(members[-1]))}")
    return "".join(ranges)


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Return the parts with every occurrence of a pair joined, from the left."""
    joined: list[str] = []
    position = 0
    while position < len(parts):
        if tuple(parts[position : position + 2]) == pair:
            joined.append(pair[0] + pair[1])
            position += 2
        else:
            joined.append(parts[position])
            position += 1
    return joined
