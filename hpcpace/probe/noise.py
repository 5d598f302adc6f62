"""Noise of cores: who measures which cores of a host, and the processes that measure.

Each core has a process of its own, so that the interpreters do not wait for each other.

Each core that the ranks of a host may use is measured by one rank, so ranks that share a core are no noise to each
other; shared cores are reported. Hosts that are one machine, as in the lab, take turns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.core.environment import host_identity
from hpcpace.core.text import listed, plural
from hpcpace.probe.noise_record import CoreFigures, CoreNoise, NoiseRecord
from hpcpace.probe.record import ProbeRecord
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.deadline import Deadline


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


# A process of Python with numpy has begun after so long, also on a busy machine.
_START_S = 1.5
_END_S = 10.0
_USED_SHARE = 0.9
_LEAST_LENGTH_S = 0.2
_MOST_LENGTH_S = 10.0
_MOST_REASON = 200


class Noise:
    """The part that measures the noise of cores.

    Args:
        one_at_a_time: whether the cores of a host are measured one after another.
        most_length_s: for which a core is measured at most.
    """

    name = "noise"
    weight = 2.0

    def __init__(self, *, one_at_a_time: bool = False, most_length_s: float = _MOST_LENGTH_S) -> None:
        self._one_at_a_time = one_at_a_time
        self._most_length_s = most_length_s

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.parts.Part`."""
        name, share = f"noise/{world.num_meetings}", share_cores(world)
        num_batches = len(share.of_host) if self._one_at_a_time else 1
        world.board.post(f"{name}/batches/{world.rank}", num_batches)
        slot_s, wait_s = world.agree(self._slots(world, name, share.num_turns, deadline))
        begin_s = time.monotonic() + share.turn * num_batches * slot_s
        batches: dict[int, list[int]] = {}
        for cpu in share.own:
            batches.setdefault(share.of_host.index(cpu) if self._one_at_a_time else 0, []).append(cpu)
        found: list[dict[str, Any]] = []
        for place, cpus in batches.items():
            time.sleep(max(begin_s + place * slot_s - time.monotonic(), 0.0))
            found += _measure_cores(cpus, slot_s - _START_S)
        world.board.post(f"{name}/found/{world.rank}", {"cores": found, "note": share.note})
        limit_s = wait_s + world.timeout_s
        gathered = world.board.gather(f"{name}/found", world.alive, limit_s) if world.is_first else {}
        world.meet("the noise of cores", wait_s=wait_s)
        if not world.is_first:
            return record
        return dataclasses.replace(record, noise=_record(world, gathered, share.note_on_turns))

    def _slots(self, world: ProbeWorld, name: str, num_turns: int, deadline: Deadline) -> list[float]:
        """Return on rank 0 the length of a slot, in which cores are measured, and that of all slots."""
        if not world.is_first:
            return []
        answers = world.board.gather(f"{name}/batches", world.alive, world.timeout_s)
        num_slots = num_turns * max(answers.values(), default=1)
        length_s = min(_USED_SHARE * deadline.left_s / num_slots - _START_S, self._most_length_s)
        slot_s = max(length_s, _LEAST_LENGTH_S) + _START_S
        return [slot_s, num_slots * slot_s + _END_S]


def _measure_cores(cpus: Sequence[int], length_s: float) -> list[dict[str, Any]]:
    """Return the figures of some cores, measured at the same time; of those that cannot be measured, the reason."""
    begin_s = time.monotonic() + _START_S
    programs = {cpu: _start(cpu, begin_s, length_s) for cpu in cpus}
    found: list[dict[str, Any]] = []
    for cpu, program in programs.items():
        try:
            output, complaint = program.communicate(timeout=_START_S + length_s + _END_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            found.append({"cpu": cpu, "problem": "no result in time"})
            continue
        if program.returncode:
            found.append({"cpu": cpu, "problem": complaint.strip().rpartition("\n")[-1][:_MOST_REASON]})
        else:
            found.append({"cpu": cpu, "figures": json.loads(output)})
    return found


def _start(cpu: int, begin_s: float, length_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-P", "-m", "hpcpace.probe.quanta", str(cpu), str(begin_s), str(length_s)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd="/")


def _record(world: ProbeWorld, gathered: Mapping[int, Any], note_on_turns: str) -> NoiseRecord:
    cores, notes = [], [note_on_turns] if note_on_turns else []
    for rank, answer in sorted(gathered.items()):
        host = world.hosts[world.node_of_rank[rank]]
        if answer["note"]:
            notes.append(f"{host}: {answer['note']}")
        for each in answer["cores"]:
            if "figures" in each:
                cores.append(CoreNoise(host=host, cpu=each["cpu"], figures=CoreFigures(**each["figures"])))
            else:
                notes.append(f"{host}: core {each['cpu']} could not be measured: {each['problem']}")
    order = {name: number for number, name in enumerate(world.hosts)}
    cores.sort(key=lambda each: (order[each.host], each.cpu))
    return NoiseRecord(cores=tuple(cores), notes=tuple(dict.fromkeys(notes)))
