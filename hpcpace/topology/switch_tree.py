"""Switches and the hosts below them, from a file of any known form, and the traces of a run at their switches.

The file counts: whoever names one wants it. What Slurm told the job when it ran counts where the file does not know all
of the job's hosts, since with half a network the blame would fall on those whose place is known.

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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from hpcpace.core.codec import parse_yaml
from hpcpace.core.errors import TopologyError
from hpcpace.core.files import read_file
from hpcpace.core.hostlist import HostLists, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, shown
from hpcpace.metrics.topology import SLURM_ADDRESS, Topology, topology_of
from hpcpace.trace.tables import RankTrace

MAX_NAMES = 1 << 18
"""Of hosts and switches in a file, as often as they are listed: 65,536 hosts at leaves, and leaves below others."""
MAX_LETTERS = 255
_MAX_NAMED = 4
# Networks have three levels of switches, with groups of a dragonfly or blocks of blocks five.
_MAX_LEVELS = 16
# A network of 65,536 hosts with 64 pods takes some 100,000 looks at a switch from below; a made one without end.
_MAX_LOOKS = 1 << 19
_MAX_NAMED_ON_LEVEL = 1024

_Parents = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch, or one block of hosts; `hosts` and `switches` are directly below it."""

    name: str
    hosts: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SwitchTree:
    """The places of hosts in a network.

    Attributes:
        name: of this one, in a file that has several; empty elsewhere.
        above: the switches above each host, from the top down to its leaf; several of one level as `s[1-2]`.
        problems: what is contradictory or missing, one sentence each.
    """

    name: str
    above: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...]


def switch_name(text: str) -> str:
    """Return the name of one switch, which may be any text of some letters.

    Raises:
        ValueError: it is empty or very long.
    """
    if not 0 < len(text) <= MAX_LETTERS:
        raise ValueError(f"{shown(text)} is no name of a switch: it must have 1 to {MAX_LETTERS} letters")
    return text


def switch_tree(switches: Sequence[Switch], *, name: str = "", problems: Iterable[str] = ()) -> SwitchTree:
    """Return the places of all hosts below some switches.

    A host at two switches has no place; above a switch that is above itself, nothing is known.

    Args:
        switches: in any order; parts of a switch that comes up again are joined.
        name: of this network.
        problems: what was wrong with the file that they come from.

    Raises:
        TopologyError: there are very many ways from leaves to the top.
    """
    known = _joined(switches)
    found = [*problems, *_repeated(switches), *_incomplete(known)]
    parents: dict[str, list[str]] = {}
    for switch in known.values():
        for below in switch.switches:
            parents.setdefault(below, []).append(switch.name)
    leaves: dict[str, list[str]] = {}
    for switch in known.values():
        for host in switch.hosts:
            leaves.setdefault(host, []).append(switch.name)
    twice = {host: at for host, at in leaves.items() if len(at) > 1}
    if twice:
        first = next(iter(twice))
        where = " and ".join(twice[first][:2])
        found.append(f"{_counted(twice, 'host')} at two switches ({first} at {where}): left out")
    loops = _in_loops(parents)
    if loops:
        verb = "are" if len(loops) > 1 else "is"
        found.append(f"loop: {_some(sorted(loops))} {verb} above themselves; that is left out")
    ways = _Ways({below: above for below, above in parents.items() if below not in loops})
    above = {host: ways.to(at[0]) for host, at in leaves.items() if host not in twice}
    if ways.is_cut:
        found.append(f"switches are more than {_MAX_LEVELS} levels deep: what is above is left out")
    return SwitchTree(name=name, above=above, problems=tuple(found))


def _joined(switches: Sequence[Switch]) -> dict[str, Switch]:
    hosts: dict[str, dict[str, None]] = {}
    below: dict[str, dict[str, None]] = {}
    for switch in switches:
        hosts.setdefault(switch.name, {}).update(dict.fromkeys(switch.hosts))
        below.setdefault(switch.name, {}).update(dict.fromkeys(switch.switches))
    return {name: Switch(name=name, hosts=tuple(hosts[name]), switches=tuple(below[name])) for name in hosts}


