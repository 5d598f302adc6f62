"""The trace header as a mapping from names to values, as stored in HDF5 attributes and in the journal's JSON."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from hpcpace.core.errors import TraceError
from hpcpace.trace.schema import FORMAT, FORMAT_VERSION, TraceHeader

MOST_RANKS = 1 << 20
"""The most ranks of a run: sixty times the largest run ever reported, and few enough to list those missing."""

_VERSION = re.compile(r"([0-9]{1,6})\.[0-9]{1,6}")
# Largest place or coordinate; a time of day is int64.
_MOST_NUMBER = (1 << 31) - 1


class OtherVersion(TraceError):
    """The file has another major version of the trace format."""


def header_values(header: TraceHeader) -> dict[str, Any]:
    """Return every field of a header by name, `interfaces` as a list and bytes that are not UTF-8 as escapes."""
    values = {**asdict(header), "interfaces": list(header.interfaces)}
    return {name: _encodable(value) if isinstance(value, str) else value for name, value in values.items()}


def parse_header(values: Mapping[str, Any], place: str) -> TraceHeader:
    """Return the header of a file; names that this version does not know are ignored.

    Args:
        values: attributes by name, from HDF5 or JSON.
        place: the file, for error messages.

    Raises:
        OtherVersion: the file has another major version of the format.
        TraceError: not an hpcpace trace, or a value is missing or of the wrong type.
    """
    found = {name: _text(value) for name, value in values.items() if isinstance(value, (str, bytes))}
    if found.get("format") != FORMAT:
        raise TraceError(f"{place} is not an hpcpace trace: its format is {values.get('format')!r}, not {FORMAT!r}")
    _check_version(found.get("format_version", ""), place)
    known: dict[str, Any] = {}
    for name, convert, is_required in _FIELDS:
        if name not in values:
            if is_required:
                raise TraceError(f"{place}: attribute {name} is missing; the file is damaged, leave it out")
            continue
        try:
            known[name] = convert(values[name])
        except (TypeError, ValueError) as error:
            message = f"{place}: attribute {name} is {values[name]!r} ({error}); the file is damaged, leave it out"
            raise TraceError(message) from error
    header = TraceHeader(**known)
    if not 0 <= header.rank < header.world_size <= MOST_RANKS:
        raise TraceError(
            f"{place}: rank {header.rank} of {header.world_size} ranks is impossible; the file is damaged, leave it out"
        )
    for name, value in known.items():
        if isinstance(value, int) and name != "created_unix_ns" and abs(value) > _MOST_NUMBER:
            raise TraceError(
                f"{place}: attribute {name} is {value}, which is impossible; the file is damaged, leave it out"
            )
    return header


def _check_version(version: str, place: str) -> None:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise TraceError(f"{place}: format_version is {version!r}, not like {FORMAT_VERSION!r}; the file is damaged")
    if match.group(1) != FORMAT_VERSION.partition(".")[0]:
        raise OtherVersion(
            f"{place} has trace format {version}; this hpcpace reads {FORMAT_VERSION} and later minor versions: "
            "read it with the hpcpace that wrote it"
        )


def _encodable(text: str) -> str:
    # Python reads a path or environment variable with such bytes as surrogates, which HDF5 does not accept.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(entry) for entry in value)


_CONVERT: dict[str, Callable[[Any], Any]] = {"str": _text, "int": operator.index, "tuple[str, ...]": _texts}
# Name, conversion, and whether it must be there; as a table because thousands of headers are read.
_FIELDS = tuple((item.name, _CONVERT[str(item.type)], item.default is MISSING) for item in fields(TraceHeader))
