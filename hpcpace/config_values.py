"""Settings as a source gives them, turned into the types of `hpcpace.config`; errors name the source.

TOML files give numbers and lists, environment variables texts, and a rule of a site's roll-out what TOML gives.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.config import Config
from hpcpace.errors import ConfigError, check_all

Values = dict[str, dict[str, Any]]
"""Values by section and key."""

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
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def typed(values: Mapping[str, Any], source: str) -> Values:
    """Return the values of a source in the types of their settings.

    Raises:
        ConfigError: a section or key is unknown, or a value has the wrong type.
    """
    found: Values = {}
    check_all(partial(_type_section, found, section, table, source) for section, table in values.items())
    return found


def _type_section(found: Values, section: str, table: Any, source: str) -> None:
    known = sections()
    if section not in known:
        raise ConfigError(f"{source}: unknown section [{section}]: the sections are {', '.join(known)}")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: {section} must be a table like [{section}]")
    hints = typing.get_type_hints(known[section])
    found[section] = {}

    def convert(key: str, value: Any) -> None:
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {key!r} in [{section}]: the keys are {', '.join(hints)}")
        found[section][key] = _coerce(value, hints[key], f"{source}: {section}.{key}")

    check_all(partial(convert, key, value) for key, value in table.items())


def switch(value: Any, where: str) -> bool:
    """Return a setting that is on or off.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool):
        return value
    if str(value).lower() in _WORDS:
        return _WORDS[str(value).lower()]
    raise ConfigError(f"{where} is {value!r}: expected on or off")


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (str, list, tuple)):
            raise ConfigError(f"{where} is {value!r}: expected a list of strings")
        return tuple(value.split() if isinstance(value, str) else map(str, value))
    if kind is bool:
        return switch(value, where)
    if isinstance(value, bool):
        raise ConfigError(f"{where} is {value}: expected {_KINDS.get(kind, kind.__name__)}")
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} is {value!r}: expected {_KINDS.get(kind, kind.__name__)}") from error
    if kind is int and isinstance(value, float) and converted != value:
        raise ConfigError(f"{where} is {value!r}: expected a whole number")
    return converted
