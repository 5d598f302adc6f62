"""Which rank measures which cores of its host, and which hosts have to wait for each other.

Each core that the ranks of a host may use is one rank's to measure, so ranks that share a core are no noise to each
other; that they share one is said. Hosts that are one machine, as in the lab, take turns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcpace.probe.world import ProbeWorld
from hpcpace.wording import listed, plural
from hpcpace.world.environment import host_identity


@dataclass(frozen=True, kw_only=True)
class CoreShare:
    """What one rank measures.

    Attributes:
        own: its cores, ascending.
        of_host: all cores of the host that its ranks may use, ascending.
        turn: of this host among those that are one machine, from 0.
        num_turns: of the machine with the most hosts, the same on all ranks.
        note: that ranks of this host share cores; empty if each has one.
        note_on_turns: that hosts are one machine; empty if none are.
    """

    own: tuple[int, ...]
    of_host: tuple[int, ...]
    turn: int
    num_turns: int
    note: str
    note_on_turns: str


def share_cores(world: ProbeWorld) -> CoreShare:
    """Return which cores this rank measures, and when.

    Collective: every rank alive calls this.

    Raises:
        RankZeroLost: rank 0 does not answer any more.
    """
    name, node = f"cores/{world.num_meetings}", world.node_of_rank[world.rank]
    world.board.post(f"{name}/cpus/{world.rank}", sorted(os.sched_getaffinity(0)))
    world.board.post(f"{name}/machine/{world.rank}", host_identity().boot_id)
    cpus = world.board.gather(f"{name}/cpus", world.ranks_of([node]), world.timeout_s)
    turns = world.agree(_turns(world, name))
    waiting = [world.hosts[int(each)] for each in turns]
    verb = "shares" if len(waiting) == 1 else "share"
    return CoreShare(
        own=tuple(share_out(cpus).get(world.rank, [])),
        of_host=tuple(sorted({cpu for some in cpus.values() for cpu in some})),
        turn=turns.get(str(node), 0),
        num_turns=max(turns.values(), default=0) + 1,
        note=note_on_sharing(cpus),
        note_on_turns=f"{listed(waiting)} {verb} a machine with another host: measured in turn" if waiting else "",
    )


def share_out(cpus: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the cores that each rank of a host measures: every core once, by a rank that may use it.

    Args:
        cpus: by rank, the cores that it may use.
    """
    shares: dict[int, list[int]] = {rank: [] for rank in cpus}
    for cpu in sorted({cpu for own in cpus.values() for cpu in own}):
        able = [rank for rank, own in cpus.items() if cpu in own]
        shares[min(able, key=lambda rank: (len(shares[rank]), rank))].append(cpu)
    return shares


def note_on_sharing(cpus: Mapping[int, Sequence[int]]) -> str:
    """Return a sentence where more ranks than cores have the same cores; empty otherwise."""
    masks: dict[tuple[int, ...], int] = {}
    for own in cpus.values():
        masks[tuple(own)] = masks.get(tuple(own), 0) + 1
    crowded = [(num, len(mask)) for mask, num in masks.items() if num > len(mask)]
    if not crowded:
        return ""
    num_ranks, num_cpus = max(crowded)
    return f"{num_ranks} ranks share {plural(num_cpus, 'core')}: while one computes, another waits, which is not noise"


def _turns(world: ProbeWorld, name: str) -> dict[str, int]:
    """Return on rank 0, by host (as text), the turn of hosts that have to wait for others of their machine."""
    if not world.is_first:
        return {}
    leaders = {world.leader_of(node): node for node in world.nodes}
    machines = world.board.gather(f"{name}/machine", leaders, world.timeout_s)
    order: dict[str, list[int]] = {}
    for rank, machine in sorted(machines.items()):
        order.setdefault(machine, []).append(leaders[rank])
    return {str(node): turn for nodes in order.values() for turn, node in enumerate(nodes) if turn}
