"""A file of the user's own: `host leaf spine` a line, where the host may be a list like `n[1-4]`."""

from __future__ import annotations

from itertools import pairwise

from hpcpace.core.errors import TopologyError
from hpcpace.core.hostlist import HostLists
from hpcpace.core.text import shown
from hpcpace.topology.switch_tree import MAX_NAMES, Switch, SwitchTree, switch_name, switch_tree

_MOST_LEVELS = 8


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
        if not 2 <= len(words) <= _MOST_LEVELS:
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
