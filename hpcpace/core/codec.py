"""The JSON files of a run, which may be missing, damaged, foreign, or made to do harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpcpace.core.files import Folder
from hpcpace.core.text import printable

MOST_BYTES = 1 << 24
"""Of run.json and trial.json: some hundred bytes for each rank, of 16,384. JSON takes 20 times that in memory."""
MIN_VALUE_BYTES = 32
"""Of the text of a value, in the mean: the smallest ones take 60 times their text in memory."""
_MOST_REASON = 100
FOREIGN_ERRORS = (ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError, IndexError)
"""What code raises that takes values of any kind for what they should be."""

_Found = TypeVar("_Found")


class HasFolder(Protocol):
    """What has files in a folder, such as a run or an attempt."""

    @property
    def path(self) -> Path:
        """What messages call the folder."""

    def open(self) -> Folder:
        """Open the folder.

        Raises:
            OSError: it cannot be read, or does not exist.
        """


def json_object(content: Any) -> dict[str, Any]:
    """Return values of JSON that are an object.

    Raises:
        TypeError: they are something else.
    """
    if not isinstance(content, dict):
        raise TypeError("it is no object of JSON")
    return content


def check_values(content: bytes, most_values: int) -> None:
    """Refuse JSON of so many values that they would take many times its bytes in memory.

    Raises:
        ValueError: it has more.
    """
    num_values = sum(content.count(sign) for sign in (b",", b"[", b"{"))
    if num_values > most_values:
        raise ValueError(f"it has {num_values} values, more than {most_values}")


def read_json(
    place: HasFolder,
    name: str,
    made_of: Callable[[Any], _Found],
    problems: list[str],
    *,
    most_bytes: int = MOST_BYTES,
) -> _Found | None:
    """Return what a JSON file of a run says; None if it is missing or cannot be used.

    Args:
        place: what has the file in its folder.
        name: of the file.
        made_of: makes what is returned of the file's content.
        problems: takes the sentence on why a file cannot be used.
        most_bytes: more are not read.
    """
    try:
        with place.open() as folder:
            content = folder.read(name, most_bytes=most_bytes)
        check_values(content, most_bytes // MIN_VALUE_BYTES)
        return made_of(json.loads(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except FOREIGN_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    problems.append(f"{place.path / name} is left out ({printable(reason[:_MOST_REASON])[:_MOST_REASON]})")
    return None
