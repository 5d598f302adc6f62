"""Cases of an experiment in a TOML file beside its module, and their rows as dataclasses."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")


def read_toml(module: str, name: str = "") -> dict[str, Any]:
    """Return what a TOML file beside a module has.

    Args:
        module: the module's `__file__`.
        name: of the file, without its ending; that of the module if empty.
    """
    path = Path(module).with_suffix(".toml")
    return tomllib.loads((path.with_stem(name) if name else path).read_text(encoding="utf-8"))


def cases_of(kind: type[Case], rows: Iterable[Mapping[str, Any]]) -> tuple[Case, ...]:
    """Return rows as instances of a dataclass, whose fields have tuples where TOML has lists."""
    return tuple(kind(**{name: as_tuples(value) for name, value in row.items()}) for row in rows)


def as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, at any depth."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
