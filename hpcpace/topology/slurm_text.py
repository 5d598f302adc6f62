"""topology.conf and what `scontrol show topology` prints: lines of `Key=Value`, for trees and for blocks.

Formats: topology.conf(5) and scontrol(1) of Slurm. Above its leaves, scontrol lists the nodes of all switches below, so
the nodes of a switch that has switches are not its own.
"""

from __future__ import annotations

import re

from hpcpace.core.errors import TopologyError
from hpcpace.core.hostlist import HostLists
from hpcpace.core.text import shown
from hpcpace.topology.switch_tree import MAX_NAMES, Switch, SwitchTree, switch_tree

_PAIR = re.compile(r"(?<!\w)(\w+)=(\"[^\"]*\"|\S*)")
_NAMES = ("switchname", "blockname", "aggregatedblock")
_BELOW = "switches"
_NO_NAMES = ("", "(null)", "none", "n/a")
_OTHER_LINES = ("blocksizes", "topologyplugin", "topology", "include")


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
    if value.lower() in _NO_NAMES:
        return ()
    try:
        return lists.expand(value)
    except ValueError as error:
        raise TopologyError(f"line {number}, {what}: {error}") from None
