"""Settings as a source gives them, turned into the types of `hpcpace.config`; errors name the source.

TOML files give numbers and lists, environment variables texts, and a rule of a site's roll-out what TOML gives.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.config import Config
from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.files import read_file
from hpcpace.core.text import shown
from hpcpace.core.thresholds import threshold_fields

Values = dict[str, dict[str, Any]]
"""Values by section and key."""

_MAX_BYTES = 1 << 20
# tomllib compares each part of a dotted key with all before it; `trace.enabled` has two.
_MAX_DOTS = 8192
# Of a text, as Linux has it for paths; and of a number, as computers have it.
_MAX_LETTERS, _MAX_BITS = 4096, 64
_MAX_REASON, _MAX_NAMED = 160, 4
_KINDS = {int: "a whole number", float: "a number", str: "a string", Path: "a path"}
_WORDS = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


def sections() -> dict[str, type]:
    """Return the dataclass of each section by its name."""
    return {f.name: typing.cast(type, f.default_factory) for f in dataclasses.fields(Config)}


def variables() -> Iterator[tuple[str, str, str]]:
    """Yield section, key and environment variable of each setting."""
    for section, kind in sections().items():
        for f in dataclasses.fields(kind):
            yield section, f.name, f"HPCPACE_{section}_{f.name}".upper()


def setting_variables() -> frozenset[str]:
    """Return the names of the environment variables that are settings."""
    return frozenset(variable for _, _, variable in variables())


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        # The file may be a link, as its folder may: the user or the site has chosen it.
        content = read_file(Path(os.path.realpath(path)), most_bytes=_MAX_BYTES).decode("utf-8")
        if content.count(".") > _MAX_DOTS:
            raise ConfigError(f"{path} has more than {_MAX_DOTS} dots, too many for settings")
        return tomllib.loads(content)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits, and what is nested deep
        raise ConfigError(f"{path} is not valid TOML: {str(error)[:_MAX_REASON]}") from error


def typed(values: Mapping[str, Any], source: str) -> Values:
    """Return the values of a source in the types of their settings.

    Raises:
        ConfigError: a section or key is unknown, or a value has the wrong type.
    """
    found: Values = {}
    known = sections()
    check_all(
        [
            *(
                partial(_type_section, found, section, values[section], source)
                for section in values
                if section in known
            ),
            partial(_check_known, values, known, f"{source}: unknown section", "", "the sections"),
        ]
    )
    return found


def _check_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str, where: str, all_of_them: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        names = ", ".join(map(shown, unknown[:_MAX_NAMED]))
        plural = "s" if len(unknown) > 1 else ""
        raise ConfigError(f"{what}{plural} {names}{more}{where}: {all_of_them} are {', '.join(known)}")


def _type_section(found: Values, section: str, table: Any, source: str) -> None:
    found[section] = {}
    if section == "thresholds":
        _type_thresholds(found[section], table, source)
    else:
        _type_table(found[section], section, table, typing.get_type_hints(sections()[section]), source)


def _type_table(found: dict[str, Any], name: str, table: Any, kinds: Mapping[str, Any], source: str) -> None:
    """Add the values of one table in the types of `kinds` to those that were found."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: {name} must be a table like [{name}]")

    def convert(key: str) -> None:
        found[key] = _coerce(table[key], kinds[key], f"{source}: {name}.{key}")

    check_all(
        [
            *(partial(convert, key) for key in table if key in kinds),
            partial(_check_known, table, kinds, f"{source}: unknown key", f" in [{name}]", "the keys"),
        ]
    )


def _type_thresholds(found: dict[str, Any], table: Any, source: str) -> None:
    """Add the values of all tables like [thresholds.links], by `topic.name`."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: thresholds must be tables like [thresholds.links]")
    known = threshold_fields()

    def convert(topic: str) -> None:
        values: dict[str, Any] = {}
        kinds = {name: type(field.default) for name, field in known[topic].items()}
        _type_table(values, f"thresholds.{topic}", table[topic], kinds, source)
        found.update({f"{topic}.{name}": value for name, value in values.items()})

    check_all(
        [
            *(partial(convert, topic) for topic in table if topic in known),
            partial(_check_known, table, known, f"{source}: unknown topic", " in [thresholds]", "the topics"),
        ]
    )


def switch(value: Any, where: str) -> bool:
    """Return a setting that is on or off.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str) or value in (0, 1) else ""
    if word in _WORDS:
        return _WORDS[word]
    raise ConfigError(f"{where} is {shown(value)}: expected on or off")


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        texts = value.split() if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where} is {shown(value)}: expected a list of strings")
        return tuple(_text(text, where) for text in texts)
    if kind is bool:
        return switch(value, where)
    if isinstance(value, bool):
        raise ConfigError(f"{where} is {value}: expected {_KINDS.get(kind, kind.__name__)}")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ConfigError(
            f"{where} is {shown(value)}: expected {_KINDS.get(kind, kind.__name__)}, and no such large one"
        )
    if isinstance(value, str):
        _text(value, where)
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} is {shown(value)}: expected {_KINDS.get(kind, kind.__name__)}") from error
    if kind is int and isinstance(value, float) and converted != value:
        raise ConfigError(f"{where} is {shown(value)}: expected a whole number")
    return converted


def _text(value: str, where: str) -> str:
    if len(value) > _MAX_LETTERS or "\0" in value:
        raise ConfigError(f"{where} is {shown(value)}: expected at most {_MAX_LETTERS} letters, none of them a null")
    return value
