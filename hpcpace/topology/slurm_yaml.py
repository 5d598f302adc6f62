"""topology.yaml of Slurm 25.05 and later, which may have several networks.

Format: topology.yaml(5): a list of topologies, each with `tree: switches:`, `block: blocks:` or `flat: true`.

Its values are made from the events of the parser, and all of them are texts: PyYAML's own way to make them is
recursive, takes `010` for the number 8, and lets the second of two equal keys win.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hpcpace.core.errors import TopologyError
from hpcpace.core.hostlist import HostLists
from hpcpace.core.text import shown
from hpcpace.topology.switch_tree import MAX_LETTERS, MAX_NAMES, Switch, SwitchTree, switch_name, switch_tree

_KINDS = {"tree": ("switches", "switch"), "block": ("blocks", "block")}
_MAX_DEPTH = 16
# Twice the names that a file may list, as values of lists or with a key each.
_MAX_VALUES = 1 << 19
_MAX_REASON = 160
_YES = ("true", "yes", "on")
_NOTHING = ("", "~", "null")


def is_slurm_yaml(content: str) -> bool:
    """Return whether a text begins as such a file does."""
    lines = (line.strip() for line in content.splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "---", "%"))), "")
    return first.startswith(("- ", "-\t", "{", "[")) or first == "-" or first.startswith("topology:")


def parse_slurm_yaml(content: str) -> list[SwitchTree]:
    """Return the networks of a file, the one that is the cluster's default first.

    Raises:
        TopologyError: PyYAML is not installed, or the text is something else.
    """
    data = _loaded(content)
    lists = HostLists(MAX_NAMES)
    topologies = data if isinstance(data, list) else [data]
    found = []
    for place, topology in enumerate(topologies, 1):
        if not isinstance(topology, dict):
            raise TopologyError(f"topology {place} is {shown(topology)}: it must be a mapping with tree: or block:")
        is_default = str(topology.get("cluster_default")).lower() in _YES
        found.append((not is_default, _tree_of(place, topology, lists)))
    return [tree for _, tree in sorted(found, key=lambda pair: pair[0])]


def _loaded(content: str) -> Any:
    """Return the value of a text: None, texts, lists, and mappings with texts as keys.

    Raises:
        TopologyError: it is no YAML, or uses of it what topology.yaml does not.
    """
    try:
        import yaml
    except ImportError:
        raise TopologyError(
            "topology.yaml needs PyYAML: pip install 'hpcpace[topology]', or save what `scontrol show topology` prints"
        ) from None
    # libyaml compares each of these lines with all before.
    if re.search(r"^%TAG", content, re.MULTILINE):
        raise TopologyError("it has YAML tags, which topology.yaml does not use")
    try:
        # Without libyaml it takes ten times as long.
        return _built(yaml, yaml.parse(content, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)))
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error)[: 4 * _MAX_REASON].split())[:_MAX_REASON]
        raise TopologyError(f"it is no YAML: {reason}") from None


def _built(yaml: Any, events: Iterable[Any]) -> Any:
    """Return the value that the events of a text make."""
    top: list[Any] = []
    inside: list[_Open] = []
    for number, event in enumerate(events):
        if number > _MAX_VALUES:
            raise TopologyError(f"it has more than {_MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise TopologyError("it has YAML aliases, which topology.yaml does not use")
        if getattr(event, "tag", None) is not None:
            raise TopologyError("it has YAML tags, which topology.yaml does not use")
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
                raise TopologyError(f"it is nested more than {_MAX_DEPTH} deep")
    if len(top) > 1:
        raise TopologyError(f"it has {len(top)} documents: give each a file")
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
            raise TopologyError(f"{shown(value)} is a key: a key must be a word")
        elif value in self._value:
            raise TopologyError(f"it has the key {shown(value)} twice in one mapping")
        else:
            self._key = value


def _tree_of(place: int, topology: dict[str, Any], lists: HostLists) -> SwitchTree:
    name = topology.get("topology") or ""
    if not isinstance(name, str) or len(name) > MAX_LETTERS:
        raise TopologyError(f"topology {place} is called {shown(name)}: its name must be a word")
    where = shown(name) if name else str(place)
    for kind, (units, unit) in _KINDS.items():
        if kind in topology:
            listed = topology[kind].get(units) if isinstance(topology[kind], dict) else None
            if not isinstance(listed, list):
                raise TopologyError(f"topology {where}: {kind} has no list {units}:")
            return switch_tree([_switch(one, unit, where, lists) for one in listed], name=name)
    return switch_tree([], name=name)


def _switch(entry: Any, unit: str, where: str, lists: HostLists) -> Switch:
    if not isinstance(entry, dict) or not isinstance(entry.get(unit), str):
        raise TopologyError(
            f"topology {where}: an entry is {shown(entry)}: it must have {unit}: and nodes: or children:"
        )
    try:
        name = switch_name(entry[unit])
    except ValueError as error:
        raise TopologyError(f"topology {where}: {error}") from None
    below = _listed(entry, "children", where, lists)
    hosts = () if below else _listed(entry, "nodes", where, lists)
    return Switch(name=name, hosts=hosts, switches=below)


def _listed(entry: dict[str, Any], key: str, where: str, lists: HostLists) -> tuple[str, ...]:
    value = entry.get(key)
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise TopologyError(f"topology {where}, {key} is {shown(value)}: it must be a list like n[1-4]")
    try:
        return tuple(name for text in texts for name in lists.expand(text))
    except ValueError as error:
        raise TopologyError(f"topology {where}, {key}: {error}") from None
