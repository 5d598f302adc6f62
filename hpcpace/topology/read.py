"""Read a topology file of any known form, distinguished by its content.

- topology.conf(5) and `scontrol show topology`: lines of `Key=Value`, for trees and for blocks. Above its leaves,
  scontrol lists the nodes of all switches below, so the nodes of a switch that has switches are not its own.
- topology.yaml(5) of Slurm 25.05 and later: a list of topologies, each with `tree: switches:`, `block: blocks:` or
  `flat: true`. Its values are made from the events of the parser, and all of them are texts: PyYAML's own way is
  recursive, takes `010` for the number 8, and lets the second of two equal keys win.
- A file of the user's own: `host leaf spine` a line, where the host may be a list like `n[1-4]`.
"""

from __future__ import annotations

import os
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from hpcpace.core.errors import TopologyError
from hpcpace.core.files import read_file
from hpcpace.core.hostlist import HostLists
from hpcpace.core.plain_yaml import parse_yaml
from hpcpace.core.text import shown
from hpcpace.topology.switch_tree import MAX_LETTERS, MAX_NAMES, Switch, SwitchTree, switch_name, switch_tree

# Files of 65,536 hosts have less than one, also where each host has a line.
_MAX_BYTES = 4 << 20
_MAX_PROBLEMS = 4
_MAX_LEVELS = 8

_PAIR = re.compile(r"(?<!\w)(\w+)=(\"[^\"]*\"|\S*)")
_NAMES = ("switchname", "blockname", "aggregatedblock")
_BELOW = "switches"
_NO_NAMES = ("", "(null)", "none", "n/a")
_OTHER_LINES = ("blocksizes", "topologyplugin", "topology", "include")

_KINDS = {"tree": ("switches", "switch"), "block": ("blocks", "block")}
# Twice the names that a file may list, as values of lists or with a key each.
_MAX_VALUES = 1 << 19
_YES = ("true", "yes", "on")


