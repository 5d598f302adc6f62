"""Values of JSON, or of a pickle, that another tool wrote: each has a type and a size before it is used.

Memory and time follow from that: a text that a file has once may be in a thousand places of a pickle, a number may have
a million digits, and a list may have lists without end where numbers should be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcpace.core.pickles import MAX_VALUES
from hpcpace.core.text import shown

MAX_LETTERS = 200
"""Of a name: of a group, an operation, a host. Hashes, and lists of dimensions, take some 60."""
MAX_NUMBER = (1 << 62) - 1
"""Sums and differences of two still fit into 64 bits."""

Table = Mapping[str, Any]


def json_value(data: bytes) -> Any:
    """Return what a text of JSON says.

    Raises:
        ValueError: it is none, is cut off, or has so many values that they would fill the memory.
    """
    if (num_values := sum(data.count(sign) for sign in (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has {num_values} values, more than {MAX_VALUES}")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is no JSON: not in UTF-8") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) - 1 or "Unterminated" in error.msg:
            raise ValueError("it is cut off") from None
        raise ValueError(f"it is no JSON: {error.msg} in line {error.lineno}") from None
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"it is no JSON: {error}") from None


def table_of(value: Any, name: str) -> Table:
    """Return a value that is a table.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, not a table")
    return value


def list_of(value: Any, name: str, *, max_length: int = MAX_VALUES) -> list[Any]:
    """Return a value that is a list.

    Raises:
        ValueError: it is something else, or longer.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a list")
    if len(value) > max_length:
        raise ValueError(f"{name} has {len(value)} entries, more than {max_length}")
    return value


def text_of(table: Table, key: str, default: str | None = None, *, max_letters: int = MAX_LETTERS) -> str:
    """Return a text of a table.

    Raises:
        ValueError: there is none and no default, it is something else, or longer.
    """
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {shown(value)}, not a text" if key in table else f"it has no {key}")
    if len(value) > max_letters:
        raise ValueError(f"{key} has {len(value)} letters, more than {max_letters}: {shown(value)}")
    return value


def number_of(table: Table, key: str, default: int | None = None, *, lowest: int = 0, highest: int = MAX_NUMBER) -> int:
    """Return a whole number of a table.

    Raises:
        ValueError: there is none and no default, it is something else, or out of range.
    """
    value = table.get(key, default)
    if not is_whole(value, lowest=lowest, highest=highest):
        wanted = f"a number from {lowest} to {highest}"
        raise ValueError(f"{key} is {shown(value)}, not {wanted}" if key in table else f"it has no {key}")
    return int(value)


def is_whole(value: Any, *, lowest: int = 0, highest: int = MAX_NUMBER) -> bool:
    """Return whether a value is a whole number within bounds; true and false are none."""
    return type(value) is int and lowest <= value <= highest
