"""Thresholds: the numbers that decide whether a report says something, with unit, default and reason of each.

A module that decides declares them once, as a frozen dataclass; users set them in [thresholds.TOPIC] of a
configuration, `hpcpace config` shows them, summary.json keeps them, and docs/settings.md lists them.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass

DECLARED_BY = ("hpcpace.diagnosis.analyze", "hpcpace.metrics.run_difference", "hpcpace.placement.assign")
"""The modules that import all that a report, a history and a placement compute, and so all that declares thresholds.

They are loaded by name when somebody sets or lists thresholds, because the foundations import no feature."""

UNITS = {
    "share": 1.0,
    "probability": 1.0,
    "correlation": 1.0,
    "times": math.inf,
    "standard errors": math.inf,
    "steps": math.inf,
    "events": math.inf,
    "ranks": math.inf,
    "runs": math.inf,
    "nodes": math.inf,
    "samples": math.inf,
    "operations": math.inf,
    "connections": math.inf,
    "bytes": math.inf,
    "errors": math.inf,
    "°C": math.inf,
    "ns": math.inf,
    "s": math.inf,
}
"""The units of thresholds, each with the largest value that makes sense. `times` is a factor."""

_Number = TypeVar("_Number", int, float)
_Kind = TypeVar("_Kind", bound="Thresholds")


def number(default: _Number, unit: str, *, at_least: float = 0) -> _Number:
    """Declare one threshold as a field of a `Thresholds`; a sentence below says what it decides, and why this value.

    Args:
        default: its value unless a user sets another; an integer takes whole numbers only.
        unit: one of `UNITS`.
        at_least: the smallest value with which figures can be computed.
    """
    metadata = {"unit": unit, "at_least": at_least, "at_most": UNITS[unit]}
    field: _Number = dataclasses.field(default=default, metadata=metadata)
    return field


class Thresholds:
    """Base of all frozen dataclasses of thresholds, each field made by `number`.

        @dataclass(frozen=True, kw_only=True)
        class LinkThresholds(Thresholds, topic="links"):
            least_groups: int = number(3, "events")
            '''With fewer, one slow group is taken for a slow link.'''

    Several classes may share a topic, which is a table of the configuration, if no name occurs twice in it.

    Raises:
        ConfigError: a value is too small, such as a negative one, not finite, or too large for its unit.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass
    topic: ClassVar[str]

    def __init_subclass__(cls, *, topic: str) -> None:
        """Name the table of the configuration that sets these numbers."""
        cls.topic = topic

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            at_least, at_most = (field.metadata[end] for end in ("at_least", "at_most"))
            if not at_least <= value <= at_most or not math.isfinite(value):
                bounds = f"at least {at_least:g}" if at_most == math.inf else f"from {at_least:g} to {at_most:g}"
                raise ConfigError(f"thresholds.{self.topic}.{field.name} is {value}: it must be a number {bounds}")


def declared() -> dict[str, list[type[Thresholds]]]:
    """Return all classes of thresholds by topic, in alphabetical order."""
    for name in DECLARED_BY:
        importlib.import_module(name)
    found: dict[str, list[type[Thresholds]]] = {}
    own = [kind for kind in Thresholds.__subclasses__() if kind.__module__.startswith("hpcpace.")]
    for kind in sorted(own, key=lambda kind: (kind.topic, kind.__module__, kind.__qualname__)):
        found.setdefault(kind.topic, []).append(kind)
    return found


def threshold_fields() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """Return the field of each threshold, by topic and name."""
    return {
        topic: {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
        for topic, kinds in declared().items()
    }


@dataclass(frozen=True, init=False)
class ThresholdValues:
    """The thresholds of a report: the section [thresholds] of the configuration.

    It holds only what was set; all others have their defaults, and are not loaded until somebody asks for them.
    """

    def __init__(self, **changed: float) -> None:
        """Take values by `topic.name`.

        Raises:
            ConfigError: a value is out of bounds.
        """
        object.__setattr__(self, "_changed", changed)
        for topic in {name.partition(".")[0] for name in changed}:
            for kind in declared()[topic]:
                self.of(kind)

    def of(self, kind: type[_Kind]) -> _Kind:
        """Return the thresholds of one class with what was set of them."""
        changed: Mapping[str, float] = vars(self)["_changed"]
        names = (field.name for field in dataclasses.fields(kind))
        return kind(**{name: changed[key] for name in names if (key := f"{kind.topic}.{name}") in changed})

    def table(self) -> dict[str, dict[str, float]]:
        """Return all thresholds by topic and name."""
        return {
            topic: {name: value for kind in kinds for name, value in dataclasses.asdict(self.of(kind)).items()}
            for topic, kinds in declared().items()
        }
