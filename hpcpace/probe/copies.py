"""The part that measures copies: within the memory of each NUMA node, and between that memory and each GPU.

Hosts that are one machine take turns, and so do the GPUs of a host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from hpcpace.probe.copies_record import CopiesRecord, DeviceRate, MemoryRate
from hpcpace.probe.cores import CoreShare, share_cores
from hpcpace.probe.device_copies import device_rates
from hpcpace.probe.memory_copies import NodeRate, affordable_bytes, memory_rates, numa_of_cpus
from hpcpace.probe.record import ProbeRecord
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.deadline import Deadline

_LENGTH_S = 0.5
# Threads make and touch their arrays before they copy.
_SET_UP_S = 1.0
_DEVICE_SLOT_S = 3.0
_ARRAY_BYTES = 32 << 20
_LEAST_ARRAY_BYTES = 4 << 20


class Copies:
    """The part that measures copies.

    Args:
        length_s: for which the cores of a host copy.
        array_bytes: of each of the two arrays of a core.
    """

    name = "copies"
    weight = 1.0

    def __init__(self, *, length_s: float = _LENGTH_S, array_bytes: int = _ARRAY_BYTES) -> None:
        self._length_s = length_s
        self._array_bytes = array_bytes

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.parts.Part`."""
        name, share = f"copies/{world.num_meetings}", share_cores(world)
        slot_s = self._length_s + _SET_UP_S
        if not world.agree(deadline.left_s > share.num_turns * slot_s):
            world.problems.append("copies did not fit into the time: allow more with --time")
            return record
        time.sleep(share.turn * slot_s)
        memory, note = self._memory(share)
        wait_s = share.num_turns * slot_s
        world.meet("copies in memory", wait_s=wait_s)
        own = {"memory": [dataclasses.asdict(each) for each in memory], "devices": [], "notes": [note] if note else []}
        if world.device.type == "cuda":
            wait_s = self._copy_to_device(world, own)
        world.board.post(f"{name}/{world.rank}", own)
        gathered = world.board.gather(name, world.alive, wait_s + world.timeout_s) if world.is_first else {}
        world.meet("copies", wait_s=wait_s)
        if not world.is_first:
            return record
        return dataclasses.replace(record, copies=_record(world, gathered, share.note_on_turns))

    def _memory(self, share: CoreShare) -> tuple[list[NodeRate], str]:
        array_bytes = min(self._array_bytes, affordable_bytes(len(share.of_host)))
        if array_bytes < min(_LEAST_ARRAY_BYTES, self._array_bytes):
            return [], "too little memory is free to measure its rate"
        return memory_rates(share.own, numa_of_cpus(), length_s=self._length_s, array_bytes=array_bytes), ""

    def _copy_to_device(self, world: ProbeWorld, own: dict[str, Any]) -> float:
        """Add what the device of this rank reaches, in its turn, and return how long all turns take."""
        ranks = world.ranks_of([world.node_of_rank[world.rank]])
        time.sleep(ranks.index(world.rank) * _DEVICE_SLOT_S)
        try:
            own["devices"] = [dataclasses.asdict(each) for each in device_rates(world.device, numa_of_cpus())]
        except RuntimeError as error:  # such as no memory left on the device
            own["notes"].append(f"copies to {world.device} failed: {str(error).splitlines()[0][:200]}")
        return max(world.node_of_rank.count(node) for node in world.nodes) * _DEVICE_SLOT_S


def _record(world: ProbeWorld, gathered: Mapping[int, Any], note_on_turns: str) -> CopiesRecord:
    rates: dict[tuple[int, int], NodeRate] = {}
    devices, notes = [], [note_on_turns] if note_on_turns else []
    for rank, answer in sorted(gathered.items()):
        node = world.node_of_rank[rank]
        for each in answer["memory"]:
            one = NodeRate(**each)
            before = rates.get((node, one.numa_node), NodeRate(numa_node=one.numa_node, num_threads=0, rate=0.0))
            total = before.num_threads + one.num_threads
            rates[node, one.numa_node] = dataclasses.replace(one, num_threads=total, rate=before.rate + one.rate)
        devices += [DeviceRate(host=world.hosts[node], **each) for each in answer["devices"]]
        notes += [f"{world.hosts[node]}: {note}" for note in answer["notes"]]
    memory = tuple(
        MemoryRate(host=world.hosts[node], numa_node=number, num_threads=one.num_threads, rate=one.rate)
        for (node, number), one in sorted(rates.items())
    )
    return CopiesRecord(memory=memory, devices=tuple(devices), notes=tuple(dict.fromkeys(notes)))
