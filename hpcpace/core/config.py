"""How settings are declared: a frozen dataclass for each section, whose fields have bounds, choices and a description.

Each feature declares its own sections, which check themselves and report all mistakes together. `hpcpace.core.settings`
merges them from their sources; the resolved settings are written into run.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.text import parse_size, shown

MAX = 1_000_000_000
"""The largest number that a setting or an option takes that has no other bound."""

Bounds = tuple[float, float]
"""The smallest and the largest value of a setting; options that set it have the same."""

_Value = TypeVar("_Value")


def number(default: _Value, least: float, most: float = MAX) -> _Value:
    """Declare a number with bounds as a field of a `Section`; None means that it is not set."""
    declared: _Value = field(default=default, metadata={"bounds": (least, most)})
    return declared


def choice(default: str, choices: tuple[str, ...]) -> str:
    """Declare one of some words as a field of a `Section`."""
    declared: str = field(default=default, metadata={"choices": choices})
    return declared


class Section:
    """Base of the frozen dataclasses of a configuration's sections.

        @dataclass(frozen=True, kw_only=True)
        class ClockConfig(Section, section="clock"):
            interval_s: float = number(30.0, 0.1)

    Raises:
        ConfigError: values are wrong; the message has all of them.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass
    section: ClassVar[str]

    def __init_subclass__(cls, *, section: str) -> None:
        """Name the table of the configuration that sets these fields."""
        cls.section = section

    def __post_init__(self) -> None:
        check_all(self.checks())

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield what refuses one wrong value each: first choices, then numbers."""
        fields = dataclasses.fields(self)
        yield from (partial(self._check_choice, item) for item in fields if "choices" in item.metadata)
        yield from (partial(self._check_number, item) for item in fields if "bounds" in item.metadata)

    def bounds_of(self, item: dataclasses.Field[Any]) -> Bounds:
        """Return the smallest and the largest value of a number."""
        bounds: Bounds = item.metadata["bounds"]
        return bounds

    def wrong(self, name: str, wanted: str) -> ConfigError:
        """Return the error for a value, with what it must be."""
        return ConfigError(f"{self.section}.{name} is {getattr(self, name)!r}: it must be {wanted}")

    def _check_choice(self, item: dataclasses.Field[Any]) -> None:
        value, choices = getattr(self, item.name), item.metadata["choices"]
        if value not in choices:
            raise ConfigError(f"{self.section}.{item.name} is {shown(value)}: choose one of {', '.join(choices)}")

    def _check_number(self, item: dataclasses.Field[Any]) -> None:
        value, (least, most) = getattr(self, item.name), self.bounds_of(item)
        if value is None or least <= value <= most:
            return
        if most < MAX:
            raise self.wrong(item.name, f"from {_bound(least)} to {_bound(most)}")
        if value > most and value != math.inf:
            raise self.wrong(item.name, f"at most {most}")
        raise self.wrong(item.name, f"a number of at least {least:g}")


def _bound(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_size(section: str, name: str, text: str) -> None:
    """Refuse a setting that is no size like 64kB.

    Raises:
        ConfigError: it is something else.
    """
    try:
        parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{section}.{name}: {error}") from error


NO_POLICY = "none"
"""The value of `policy` in `[pace]` in a job that is not paced."""

DECLARED_BY = {
    "trace": "hpcpace.observe.settings:TraceConfig",
    "hang": "hpcpace.observe.settings:HangConfig",
    "clock": "hpcpace.observe.settings:ClockConfig",
    "metrics": "hpcpace.observe.settings:MetricsConfig",
    "world": "hpcpace.world.settings:WorldConfig",
    "probe": "hpcpace.observe.settings:ProbeConfig",
    "train": "hpcpace.train.settings:TrainConfig",
    "pace": "hpcpace.pace.settings:PaceSettings",
    "lab": "hpcpace.lab.settings:LabConfig",
    "report": "hpcpace.diagnosis.settings:ReportConfig",
    "diagnosis": "hpcpace.diagnosis.settings:DiagnosisConfig",
    "thresholds": "hpcpace.core.thresholds:ThresholdValues",
    "audit": "hpcpace.audit.settings:AuditConfig",
}
"""The dataclass of each section, by the name of its table in the TOML file.

They are loaded by name when a setting of theirs is needed, because the foundations import no feature."""

_NOT_OF_JOBS = ("lab", "report", "diagnosis", "thresholds", "audit")


def section_class(section: str) -> Any:
    """Return the dataclass of a section."""
    module, _, name = DECLARED_BY[section].partition(":")
    return getattr(importlib.import_module(module), name)


class Config:
    """All settings: `config.of(TraceConfig).flush_interval_s`; sections that nobody set have their defaults."""

    def __init__(self, *sections: object) -> None:
        self._sections: dict[type, Any] = {type(one): one for one in sections}

    def of(self, kind: type[_Value]) -> _Value:
        """Return the settings of a section, by its dataclass."""
        if kind not in self._sections:
            self._sections[kind] = kind()
        found: _Value = self._sections[kind]
        return found

    def __getitem__(self, name: str) -> Any:
        """Return one setting, such as `trace.enabled`, for a feature that does not import the one that declares it."""
        section, _, key = name.partition(".")
        return getattr(self.of(section_class(section)), key)

    def updated(self, **sections: Mapping[str, Any]) -> Config:
        """Return the same with other values of some settings, by section and key.

        Raises:
            ConfigError: a value is wrong.
        """
        changed = (replace(self.of(section_class(section)), **values) for section, values in sections.items())
        return Config(*self._sections.values(), *changed)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the settings for run.json as plain values; those of lab, reports and audits are left out."""
        return {
            section: {
                key: str(value) if isinstance(value, Path) else value
                for key, value in vars(self.of(section_class(section))).items()
            }
            for section in DECLARED_BY
            if section not in _NOT_OF_JOBS
        }
