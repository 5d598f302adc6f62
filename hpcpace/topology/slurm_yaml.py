"""topology.yaml of Slurm 25.05 and later, which may have several networks.

Format: topology.yaml(5): a list of topologies, each with `tree: switches:`, `block: blocks:` or `flat: true`.
"""

from __future__ import annotations

from typing import Any

from hpcpace.errors import TopologyError
from hpcpace.hostlist import expand
from hpcpace.topology.switch_tree import Switch, SwitchTree, switch_tree

_KINDS = {"tree": ("switches", "switch"), "block": ("blocks", "block")}


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
    topologies = data if isinstance(data, list) else [data]
    found = []
    for place, topology in enumerate(topologies, 1):
        if not isinstance(topology, dict):
            raise TopologyError(f"topology {place} is {_shown(topology)}: it must be a mapping with tree: or block:")
        found.append((topology.get("cluster_default") is not True, _tree_of(place, topology)))
    return [tree for _, tree in sorted(found, key=lambda pair: pair[0])]


def _loaded(content: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise TopologyError(
            "topology.yaml needs PyYAML: pip install 'hpcpace[topology]', or save what `scontrol show topology` prints"
        ) from None
    try:
        # Anchors could make a small file expand without bounds; Slurm's files have none.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, Loader=yaml.SafeLoader)):
            raise TopologyError("it has YAML aliases, which topology.yaml does not use")
        return yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise TopologyError(f"it is no YAML: {reason}") from None


def _tree_of(place: int, topology: dict[Any, Any]) -> SwitchTree:
    name = str(topology.get("topology", ""))
    for kind, (units, unit) in _KINDS.items():
        if kind in topology:
            listed = topology[kind].get(units) if isinstance(topology[kind], dict) else None
            if not isinstance(listed, list):
                raise TopologyError(f"topology {name or place}: {kind} has no list {units}:")
            return switch_tree([_switch(one, unit, name or str(place)) for one in listed], name=name)
    return switch_tree([], name=name)


def _switch(entry: Any, unit: str, where: str) -> Switch:
    if not isinstance(entry, dict) or entry.get(unit) in (None, ""):
        raise TopologyError(
            f"topology {where}: an entry is {_shown(entry)}: it must have {unit}: and nodes: or children:"
        )
    below = _names(entry, "children", where)
    return Switch(name=str(entry[unit]), hosts=() if below else _names(entry, "nodes", where), switches=below)


def _names(entry: dict[Any, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key)
    if value in (None, ""):
        return ()
    texts = value if isinstance(value, list) else [value]
    try:
        return tuple(name for text in texts for name in expand(str(text)))
    except ValueError as error:
        raise TopologyError(f"topology {where}, {key}: {error}") from None


def _shown(value: object) -> str:
    return repr(value)[:60]