def _repeated(switches: Sequence[Switch]) -> list[str]:
    repeated = [name for name, count in Counter(switch.name for switch in switches).items() if count > 1]
    return [f"{_counted(repeated, 'switch')} defined more than once ({_first(repeated)})"] if repeated else []


def _incomplete(known: Mapping[str, Switch]) -> list[str]:
    """Return what is said of switches that have nothing below them, and of those that nobody defines."""
    empty = [switch.name for switch in known.values() if not switch.hosts and not switch.switches]
    unknown = dict.fromkeys(below for switch in known.values() for below in switch.switches if below not in known)
    found = []
    if empty:
        found.append(f"{_counted(empty, 'switch')} without hosts or switches ({_first(empty)})")
    if unknown:
        found.append(f"{_counted(unknown, 'switch')} below another one and not defined ({_first(unknown)})")
    return found


def _first(names: Iterable[str]) -> str:
    return short_list(islice(names, _MAX_NAMED))


def _counted(names: Iterable[str], noun: str) -> str:
    count = len(list(names))
    return f"{count} switches" if noun == "switch" and count != 1 else plural(count, noun)


def _in_loops(parents: _Parents) -> set[str]:
    """Return the switches that are above themselves, or between two that are.

    These are left when first those without any switch above them are taken away, again and again, and then those
    without any below.
    """
    children: dict[str, list[str]] = {}
    for below, above in parents.items():
        for name in above:
            children.setdefault(name, []).append(below)
    left = {*parents, *children}
    for toward, back in ((parents, children), (children, parents)):
        count = {name: sum(other in left for other in toward.get(name, ())) for name in left}
        free = [name for name in left if not count[name]]
        while free:
            name = free.pop()
            left.discard(name)
            for other in back.get(name, ()):
                if other in left:
                    count[other] -= 1
                    if not count[other]:
                        free.append(other)
    return left


class _Ways:
    """The ways from switches to the top of a network without loops; levels that leaves share are looked at once.

    Attributes:
        is_cut: whether one was longer than `_MAX_LEVELS`.
    """

    def __init__(self, parents: _Parents) -> None:
        self.is_cut = False
        self._parents = parents
        self._num_looks = 0
        self._numbers: dict[tuple[str, ...], int] = {(): 0}
        self._levels: list[tuple[str, ...]] = [()]
        self._names = [""]
        self._next: dict[int, int] = {}

    def to(self, leaf: str) -> tuple[str, ...]:
        """Return the switches above a leaf and itself, from the top down.

        Raises:
            TopologyError: there are too many ways.
        """
        path = [leaf]
        number = self._number(tuple(self._parents.get(leaf, ())))
        while number and len(path) < _MAX_LEVELS:
            path.append(self._names[number])
            number = self._above(number)
        self.is_cut = self.is_cut or bool(number)
        return tuple(reversed(path))

    def _above(self, number: int) -> int:
        """Return the number of the level above one; 0 at the top."""
        if number not in self._next:
            above = [self._parents.get(switch, ()) for switch in self._levels[number]]
            self._num_looks += len(above) + sum(map(len, above))
            if self._num_looks > _MAX_LOOKS:
                raise TopologyError("its switches have too many ways to the top to find all")
            self._next[number] = self._number(tuple(dict.fromkeys(name for names in above for name in names)))
        return self._next[number]

    def _number(self, level: tuple[str, ...]) -> int:
        number = self._numbers.setdefault(level, len(self._levels))
        if number == len(self._levels):
            self._levels.append(level)
            self._names.append(_level_name(level))
        return number


def _level_name(level: Sequence[str]) -> str:
    if len(level) == 1:
        return level[0]
    more = f" and {len(level) - _MAX_NAMED} more" if len(level) > _MAX_NAMED_ON_LEVEL else ""
    return short_list(level[:_MAX_NAMED] if more else level) + more


@dataclass(frozen=True, kw_only=True)
class PlacedTraces:
    """Traces with the places of their hosts.

    Attributes:
        traces: with `topology_addr` of the file, where that is used.
        source: where the places come from: the file, SLURM_TOPOLOGY_ADDR, or nowhere, as an empty text.
        problems: what contradicts or is missing, one sentence each.
    """

    traces: tuple[RankTrace, ...]
    source: str
    problems: tuple[str, ...]


