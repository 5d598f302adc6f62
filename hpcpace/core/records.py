"""Dataclasses that are quick to define: those of the standard library took half of the time in which a report starts.

The standard library compiles up to seven methods for each class, most of which are never called. Here a constructor is
compiled when it is first called, and all classes share their other methods. Options, fields, `replace` and `asdict` are
those of the standard library, whose own decorator remains for `order`, `slots`, and signatures that documents show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any


def _dataclass(
    cls: type | None = None,
    /,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
) -> Any:
    """Add the methods of a dataclass to a class, as `dataclasses.dataclass` does."""

    def made(cls: type) -> type:
        cls.__doc__ = cls.__doc__ or cls.__name__  # else its signature is written there, which takes long
        methods: dict[str, object] = {"__init__": _constructor(cls, is_frozen=frozen)} if init else {}
        methods |= {"__repr__": _repr} if repr else {}
        methods |= {"__eq__": _eq} if eq else {}
        methods |= {"__setattr__": _set_attribute, "__delattr__": _delete_attribute} if frozen else {}
        own = vars(cls)
        if eq and own.get("__hash__") is None:
            type.__setattr__(cls, "__hash__", _hash if frozen else None)
        for name in methods.keys() - own.keys():
            setattr(cls, name, methods[name])
        return dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)

    return made if cls is None else made(cls)


def _constructor(cls: type, *, is_frozen: bool) -> Callable[..., None]:
    def __init__(self: Any, *args: object, **values: object) -> None:
        compiled = _compiled_constructor(cls, is_frozen=is_frozen)
        type.__setattr__(cls, "__init__", compiled)
        compiled(self, *args, **values)

    return __init__


def _compiled_constructor(cls: Any, *, is_frozen: bool) -> Callable[..., None]:
    """Return a function that takes the fields of a class and assigns them."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    lines = []
    for field in dataclasses.fields(cls):
        name = value = field.name
        default = ""
        if field.default is not dataclasses.MISSING:
            known[f"_default_{name}"], default = field.default, f"=_default_{name}"
        elif field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"], default = field.default_factory, "=_missing"
            value = f"_make_{name}() if {name} is _missing else {name}" if field.init else f"_make_{name}()"
        if field.init:
            parameters[bool(field.kw_only)].append(name + default)
        if field.init or default == "=_missing":
            lines.append(f"_set(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    by_name = ["*", *parameters[True]] if parameters[True] else []
    head = ", ".join([*parameters[False], *by_name])
    exec(f"def __init__({head}):\n " + "\n ".join(lines or ["pass"]), known)
    known["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    compiled: Callable[..., None] = known["__init__"]
    return compiled


@cache
def _values(cls: Any, *, of_hash: bool) -> Callable[[object], tuple[object, ...]]:
    """Return what makes a tuple of the fields of an object that are compared, or that make its hash."""
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields if (f.hash if of_hash and f.hash is not None else f.compare)]
    return attrgetter(*names) if len(names) > 1 else lambda one: tuple(getattr(one, name) for name in names)


def _eq(self: Any, other: Any) -> object:
    if other.__class__ is not self.__class__:
        return NotImplemented
    values: Callable[[Any], tuple[object, ...]] = _values(self.__class__, of_hash=False)
    return values(self) == values(other)


def _hash(self: Any) -> int:
    values: Callable[[Any], tuple[object, ...]] = _values(self.__class__, of_hash=True)
    return hash(values(self))


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _set_attribute(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete_attribute(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


# Type checkers know what the one of the standard library does to a class.
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass
