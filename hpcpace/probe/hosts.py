"""The parts of a probe that measure each host by itself: the noise of its cores, and rates of copies.

Each core that the ranks of a host may use is measured by one rank, in a process of its own, so that the interpreters do
not wait for each other and ranks that share a core are no noise to each other; shared cores are reported. Hosts that
are one machine, as in the lab, take turns, and so do the GPUs of a host.

Copies go in the memory of each NUMA node, and between GPUs and that memory. Each core copies in a thread that is bound
to it, between arrays that it has touched first, so that Linux has put them into its node's memory. All threads copy at
once, as in STREAM (McCalpin, 1995), whose way of counting is used: reads plus writes. Copies of GPUs have not been run
on a GPU so far: pinned memory is copied by the device itself, other memory through a buffer of the driver; durations
are those of events on the device's stream.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil

from hpcpace.audit.snapshot import take_host
from hpcpace.audit.tree import Tree
from hpcpace.core.environment import host_identity
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_S, listed, plural
from hpcpace.probe.record import (
    CopiesRecord,
    CoreFigures,
    CoreNoise,
    DeviceRate,
    MemoryRate,
    NoiseRecord,
    ProbeRecord,
)
from hpcpace.probe.start import pcie_rate
from hpcpace.probe.world import ProbeWorld
from hpcpace.world.deadline import Deadline, in_time

if TYPE_CHECKING:
    import torch


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
_MIN_LENGTH_S = 0.2
_MAX_LENGTH_S = 10.0
_MAX_REASON = 200


class Noise:
    """The part that measures the noise of cores.

    Args:
        one_at_a_time: whether the cores of a host are measured one after another.
        most_length_s: for which a core is measured at most.
    """

    name = "noise"
    weight = 2.0

    def __init__(self, *, one_at_a_time: bool = False, most_length_s: float = _MAX_LENGTH_S) -> None:
        self._one_at_a_time = one_at_a_time
        self._most_length_s = most_length_s

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure; see `hpcpace.probe.world.Measurement`."""
        name, share = f"noise/{world.num_meetings}", share_cores(world)
        num_batches = len(share.of_host) if self._one_at_a_time else 1
        world.board.post(f"{name}/batches/{world.rank}", num_batches)
        slot_s, wait_s = world.agree(self._slots(world, name, share.num_turns, deadline))
        begin_s = time.monotonic() + share.turn * num_batches * slot_s
        batches: dict[int, list[int]] = {}
        for cpu in share.own:
            batches.setdefault(share.of_host.index(cpu) if self._one_at_a_time else 0, []).append(cpu)
        host = world.hosts[world.node_of_rank[world.rank]]
        own = NoiseRecord(notes=(f"{host}: {share.note}",) if share.note else ())
        for place, cpus in batches.items():
            time.sleep(max(begin_s + place * slot_s - time.monotonic(), 0.0))
            own = _joined([own, _measure_cores(host, cpus, slot_s - _START_S)])
        world.board.post(f"{name}/found/{world.rank}", own)
        limit_s = wait_s + world.timeout_s
        gathered = world.board.gather(f"{name}/found", world.alive, limit_s, NoiseRecord) if world.is_first else {}
        world.meet("the noise of cores", wait_s=wait_s)
        if not world.is_first:
            return record
        found = _joined([NoiseRecord(notes=_noted(share)), *(each for _, each in sorted(gathered.items()))])
        cores = sorted(found.cores, key=lambda each: (world.hosts.index(each.host), each.cpu))
        return dataclasses.replace(record, noise=dataclasses.replace(found, cores=tuple(cores)))

    def _slots(self, world: ProbeWorld, name: str, num_turns: int, deadline: Deadline) -> list[float]:
        """Return on rank 0 the length of a slot, in which cores are measured, and that of all slots."""
        if not world.is_first:
            return []
        answers = world.board.gather(f"{name}/batches", world.alive, world.timeout_s)
        num_slots = num_turns * max(answers.values(), default=1)
        length_s = min(_USED_SHARE * deadline.left_s / num_slots - _START_S, self._most_length_s)
        slot_s = max(length_s, _MIN_LENGTH_S) + _START_S
        return [slot_s, num_slots * slot_s + _END_S]


def _noted(share: CoreShare) -> tuple[str, ...]:
    return (share.note_on_turns,) if share.note_on_turns else ()


def _joined(records: Sequence[NoiseRecord]) -> NoiseRecord:
    return NoiseRecord(
        cores=tuple(core for each in records for core in each.cores),
        notes=tuple(dict.fromkeys(note for each in records for note in each.notes)),
    )


def _measure_cores(host: str, cpus: Sequence[int], length_s: float) -> NoiseRecord:
    """Return the figures of some cores, measured at the same time; of those that cannot be measured, the reason."""
    begin_s = time.monotonic() + _START_S
    programs = {cpu: _start(cpu, begin_s, length_s) for cpu in cpus}
    cores, notes = [], []
    for cpu, program in programs.items():
        problem = ""
        try:
            output, complaint = program.communicate(timeout=_START_S + length_s + _END_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            problem = "no result in time"
        else:
            if program.returncode:
                problem = complaint.strip().rpartition("\n")[-1][:_MAX_REASON]
        if problem or program.returncode:
            notes.append(f"{host}: core {cpu} could not be measured: {problem}")
        else:
            cores.append(CoreNoise(host=host, cpu=cpu, figures=msgspec.json.decode(output, type=CoreFigures)))
    return NoiseRecord(cores=tuple(cores), notes=tuple(notes))


def _start(cpu: int, begin_s: float, length_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-P", "-m", "hpcpace.probe.quanta", str(cpu), str(begin_s), str(length_s)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd="/")


NODES = Path("/sys/devices/system/node")
_READ_AND_WRITTEN = 2
_SET_UP_TIMEOUT_S = 30.0
# Of the memory that is free, what the arrays of all cores may take.
_MEMORY_SHARE = 0.1


def numa_of_cpus(nodes: Path = NODES) -> dict[int, int]:
    """Return the NUMA node of each core; empty where the kernel knows none.

    Args:
        nodes: where the kernel lists them.
    """
    found = {}
    for folder in sorted(nodes.glob("node[0-9]*")):
        try:
            text = (folder / "cpulist").read_text(encoding="ascii").strip()
        except OSError:
            continue
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
            found.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(folder.name[4:])))
    return found


def affordable_bytes(num_cpus: int) -> int:
    """Return how large each of two arrays of so many cores may be."""
    return int(_MEMORY_SHARE * psutil.virtual_memory().available / (2 * max(num_cpus, 1)))


def memory_rates(
    cpus: Sequence[int], numa_of_cpu: Mapping[int, int], *, length_s: float, array_bytes: int, host: str = ""
) -> list[MemoryRate]:
    """Return the rate of some cores for each NUMA node, ascending; all of them copy at once.

    Args:
        cpus: the cores.
        numa_of_cpu: node of each core; 0 for those not listed.
        length_s: for which they copy.
        array_bytes: of each of a core's two arrays; more than its share of the caches.
        host: its name.
    """
    barrier = threading.Barrier(max(len(cpus), 1), timeout=_SET_UP_TIMEOUT_S)
    rates: dict[int, float] = {}

    def copy(cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread
            source, target = np.ones(array_bytes // 8), np.zeros(array_bytes // 8)
            target.fill(2.0)
            barrier.wait()
        except (OSError, MemoryError):
            barrier.abort()
            return
        except threading.BrokenBarrierError:
            return
        begin_s, num_copies = time.perf_counter(), 0
        while (now_s := time.perf_counter()) < begin_s + length_s or not num_copies:
            np.copyto(target, source)
            num_copies += 1
        now_s = time.perf_counter()
        rates[cpu] = _READ_AND_WRITTEN * num_copies * target.nbytes / (now_s - begin_s)

    threads = [threading.Thread(target=copy, args=(cpu,), name=f"hpcpace-copy-{cpu}") for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    for node in sorted({numa_of_cpu.get(cpu, 0) for cpu in rates}):
        of_node = [rate for cpu, rate in rates.items() if numa_of_cpu.get(cpu, 0) == node]
        found.append(MemoryRate(host=host, numa_node=node, num_threads=len(of_node), rate=sum(of_node)))
    return found


_COPY_BYTES = 64 << 20
_NUM_WARM_UPS, _NUM_COPIES = 2, 5
_READ_TIMEOUT_S = 5.0


def device_rates(device: torch.device, numa_of_cpu: Mapping[int, int], host: str) -> list[DeviceRate]:
    """Return the rates of copies between a GPU and the memory of each NUMA node on whose cores this rank may run.

    Args:
        device: of type cuda.
        numa_of_cpu: node of each core; 0 for those not listed.
        host: its name.

    Raises:
        RuntimeError: torch's, such as no memory left on the device.
    """
    bus_id = pci_address(device)
    limit = _limit(bus_id) if bus_id else None
    cpus_of_node: dict[int, set[int]] = {}
    for cpu in os.sched_getaffinity(0):
        cpus_of_node.setdefault(numa_of_cpu.get(cpu, 0), set()).add(cpu)
    return [
        DeviceRate(
            host=host,
            device=device.index or 0,
            bus_id=bus_id,
            numa_node=node,
            is_pinned=is_pinned,
            to_device=to_device,
            from_device=from_device,
            limit=limit,
        )
        for node, cpus in sorted(cpus_of_node.items())
        for is_pinned, to_device, from_device in _on_cores(cpus, device)
    ]


def pci_address(device: torch.device) -> str:
    """Return the address of a GPU as Linux writes it, like `0000:17:00.0`; empty if torch does not say."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _limit(bus_id: str) -> float | None:
    try:
        snapshot = in_time(lambda: take_host(Tree(), host=""), _READ_TIMEOUT_S, "reading /sys")
    except Exception:  # a host whose facts cannot be read can still be measured
        return None
    found = [each for each in snapshot.hardware.pci or () if each.address == bus_id]
    return pcie_rate(found[0]) if found else None


def _on_cores(cpus: set[int], device: torch.device) -> list[tuple[bool, float, float]]:
    """Return the rates in a thread bound to some cores, where memory that it touches first belongs to their node."""
    found: list[tuple[bool, float, float]] = []
    failed: list[RuntimeError] = []

    def copy() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            found.extend(_rates(device))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=copy, name="hpcpace-device-copy")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found


def _rates(device: torch.device) -> Iterator[tuple[bool, float, float]]:
    import torch

    with torch.cuda.device(device):
        on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        for is_pinned in (True, False):
            on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            on_host.fill_(1)
            yield is_pinned, _rate(on_device, on_host), _rate(on_host, on_device)


def _rate(target: Any, source: Any) -> float:
    """Return the median rate of copies, bytes per second."""
    import torch

    times_ns = []
    for _ in range(_NUM_WARM_UPS + _NUM_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times_ns.append(begin.elapsed_time(end) * NS_PER_MS)
    usual_ns = sorted(times_ns[_NUM_WARM_UPS:])[_NUM_COPIES // 2]
    return float(target.numel() * NS_PER_S / usual_ns)


_LENGTH_S = 0.5
# Threads make and touch their arrays before they copy.
_SET_UP_S = 1.0
_DEVICE_SLOT_S = 3.0
_ARRAY_BYTES = 32 << 20
_MIN_ARRAY_BYTES = 4 << 20


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
        """Measure; see `hpcpace.probe.world.Measurement`."""
        name, share = f"copies/{world.num_meetings}", share_cores(world)
        slot_s = self._length_s + _SET_UP_S
        if not world.agree(deadline.left_s > share.num_turns * slot_s):
            world.problems.append("copies did not fit into the time: allow more with --time")
            return record
        time.sleep(share.turn * slot_s)
        host = world.hosts[world.node_of_rank[world.rank]]
        own = self._memory(share, host)
        wait_s = share.num_turns * slot_s
        world.meet("copies in memory", wait_s=wait_s)
        if world.device.type == "cuda":
            own = _with_device(world, own, host)
            wait_s = max(world.node_of_rank.count(node) for node in world.nodes) * _DEVICE_SLOT_S
        world.board.post(f"{name}/{world.rank}", own)
        limit_s = wait_s + world.timeout_s
        gathered = world.board.gather(name, world.alive, limit_s, CopiesRecord) if world.is_first else {}
        world.meet("copies", wait_s=wait_s)
        if not world.is_first:
            return record
        records = [CopiesRecord(notes=_noted(share)), *(each for _, each in sorted(gathered.items()))]
        return dataclasses.replace(record, copies=_all_copies(records, world.hosts))

    def _memory(self, share: CoreShare, host: str) -> CopiesRecord:
        array_bytes = min(self._array_bytes, affordable_bytes(len(share.of_host)))
        if array_bytes < min(_MIN_ARRAY_BYTES, self._array_bytes):
            return CopiesRecord(notes=(f"{host}: too little memory is free to measure its rate",))
        rates = memory_rates(share.own, numa_of_cpus(), length_s=self._length_s, array_bytes=array_bytes, host=host)
        return CopiesRecord(memory=tuple(rates))


def _with_device(world: ProbeWorld, own: CopiesRecord, host: str) -> CopiesRecord:
    """Return the copies of this rank with those of its device, measured in its turn."""
    ranks = world.ranks_of([world.node_of_rank[world.rank]])
    time.sleep(ranks.index(world.rank) * _DEVICE_SLOT_S)
    try:
        return dataclasses.replace(own, devices=tuple(device_rates(world.device, numa_of_cpus(), host)))
    except RuntimeError as error:  # such as no memory left on the device
        reason = str(error).splitlines()[0][:200]
        note = f"{host}: copies to {world.device} failed: {reason}"
        return dataclasses.replace(own, notes=(*own.notes, note))


def _all_copies(records: Sequence[CopiesRecord], hosts: Sequence[str]) -> CopiesRecord:
    """Return what ranks measured together: the cores of one NUMA node may be those of several."""
    of_node: dict[tuple[int, int], list[MemoryRate]] = {}
    for rate in (rate for each in records for rate in each.memory):
        of_node.setdefault((hosts.index(rate.host), rate.numa_node), []).append(rate)
    memory = [
        dataclasses.replace(
            some[0], num_threads=sum(rate.num_threads for rate in some), rate=sum(rate.rate for rate in some)
        )
        for _, some in sorted(of_node.items())
    ]
    return CopiesRecord(
        memory=tuple(memory),
        devices=tuple(rate for each in records for rate in each.devices),
        notes=tuple(dict.fromkeys(note for each in records for note in each.notes)),
    )
