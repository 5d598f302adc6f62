"""YAML as far as files of machines and networks need it, without what makes YAML dangerous: tags, aliases and depth."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hpcpace.core.text import shown

_MAX_DEPTH = 16
_MAX_REASON = 160
_NOTHING = ("", "~", "null")


def parse_yaml(content: str, *, max_values: int) -> Any:
    """Return the value of a text: None, texts, lists, and mappings with texts as keys.

    Args:
        content: of a file.
        max_values: more are refused.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: it is no YAML, or uses tags, aliases or depth that files of settings do not.
    """
    import yaml

    # libyaml compares each of these lines with all before.
    if re.search(r"^%TAG", content, re.MULTILINE):
        raise ValueError("it has YAML tags")
    try:
        # Without libyaml it takes ten times as long.
        return _built(yaml, yaml.parse(content, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)), max_values)
    except yaml.YAMLError as error:
        reason = " ".join(str(error)[: 4 * _MAX_REASON].split())[:_MAX_REASON]
        raise ValueError(f"it is no YAML: {reason}") from None


def _built(yaml: Any, events: Iterable[Any], max_values: int) -> Any:
    """Return the value that the events of a text make."""
    top: list[Any] = []
    inside: list[_Open] = []
    for number, event in enumerate(events):
        if number > max_values:
            raise ValueError(f"it has more than {max_values} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError("it has YAML aliases")
        if getattr(event, "tag", None) is not None:
            raise ValueError("it has YAML tags")
        if isinstance(event, yaml.CollectionEndEvent):
            inside.pop()
            continue
        if isinstance(event, yaml.ScalarEvent):
            value: Any = None if event.implicit[0] and event.value in _NOTHING else event.value
        elif isinstance(event, yaml.CollectionStartEvent):
            value = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        else:
            continue
        if inside:
            inside[-1].take(value)
        else:
            top.append(value)
        if isinstance(value, (list, dict)):
            inside.append(_Open(value))
            if len(inside) > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    if len(top) > 1:
        raise ValueError(f"it has {len(top)} documents: give each a file")
    return top[0] if top else None


class _Open:
    """A list or a mapping whose end has not come."""

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self._value = value
        self._key: str | None = None

    def take(self, value: Any) -> None:
        """Take what comes next in it: an entry, or by turns a key and its value."""
        if isinstance(self._value, list):
            self._value.append(value)
        elif self._key is not None:
            self._value[self._key], self._key = value, None
        elif not isinstance(value, str):
            raise ValueError(f"{shown(value)} is a key: a key must be a word")
        elif value in self._value:
            raise ValueError(f"it has the key {shown(value)} twice in one mapping")
        else:
            self._key = value
