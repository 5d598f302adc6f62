"""Names of hosts and switches in a file: lists like `n[1-4]`, up to a number of names in all of the file."""

from __future__ import annotations

from hpcpace.hostlist import MAX_HOSTS, expand
from hpcpace.quoting import shown

MAX_NAMES = 4 * MAX_HOSTS
"""Of hosts and switches in a file, each as often as it is listed: each host at one leaf, each switch below some others.

A line of twenty letters can list 65,536 hosts, so that the size of a file says little about what is in it.
"""
MAX_LETTERS = 255


class Names:
    """Expands the lists of a file; one for each file."""

    def __init__(self) -> None:
        self._num_left = MAX_NAMES

    def listed(self, text: str) -> tuple[str, ...]:
        """Return the names of a list.

        Raises:
            ValueError: it is no list, or it has more names than a file may have.
        """
        found = expand(text)
        self._num_left -= len(found)
        if self._num_left < 0:
            raise ValueError(f"the file lists more than {MAX_NAMES} hosts and switches up to {shown(text)}")
        return tuple(found)


def switch_name(text: str) -> str:
    """Return the name of one switch, which may be any text of some letters.

    Raises:
        ValueError: it is empty or very long.
    """
    if not 0 < len(text) <= MAX_LETTERS:
        raise ValueError(f"{shown(text)} is no name of a switch: it must have 1 to {MAX_LETTERS} letters")
    return text
