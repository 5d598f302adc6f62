"""Puts what a file says of the network in the place of what the job was told, and says where the two contradict.

The file counts: whoever names one wants it. What Slurm told the job when it ran counts where the file does not know all
of the job's hosts, since with half a network the blame would fall on those whose place is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcpace.core.hostlist import short_list
from hpcpace.core.text import plural
from hpcpace.metrics.topology import SLURM_ADDRESS, Topology, topology_of
from hpcpace.topology.switch_tree import SwitchTree
from hpcpace.trace.tables import RankTrace

_MOST_NAMED = 4


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
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return short_list(names[:_MOST_NAMED]) + more
