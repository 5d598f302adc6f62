"""Dataclasses that are quick to define are those of the standard library in all that can be seen of them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import pytest

from hpcpace.core import records


def pair_of(decorate: Any, **options: Any) -> tuple[Any, Any]:
    """Return a class with fields of every kind, and one that inherits from it."""

    @decorate(**options)
    class Base:
        first: int
        second: list[int] = dataclasses.field(default_factory=list, repr=False)
        third: str = dataclasses.field(default="c", compare=False)
        fourth: dict[str, int] = dataclasses.field(default_factory=dict, hash=False, kw_only=True)
        fifth: int = dataclasses.field(default=5, init=False)
        sixth: list[int] = dataclasses.field(default_factory=lambda: [6], init=False, compare=False)
        common: ClassVar[int] = 7

    @decorate(**options)
    class Derived(Base):
        third: str = "d"
        seventh: int = 8

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError("below 0")

        def __repr__(self) -> str:
            return f"Derived {self.seventh}"

    return Base, Derived


OPTIONS = ({}, {"frozen": True}, {"kw_only": True}, {"frozen": True, "kw_only": True, "eq": False}, {"repr": False})


def outcome(work: Any) -> Any:
    """Return what work returns, or the type of what it raises."""
    try:
        return work()
    except Exception as error:
        return type(error)


def seen_of(kind: Any) -> list[Any]:
    """Return what can be seen of a class and its objects."""
    one, same, other = kind(first=1), kind(first=1, third="x"), kind(first=2, second=[1], fourth={"a": 1})
    calls = (
        lambda: hash(one) == hash(copy.deepcopy(one)) and kind.__hash__ is not None,
        kind,
        lambda: vars(kind(1)),
        lambda: vars(kind(1, [2], "e")),
        lambda: vars(kind(first=1, none=1)),
        lambda: vars(kind(first=-1)),
        lambda: delattr(other, "first"),
        lambda: setattr(one, "first", 9),
    )
    return [
        *(vars(one), vars(dataclasses.replace(other, first=3)), dataclasses.asdict(other), one.common),
        *(one == same, one == other, one != same, one == 1, kind.__match_args__, one.sixth is same.sixth),
        repr(one).rpartition("<locals>.")[2].partition(" object at ")[0],
        [(field.name, field.kw_only, field.init) for field in dataclasses.fields(kind)],
        *map(outcome, calls),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_are_as_those_of_the_standard_library(options):
    for own, usual in zip(
        pair_of(records.dataclass, **options), pair_of(dataclasses.dataclass, **options), strict=True
    ):
        assert seen_of(own) == seen_of(usual)


@records.dataclass(frozen=True)
class Kept:
    value: int


def test_objects_can_be_pickled_and_are_keys():
    assert pickle.loads(pickle.dumps(Kept(1))) == Kept(1)
    assert {Kept(1): 2}[Kept(value=1)] == 2
    assert hash(Kept(1)) == hash((1,))