def read_topology(path: Path) -> list[SwitchTree]:
    """Return the networks of a file: one, or of topology.yaml all, the cluster's default first.

    Args:
        path: topology.conf, topology.yaml, the saved output of `scontrol show topology`, or `host leaf spine` a line.

    Raises:
        TopologyError: it cannot be read, is none of these, or has no hosts.
    """
    try:
        content = read_file(Path(os.path.realpath(path)), most_bytes=_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise TopologyError(f"cannot read the topology {path}: {reason}") from None
    try:
        trees = _parsed(content, is_yaml=path.suffix in (".yaml", ".yml"))
    except TopologyError as error:
        raise TopologyError(f"topology {path}: {error}") from None
    if not any(tree.above for tree in trees):
        problems = "; ".join(islice((problem for tree in trees for problem in tree.problems), _MAX_PROBLEMS))
        raise TopologyError(f"topology {path} has no host at a switch{f' ({problems})' if problems else ''}")
    return trees


def _parsed(content: str, *, is_yaml: bool) -> list[SwitchTree]:
    if "\0" in content:
        raise TopologyError("it is no text")
    if is_slurm_text(content):
        return [parse_slurm_text(content)]
    if is_yaml or is_slurm_yaml(content):
        return parse_slurm_yaml(content)
    return [parse_host_table(content)]


def is_slurm_text(content: str) -> bool:
    """Return whether a text has a line of this form."""
    return re.search(r"^[^\S\n]*(?:SwitchName|BlockName)[^\S\n]*=", content, re.IGNORECASE | re.MULTILINE) is not None


def parse_slurm_text(content: str) -> SwitchTree:
    """Return the tree or the blocks of a text.

    Raises:
        TopologyError: a line is something else, or has a list of hosts that Slurm does not write.
    """
    switches: list[Switch] = []
    problems = []
    lists = HostLists(MAX_NAMES)
    for number, line in _lines(content):
        pairs = {key.lower(): value.strip('"') for key, value in _PAIR.findall(line)}
        name_key = next((key for key in _NAMES if key in pairs), "")
        if name_key:
            switches += _switches(number, pairs[name_key], pairs, lists)
        elif "include" in line.lower().split()[:1]:
            problems.append(f"line {number} includes another file, which is not read")
        elif not pairs or not any(key in pairs for key in _OTHER_LINES):
            raise TopologyError(f"line {number} is {shown(line)}: a line begins with SwitchName= or BlockName=")
    return switch_tree(switches, problems=problems)


def _lines(content: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, joined where one ends with a backslash, without comments."""
    found: list[tuple[int, str]] = []
    begun: list[str] = []
    for number, line in enumerate(content.splitlines(), 1):
        part = line.partition("#")[0].rstrip()
        if part.endswith("\\"):
            begun.append(part[:-1])
            continue
        text = " ".join([*begun, part]).strip()
        begun = []
        if text:
            found.append((number, text))
    return found


def _switches(number: int, name: str, pairs: dict[str, str], lists: HostLists) -> list[Switch]:
    below = _listed(number, _BELOW, pairs.get(_BELOW, ""), lists)
    hosts = () if below else _listed(number, "nodes", pairs.get("nodes", ""), lists)
    listed = _listed(number, "name", name, lists)
    if not listed:
        raise TopologyError(f"line {number} has a switch without a name")
    if len(listed) > 1 and (hosts or below):
        raise TopologyError(
            f"line {number} has {len(listed)} switches with the same hosts or switches: give each its own"
        )
    return [Switch(name=one, hosts=hosts, switches=below) for one in listed]


def _listed(number: int, what: str, value: str, lists: HostLists) -> tuple[str, ...]:
    return () if value.lower() in _NO_NAMES else _expanded([value], lists, f"line {number}, {what}")


def _expanded(texts: list[str], lists: HostLists, place: str) -> tuple[str, ...]:
    """Return the names in some lists of hosts; `place` says where they are in the file."""
    try:
        return tuple(name for text in texts for name in lists.expand(text))
    except ValueError as error:
        raise TopologyError(f"{place}: {error}") from None


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
    try:
        data = parse_yaml(content, max_values=_MAX_VALUES)
    except ImportError:
        raise TopologyError(
            "topology.yaml needs PyYAML: pip install 'hpcpace[topology]', or save what `scontrol show topology` prints"
        ) from None
    except ValueError as error:
        raise TopologyError(str(error)) from None
    lists = HostLists(MAX_NAMES)
    topologies = data if isinstance(data, list) else [data]
    found = []
    for place, topology in enumerate(topologies, 1):
        if not isinstance(topology, dict):
            raise TopologyError(f"topology {place} is {shown(topology)}: it must be a mapping with tree: or block:")
        is_default = str(topology.get("cluster_default")).lower() in _YES
        found.append((not is_default, _tree_of(place, topology, lists)))
    return [tree for _, tree in sorted(found, key=lambda pair: pair[0])]


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
    below = _values(entry, "children", where, lists)
    hosts = () if below else _values(entry, "nodes", where, lists)
    return Switch(name=name, hosts=hosts, switches=below)


def _values(entry: dict[str, Any], key: str, where: str, lists: HostLists) -> tuple[str, ...]:
    value = entry.get(key)
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise TopologyError(f"topology {where}, {key} is {shown(value)}: it must be a list like n[1-4]")
    return _expanded(texts, lists, f"topology {where}, {key}")


def parse_host_table(content: str) -> SwitchTree:
    """Return the places of the hosts of a table: host, leaf, and from there upwards as far as is known.

    Raises:
        TopologyError: a line has no leaf, or no list of hosts.
    """
    hosts: dict[str, dict[str, None]] = {}
    above: dict[str, dict[str, None]] = {}
    lists = HostLists(MAX_NAMES)
    for number, line in enumerate(content.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not 2 <= len(words) <= _MAX_LEVELS:
            raise TopologyError(
                f"line {number} is {shown(line.strip())}: give a host or a list like n[1-4], its leaf switch and, if "
                "known, the switches above, with blanks between"
            )
        try:
            listed = lists.expand(words[0])
            switches = [switch_name(word) for word in words[1:]]
        except ValueError as error:
            raise TopologyError(f"line {number}: {error}") from None
        hosts.setdefault(switches[0], {}).update(dict.fromkeys(listed))
        for below, switch in pairwise(switches):
            above.setdefault(switch, {})[below] = None
            hosts.setdefault(switch, {})
    return switch_tree(
        [Switch(name=name, hosts=tuple(listed), switches=tuple(above.get(name, ()))) for name, listed in hosts.items()]
    )