def place_traces(traces: Sequence[RankTrace], trees: Sequence[SwitchTree] = (), *, file: str = "") -> PlacedTraces:
    """Return traces whose hosts are where a file says, as far as it knows all of them.

    Args:
        traces: of the ranks, with what Slurm told the job.
        trees: the networks of the file, the first of which counts if several know as many hosts; none without a file.
        file: its name, for sentences.
    """
    told = _topology(traces)
    source = SLURM_ADDRESS if told.num_leaves else ""
    if not trees:
        return PlacedTraces(traces=tuple(traces), source=source, problems=())
    found = [_names_in(tree, traces) for tree in trees]
    best = max(range(len(trees)), key=lambda index: (sum(name != "" for name in found[index]), -index))
    tree, names = trees[best], found[best]
    where = f"{file} (topology {tree.name})" if len(trees) > 1 else file
    problems = [f"{where}: {problem}" for problem in tree.problems]
    unknown = sorted({trace.header.host for trace, name in zip(traces, names, strict=True) if not name})
    if unknown:
        kept = "the switches that Slurm told the job are used" if source else "no switches are known"
        which = f"does not know {plural(len(unknown), 'host')}" if any(names) else "knows none of the hosts"
        problems.append(f"{where} {which} of the run ({_some(unknown)}): {kept}")
        return PlacedTraces(traces=tuple(traces), source=source, problems=tuple(problems))
    placed = tuple(_placed(trace, tree.above[name], name) for trace, name in zip(traces, names, strict=True))
    now = _topology(placed)
    if told.num_leaves and now.num_leaves:
        problems += _contradictions(told, now, where)
    if not now.num_leaves:
        problems.append(f"{where} does not give each host of the run one leaf switch: no switches are known")
    return PlacedTraces(traces=placed, source=where if now.num_leaves else "", problems=tuple(problems))


def _topology(traces: Sequence[RankTrace]) -> Topology:
    headers = [trace.header for trace in traces]
    return topology_of(
        ranks=[header.rank for header in headers],
        nodes=[header.node for header in headers],
        hosts=[header.host for header in headers],
        addresses=[header.topology_addr for header in headers],
    )


def _names_in(tree: SwitchTree, traces: Sequence[RankTrace]) -> list[str]:
    """Return the name by which a tree knows the host of each trace, empty where it does not."""
    found = []
    for trace in traces:
        host, slurm_name = trace.header.host, trace.header.topology_addr.rpartition(".")[2]
        candidates = (host, slurm_name, host.partition(".")[0])
        found.append(next((name for name in candidates if name and name in tree.above), ""))
    return found


def _placed(trace: RankTrace, above: Sequence[str], name: str) -> RankTrace:
    # Periods separate the parts of an address; a host with a domain is known by its whole name.
    switches = (switch.replace(".", "_") for switch in above)
    node = trace.header.host if "." in name else name
    return replace(trace, header=replace(trace.header, topology_addr=".".join((*switches, node))))


def _contradictions(told: Topology, now: Topology, where: str) -> list[str]:
    """Return a sentence on hosts that share a leaf in one of two networks and not in the other; names may differ."""
    before, after = told.node_leaf, now.node_leaf
    differing = [node for node in range(now.num_nodes) if ((before == before[node]) != (after == after[node])).any()]
    if not differing:
        return []
    # Of hosts that changed their neighbours, one that moved itself says more.
    moved = [node for node in differing if now.leaf_names[after[node]] != told.leaf_names[before[node]]] or differing
    node = moved[0]
    more = f" (and {plural(len(moved) - 1, 'other host')})" if len(moved) > 1 else ""
    there, here = told.leaf_names[before[node]], now.leaf_names[after[node]]
    return [
        f"{where} contradicts what Slurm told the job: {now.node_names[node]}{more} is at {here}, by Slurm at {there}; "
        "the file is used"
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return short_list(names[:_MAX_NAMED]) + more


# Files of 65,536 hosts have less than one, also where each host has a line.
_MAX_BYTES = 4 << 20
_MAX_PROBLEMS = 4
_MAX_NESTED_LEVELS = 8

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
        if not 2 <= len(words) <= _MAX_NESTED_LEVELS:
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
