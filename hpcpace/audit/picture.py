"""The machine as it is drawn, made from the facts of a host: cores, devices, and who may run where.

Text, SVG and HTML draw the same `Picture`. Names come from snapshots, which may be anybody's: they are printable and
short here, and numbers of things are bounded; whoever writes HTML still has to escape them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, groupby
from typing import TypeVar

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Cache, HardwareView, PciDevice, parsed, sum_of
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.tree import Unreadable
from hpcpace.core.hostlist import short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import format_bytes, shortened


@dataclass(frozen=True, kw_only=True)
class DrawnCores:
    """Cores of one NUMA node, in order, that are alike and open to the same ranks.

    Attributes:
        cores: CPUs of each core.
        ranks: ranks that may run on all CPUs of each core.
        partly: ranks that may run on some hardware threads of each core only.
    """

    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    partly: tuple[int, ...]

    @property
    def cpus(self) -> str:
        """Their CPUs as a list."""
        return cpusets.format_list(sum_of(self.cores))

    @property
    def ranks_text(self) -> str:
        """Who may run on them: `rank 3`, `ranks 0-7`, `rank 1 in part`; empty for nobody."""
        whole, some = ranks_text(self.ranks), ranks_text(self.partly)
        return ", ".join(filter(None, (whole, f"{some} in part" if some else "")))


@dataclass(frozen=True, kw_only=True)
class DrawnDevice:
    """A GPU or an adapter.

    Attributes:
        name: short name in the tables of links, like `GPU0` or `mlx5_0`.
        detail: what else is known of it in a few words.
        ranks: ranks that use it.
    """

    name: str
    address: str
    is_gpu: bool
    detail: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrawnNode:
    """A NUMA node, or the part of it that belongs to one package.

    Attributes:
        title: its name and memory.
        caches: its caches, like `L3 105 MiB`.
    """

    title: str
    caches: str
    groups: tuple[DrawnCores, ...]
    devices: tuple[DrawnDevice, ...]


@dataclass(frozen=True, kw_only=True)
class DrawnPackage:
    """A physical package."""

    title: str
    nodes: tuple[DrawnNode, ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One machine, or several that look the same.

    Attributes:
        title: its host or hosts.
        subtitle: what it is.
        elsewhere: NUMA nodes with memory only.
        unplaced: devices whose place is not known.
        gpus, nics: names in the order of the tables of links.
        links: link classes by two names.
        notes: what is not drawn, and why.
    """

    title: str
    subtitle: str
    packages: tuple[DrawnPackage, ...]
    elsewhere: tuple[str, ...]
    unplaced: tuple[DrawnDevice, ...]
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    links: dict[tuple[str, str], str]
    notes: tuple[str, ...]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-7`, or an empty text for none."""
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {cpusets.format_numbers(ranks)}"


def links_of(picture: Picture) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the tables of links: title, names of rows and columns; `Picture.links` has no link of a name to itself."""
    if len(picture.gpus) > 1:
        yield "GPU x GPU", picture.gpus, picture.gpus
    if picture.gpus and picture.nics:
        yield "adapter x GPU", picture.nics, picture.gpus
    elif len(picture.nics) > 1:
        yield "adapter x adapter", picture.nics, picture.nics


T = TypeVar("T")

MAX_PICTURES = 8
"""Kinds of hosts that are drawn."""

_MAX_DEVICES = 64
_MAX_CORES = 4_096
_MAX_RANKS = 512
_MAX_PACKAGES = 256
_MAX_NAME = 24
_MAX_NVLINKS = 99
_NO_NODE = -1


def pictures(job: AuditedJob) -> tuple[list[Picture], int]:
    """Return a picture of each kind of host, the most frequent first, and how many kinds are left out."""
    kinds: dict[tuple[object, ...], list[AuditedHost]] = {}
    for host in job.hosts:
        # Hosts that are alike share their Hardware; their ranks are compared by the numbers on the host.
        ranks = tuple((rank.local_rank, rank.cpus, rank.gpus, rank.gpu) for rank in host.ranks)
        nets = tuple((net.name, net.pci, net.speed_mbps) for net in host.snapshot.net or () if net.pci)
        kinds.setdefault((id(host.snapshot.hardware), nets, host.snapshot.rdma, ranks), []).append(host)
    chosen = sorted(kinds.values(), key=len, reverse=True)
    drawn = []
    for hosts in chosen[:MAX_PICTURES]:
        title = _short(short_list([host.name for host in hosts]), 60)
        several = len(hosts) > 1
        drawn.append(_Drawing(hosts[0], several).picture(f"{title}, ranks by local rank" if several else title))
    return drawn, len(chosen) - len(drawn)


class _Drawing:
    """One host, read for drawing; what cannot be read is a note."""

    def __init__(self, host: AuditedHost, by_local_rank: bool) -> None:
        self.host = host
        self.view: HardwareView = host.hardware
        self.notes: list[str] = []
        self.ranks = [
            (rank.local_rank if by_local_rank and rank.local_rank >= 0 else rank.rank, rank)
            for rank in self._some(host.ranks, _MAX_RANKS, "ranks")
        ]
        self.nvml = {gpu.address: gpu.nvml for gpu in host.snapshot.gpus or () if gpu.nvml}
        fabrics = {nvml.fabric for nvml in self.nvml.values()}
        self.has_nvlink_switches = bool(host.snapshot.hardware.num_nvswitches or "completed" in fabrics)
        self.online = self._known(lambda: self.view.online) or 0
        self.masks = {number: self._known(partial(host.mask, rank)) or 0 for number, rank in self.ranks}

    def picture(self, title: str) -> Picture:
        """Return the host as it is drawn."""
        known = self._known(lambda: self.view.cores)
        each = [1 << cpu for cpu in cpusets.members(self.online)] if known is None else known
        cores = sorted(each, key=lambda core: core & -core)
        drawn_cores = self._some(cores, _MAX_CORES, "cores")
        found = self._devices()
        homes = [(drawn, self._known(partial(self.view.node_of, device.address))) for device, drawn in found]
        devices = [drawn for _, drawn in found]
        return Picture(
            title=title,
            subtitle=self._subtitle(len(cores)),
            packages=tuple(self._packages(drawn_cores, homes)),
            elsewhere=tuple(self._memory_only()),
            unplaced=tuple(device for device, home in homes if home is None),
            gpus=tuple(device.name for device in devices if device.is_gpu),
            nics=tuple(device.name for device in devices if not device.is_gpu),
            links=self._links(found),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _known(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Unreadable as error:
            self.notes.append(f"cannot determine {_short(self.host.explain(error), 120)}")
            return None

    def _some(self, found: Sequence[T], most: int, kind: str) -> Sequence[T]:
        if len(found) > most:
            self.notes.append(f"{len(found) - most} {kind} are not drawn")
        return found[:most]

    def _subtitle(self, num_cores: int) -> str:
        memory = self.host.snapshot.kernel.memory_bytes
        parts = (
            _short(self.host.snapshot.hardware.cpus.model or "processor not known", 48),
            f"{num_cores} cores, {self.online.bit_count()} CPUs",
            format_bytes(memory) if memory else "",
        )
        return ", ".join(filter(None, parts))

    def _packages(
        self, cores: Sequence[int], homes: Sequence[tuple[DrawnDevice, int | None]]
    ) -> Iterator[DrawnPackage]:
        packages = self._known(self._packages_read) or {"": self.online}
        nodes = self._known(lambda: self.view.numa_cpus) or {}
        placed: set[int] = set()
        for name, cpus in sorted(packages.items(), key=lambda item: item[1] & -item[1]):
            own = {number: of_node & cpus for number, of_node in sorted(nodes.items()) if of_node & cpus}
            drawn = []
            for number, of_node in (own or {_NO_NODE: cpus}).items():
                devices = tuple(device for device, home in homes if home == number and number not in placed)
                placed.add(number)
                drawn.append(self._node(number, [core for core in cores if core & of_node], devices))
            yield DrawnPackage(title=f"Package {_short(name)}" if name else "Processors", nodes=tuple(drawn))

    def _packages_read(self) -> Mapping[str, int]:
        packages = self.host.snapshot.hardware.cpus.packages
        packages = self.host.known(packages, "the packages", "cpus/packages", "cpus/online")
        return {name: parsed(text, "the CPUs of a package") for name, text in list(packages.items())[:_MAX_PACKAGES]}

    def _node(self, number: int, cores: Sequence[int], devices: tuple[DrawnDevice, ...]) -> DrawnNode:
        memory = next((n.memory_kb for n in self.host.snapshot.hardware.numa or () if n.number == number), None)
        name = "NUMA node not known" if number == _NO_NODE else f"NUMA {number}"
        groups = groupby(cores, key=lambda core: (core.bit_count(), *self._who(core)))
        return DrawnNode(
            title=f"{name}, {format_bytes(1024 * memory)}" if memory else name,
            caches=self._caches(sum_of(cores)),
            groups=tuple(
                DrawnCores(cores=tuple(own), ranks=ranks, partly=partly) for (_, ranks, partly), own in groups
            ),
            devices=devices,
        )

    def _who(self, core: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that may run on a whole core, and those that may run on a part of it."""
        core &= self.online
        whole = tuple(sorted(rank for rank, mask in self.masks.items() if mask & core == core))
        return whole, tuple(sorted(rank for rank, mask in self.masks.items() if 0 < mask & core != core))

    def _caches(self, cpus: int) -> str:
        """Return the kinds of data caches of some CPUs, the largest first: `L3 105 MiB, L2 56 x 2 MiB`."""
        caches = [cache for cache in self.host.snapshot.hardware.cpus.caches or () if cache.kind != "Instruction"]
        near = [cache for cache in caches[:_MAX_CORES] if _cpus_of(cache) & cpus]
        counts = Counter((cache.level, cache.size) for cache in near)
        parts = (
            f"L{level} {f'{count} x ' if count > 1 else ''}{_size(size)}"
            for (level, size), count in sorted(counts.items(), reverse=True)
        )
        return ", ".join(list(parts)[:4])

    def _memory_only(self) -> Iterator[str]:
        for node in (self.host.snapshot.hardware.numa or ())[:_MAX_DEVICES]:
            if node.cpus == "":
                yield f"NUMA {node.number}, {format_bytes(1024 * node.memory_kb) if node.memory_kb else 'no memory'}"

    def _devices(self) -> list[tuple[PciDevice, DrawnDevice]]:
        gpus, nics = (self._known(partial(self.view.of_kind, kind)) or () for kind in ("gpu", "nic"))
        order = [gpu.address for gpu in self.host.snapshot.gpus or ()]
        gpus = tuple(sorted(gpus, key=lambda gpu: order.index(gpu.address) if gpu.address in order else len(order)))
        drawn = [(gpu, self._gpu(number, gpu)) for number, gpu in enumerate(self._some(gpus, _MAX_DEVICES, "GPUs"))]
        others = self._some(nics, _MAX_DEVICES, "adapters")
        return drawn + [(nic, self._nic(number, nic)) for number, nic in enumerate(others)]

    def _gpu(self, number: int, device: PciDevice) -> DrawnDevice:
        known = next((gpu for gpu in self.host.snapshot.gpus or () if gpu.address == device.address), None)
        users = []
        for name, rank in self.ranks:
            if rank.gpus and 0 <= rank.gpu < len(rank.gpus) and rank.gpus[rank.gpu].address == device.address:
                users.append(name)
        ids = ":".join(filter(None, (device.vendor, device.device)))
        model = _short((known.name if known else "") or ids)
        return DrawnDevice(
            name=f"GPU{number}",
            address=_short(device.address),
            is_gpu=True,
            detail=", ".join(filter(None, (model.removeprefix("NVIDIA "), _link(device)))),
            ranks=tuple(sorted(users)),
        )

    def _nic(self, number: int, device: PciDevice) -> DrawnDevice:
        snapshot = self.host.snapshot
        rdma = [adapter for adapter in snapshot.rdma or () if adapter.pci == device.address]
        nets = [net for net in snapshot.net or () if net.pci == device.address]
        names = [_short(name) for name in (*(one.name for one in rdma), *(one.name for one in nets))]
        rates = [f"{port.rate_gbps:g} Gb/s" for adapter in rdma for port in adapter.ports[:1] if port.rate_gbps]
        speeds = [f"{net.speed_mbps / 1000:g} Gb/s" for net in nets if net.speed_mbps]
        states = [port.state for adapter in rdma for port in adapter.ports[:1] if port.state not in (None, "ACTIVE")]
        shown = (*names[1:2], *(rates or speeds)[:1], *(_short(state or "") for state in states[:1]), _link(device))
        return DrawnDevice(
            name=names[0] if names else f"NIC{number}",
            address=_short(device.address),
            is_gpu=False,
            detail=", ".join(filter(None, shown)),
            ranks=(),
        )

    def _links(self, devices: Sequence[tuple[PciDevice, DrawnDevice]]) -> dict[tuple[str, str], str]:
        """Return the class of the path between every two devices, NV# between GPUs behind NVLink switches."""
        links: dict[tuple[str, str], str] = {}
        for (one, first), (other, second) in combinations(devices, 2):
            count = min(self._nvlinks(one.address, other.address), _MAX_NVLINKS)
            name = f"NV{count}" if count > 0 else self.view.class_of(one.address, other.address)
            links[first.name, second.name] = links[second.name, first.name] = "?" if name == "UNKNOWN" else name
        return links

    def _nvlinks(self, one: str, other: str) -> int:
        """Return the number of NVLinks between two devices: direct ones, or all of them behind NVLink switches."""
        first, second = self.nvml.get(one), self.nvml.get(other)
        if first is None or second is None or not first.links_active or not second.links_active:
            return 0
        if self.has_nvlink_switches:
            return min(first.links_active, second.links_active)
        if first.links_to is None:
            self.notes.append("there are NVLinks, but the snapshot does not have which GPUs they join")
            return 0
        return first.links_to.get(other, 0)


def _cpus_of(cache: Cache) -> int:
    try:
        return cpusets.parse_list(cache.cpus)
    except ValueError:
        return 0


def _size(text: str) -> str:
    """Return the kernel's `107520K` as `105 MiB`."""
    found = re.fullmatch(r"(\d{1,9})K", text)
    if not found:
        return _short(text) or "of unknown size"
    kib = int(found[1])
    return f"{kib / 1024:g} MiB" if kib >= 1024 and kib % 512 == 0 else f"{kib} KiB"


def _link(device: PciDevice) -> str:
    speed = f"{device.max_speed_gts:g} GT/s" if device.max_speed_gts else ""
    return " ".join(filter(None, (f"x{device.width}" if device.width else "", speed)))


def _short(text: str, most: int = _MAX_NAME) -> str:
    return shortened(text, max_letters=most)
