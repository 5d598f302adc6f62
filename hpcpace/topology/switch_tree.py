"""Switches and what is below them, whatever file they come from, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcpace.hostlist import short_list
from hpcpace.wording import plural

_MOST_NAMED = 4


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


def switch_tree(switches: Sequence[Switch], *, name: str = "", problems: Iterable[str] = ()) -> SwitchTree:
    """Return the places of all hosts below some switches.

    A host at two switches has no place; above a switch that is above itself, nothing is known.

    Args:
        switches: in any order; parts of a switch that comes up again are joined.
        name: of this network.
        problems: what was wrong with the file that they come from.
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
        found.append(
            f"{_counted(twice, 'host')} at two switches ({first} at {' and '.join(twice[first][:2])}): left out"
        )
    loops: set[str] = set()
    paths = {leaf: _path(leaf, parents, loops) for leaf in {at[0] for at in leaves.values()}}
    if loops:
        found.append(
            f"loop: {short_list(loops)} {'are' if len(loops) > 1 else 'is'} above themselves; that is left out"
        )
    above = {host: paths[at[0]] for host, at in leaves.items() if host not in twice}
    return SwitchTree(name=name, above=above, problems=tuple(found))


def _joined(switches: Sequence[Switch]) -> dict[str, Switch]:
    joined: dict[str, Switch] = {}
    for switch in switches:
        before = joined.get(switch.name, Switch(name=switch.name))
        joined[switch.name] = Switch(
            name=switch.name,
            hosts=tuple(dict.fromkeys((*before.hosts, *switch.hosts))),
            switches=tuple(dict.fromkeys((*before.switches, *switch.switches))),
        )
    return joined


def _repeated(switches: Sequence[Switch]) -> list[str]:
    names = [switch.name for switch in switches]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    return [f"{_counted(repeated, 'switch')} defined more than once ({short_list(repeated[:_MOST_NAMED])})"] * bool(
        repeated
    )


def _incomplete(known: Mapping[str, Switch]) -> list[str]:
    """Return what is said of switches that have nothing below them, and of those that nobody defines."""
    empty = [switch.name for switch in known.values() if not switch.hosts and not switch.switches]
    unknown = dict.fromkeys(below for switch in known.values() for below in switch.switches if below not in known)
    found = []
    if empty:
        found.append(f"{_counted(empty, 'switch')} without hosts or switches ({short_list(empty[:_MOST_NAMED])})")
    if unknown:
        names = short_list(list(unknown)[:_MOST_NAMED])
        found.append(f"{_counted(unknown, 'switch')} below another one and not defined ({names})")
    return found


def _counted(names: Iterable[str], noun: str) -> str:
    count = len(list(names))
    return f"{count} switches" if noun == "switch" and count != 1 else plural(count, noun)


def _path(leaf: str, parents: Mapping[str, Sequence[str]], loops: set[str]) -> tuple[str, ...]:
    """Return the switches above a leaf and itself, from the top down, and note those that are above themselves."""
    path, level, seen = [leaf], [leaf], {leaf}
    while above := list(dict.fromkeys(parent for switch in level for parent in parents.get(switch, ()))):
        again = seen.intersection(above)
        if again:
            loops |= again
            break
        seen |= set(above)
        path.append(above[0] if len(above) == 1 else short_list(above))
        level = above
    return tuple(reversed(path))
