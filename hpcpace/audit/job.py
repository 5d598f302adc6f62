"""The job and its hosts as rules see them: snapshots, what follows from them, logs of NCCL, matrices of links.

All versions are read: adapters as mlx5_0 or as NIC0 with a legend, with or without CPU and NUMA affinity, with tabs or
pasted with spaces, in colours, several hosts in one file with the prefixes of pdsh or srun.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from hpcpace.audit import cpusets
from hpcpace.audit.facts import (
    NO_REASON,
    HardwareView,
    NetDevice,
    PciDevice,
    RankFacts,
    RdmaDevice,
    RdmaPort,
    Snapshot,
    hardware_view,
    parsed,
)
from hpcpace.audit.nccl_log import NcclLog
from hpcpace.audit.settings import AuditConfig
from hpcpace.audit.tree import Unreadable
from hpcpace.core.errors import UsageError
from hpcpace.core.log_text import front_of, log_lines, without_colours
from hpcpace.core.records import dataclass
from hpcpace.core.text import printable

T = TypeVar("T")

_SLINGSHOT = "0x17db"
# Interfaces made by containers, virtual machines and VPNs: they carry none of a job's traffic between hosts.
_NOT_BETWEEN_HOSTS = re.compile(
    r"(lo|docker|veth|br-|virbr|vnet|cni|flannel|cali|tunl|tap|tun|wg|ifb|dummy|podman|bonding)"
)


@dataclass(frozen=True, kw_only=True)
class FabricPort:
    """One port that ranks can communicate over, by RDMA or Slingshot."""

    device: str
    number: int
    pci: str
    is_active: bool

    @cached_property
    def name(self) -> str:
        """The port as findings name it: `mlx5_0 port 1`."""
        return f"{self.device} port {self.number}" if self.number else self.device


class AuditedHost:
    """One host: its snapshot, and what rules derive from it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.name = snapshot.host
        self.hardware: HardwareView = hardware_view(snapshot.hardware)
        self.masks: dict[tuple[int | None, bool], tuple[int, ...]] = {}
        """The results of `bind_masks`, by its arguments."""

    @property
    def ranks(self) -> tuple[RankFacts, ...]:
        """Ranks on this host."""
        return self.snapshot.ranks

    def reason(self, *names: str) -> str:
        """Return why the first of these facts that is missing could not be read."""
        for name in names:
            if name in self.snapshot.unreadable:
                return self.snapshot.unreadable[name]
        return NO_REASON

    def explain(self, error: Unreadable) -> str:
        """Return an error's message, completed by the reason that the snapshot gives for its fact."""
        reason = self.snapshot.unreadable.get(error.fact)
        return f"{error}: {reason}" if reason else str(error)

    def unreadable(self, what: str, *names: str) -> Unreadable:
        """Return the error for a fact that could not be read: `what`, and the reason that the snapshot gives."""
        return Unreadable(f"{what}: {self.reason(*names)}")

    def known(self, fact: T | None, what: str, *names: str) -> T:
        """Return a fact.

        Raises:
            Unreadable: it could not be read; see `unreadable`.
        """
        if fact is None:
            raise self.unreadable(what, *names)
        return fact

    @cached_property
    def has_gpus(self) -> bool:
        """Whether the node has GPUs.

        Raises:
            Unreadable: neither PCI nor a driver says so.
        """
        return bool(self.known(self.snapshot.gpus, "whether there are GPUs", "gpus", "pci"))

    @cached_property
    def has_nvidia(self) -> bool:
        """Whether NVIDIA's driver has GPUs."""
        driver = self.snapshot.kernel.nvidia_driver
        return self.has_gpus and bool(self.known(driver, "NVIDIA's driver", "kernel/nvidia_driver"))

    @cached_property
    def rdma(self) -> tuple[RdmaDevice, ...]:
        """RDMA adapters."""
        return self.known(self.snapshot.rdma, "the RDMA adapters", "rdma")

    @cached_property
    def net(self) -> tuple[NetDevice, ...]:
        """Network interfaces."""
        return self.known(self.snapshot.net, "the network interfaces", "net")

    @cached_property
    def rdma_ports(self) -> list[tuple[RdmaDevice, RdmaPort]]:
        """Ports of the RDMA adapters."""
        return [(device, port) for device in self.rdma for port in device.ports]

    @cached_property
    def has_active_port(self) -> bool:
        """Whether a port of an RDMA adapter is active."""
        return any(port.state == "ACTIVE" for _, port in self.rdma_ports)

    @cached_property
    def fabric(self) -> list[FabricPort]:
        """Ports that ranks can communicate over: those of RDMA adapters, and Slingshot interfaces."""
        ports = [
            FabricPort(device=device.name, number=port.number, pci=device.pci or "", is_active=port.state == "ACTIVE")
            for device, port in self.rdma_ports
        ]
        known = {port.pci for port in ports}
        for device in self.hardware.of_kind("nic"):
            if device.vendor == _SLINGSHOT and device.address not in known:
                ports += [
                    FabricPort(device=net.name, number=0, pci=device.address, is_active=net.state == "up")
                    for net in self.net
                    if net.pci == device.address
                ]
        return ports

    @cached_property
    def between_hosts(self) -> list[NetDevice]:
        """Interfaces that are up and may carry traffic between hosts."""
        return [
            net
            for net in self.net
            if net.kind != "loopback" and net.state in ("up", "unknown") and not _NOT_BETWEEN_HOSTS.match(net.name)
        ]

    def net_of(self, device: RdmaDevice, port: RdmaPort) -> list[NetDevice]:
        """Return the network interfaces of a port of an RDMA adapter."""
        names = {gid.net for gid in port.gids if gid.net}
        return [net for net in self.net if net.name in names or (not names and net.pci and net.pci == device.pci)]

    @cached_property
    def has_gdr(self) -> bool | None:
        """Whether GPUDirect RDMA can work; None if that is not known, or these GPUs are not NVIDIA's or AMD's."""
        kernel = self.snapshot.kernel
        if kernel.modules is None or kernel.nvidia_driver is None:
            return None
        if not kernel.nvidia_driver:
            return True if "amdgpu" in kernel.modules else None
        return has_peermem(kernel.modules) or self.has_dmabuf

    @cached_property
    def has_dmabuf(self) -> bool:
        """Whether the kernel exports GPU memory by dma-buf: Linux 5.12 or newer with NVIDIA's open module."""
        kernel = self.snapshot.kernel
        found = re.match(r"(\d{1,3})\.(\d{1,4})", kernel.release or "")
        return bool(kernel.is_nvidia_open and found and (int(found[1]), int(found[2])) >= (5, 12))

    def mask(self, rank: RankFacts) -> int:
        """Return the CPU mask of a rank.

        Raises:
            Unreadable: it is not known.
        """
        fact = f"rank/{rank.rank}"
        return parsed(self.known(rank.cpus, "its CPUs", f"{fact}/cpus", f"{fact}/status"), "its CPUs")

    def gpu_address(self, rank: RankFacts) -> str | None:
        """Return the PCI address of the GPU that a rank uses; None if the node has no GPU, or the rank sees none.

        Raises:
            Unreadable: the GPU is not known.
        """
        if not self.has_gpus or rank.gpus == ():
            return None
        if rank.gpus is None:
            raise Unreadable("its GPU: Slurm binds one to each task, and NVML did not say which")
        if not 0 <= rank.gpu < len(rank.gpus):
            raise Unreadable(f"its GPU: it sees {len(rank.gpus)}, and its local rank is {rank.local_rank}")
        address = rank.gpus[rank.gpu].address
        if not address:
            raise Unreadable("its GPU: it uses a MIG partition")
        return address


def has_peermem(modules: Collection[str]) -> bool:
    """Return whether a peer-memory module for NVIDIA's GPUs is among some kernel modules."""
    return "nvidia_peermem" in modules or "nv_peer_mem" in modules


class AuditedJob:
    """All hosts of an audit in natural order of their names, the settings, and what logs and matrices say if given."""

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        settings: AuditConfig | None = None,
        nccl_log: NcclLog | None = None,
        topo: Sequence[TopoMatrix] = (),
    ) -> None:
        self.hosts = sorted((AuditedHost(snapshot) for snapshot in snapshots), key=lambda host: natural(host.name))
        self.settings = settings or AuditConfig()
        self.nccl_log = nccl_log
        self.topo = tuple(topo)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all hosts: those audited, and others that a log or matrix names."""
        others = [*(self.nccl_log.hosts if self.nccl_log else ()), *(matrix.host for matrix in self.topo)]
        named = sorted((self.name_of(name) for name in others if name), key=natural)
        return tuple(dict.fromkeys([*(host.name for host in self.hosts), *named]))

    @property
    def num_ranks(self) -> int:
        """Ranks of the audited hosts; those of the log if no host is audited."""
        if not self.hosts and self.nccl_log is not None:
            return self.nccl_log.num_ranks
        return sum(len(host.ranks) for host in self.hosts)

    def name_of(self, host: str) -> str:
        """Return the name of a host of the log as the audited hosts have it: NCCL leaves out the domain."""
        return self._by_short_name.get(host.partition(".")[0], host)

    @cached_property
    def _by_short_name(self) -> dict[str, str]:
        return {host.name.partition(".")[0]: host.name for host in self.hosts}

    @property
    def has_many_hosts(self) -> bool:
        """Whether ranks communicate over the network."""
        return len(self.hosts) > 1 or any(
            rank.world_size > len(host.ranks) for host in self.hosts for rank in host.ranks[:1]
        )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts n2 before n10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"[0-9]{1,18}|[^0-9]+", name))


def rank_place(rank: RankFacts) -> str:
    """Return the place of a rank on its host; the same local rank has the same text on every host."""
    return f"local rank {rank.local_rank}" if rank.local_rank >= 0 else f"rank {rank.rank}"


def device_place(device: PciDevice) -> str:
    """Return the place of a GPU or an adapter on its host."""
    return f"{'GPU' if device.kind == 'gpu' else 'NIC'} {printable(device.address)}"


_MAX_DEVICES = 512
_MAX_LINES = 100_000
_GPU = re.compile(r"GPU(\d{1,3})")
_DEVICE = re.compile(r"[A-Za-z_]{1,60}\d[\w.\-]{0,60}")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CELL = re.compile(r"X|SELF|NV\d{1,3}|NV#|PIX|PXB|PHB|NODE|SYS|SOC|XGMI|PCIE|DIS|NS|N/A|OK", re.IGNORECASE)
_LEGEND = re.compile(r"^\s*(NIC\d{1,3}) ?: ?(\S{1,60})\s*$")
_CUT = "the matrix is cut or wrapped, save it again with nvidia-smi topo -m > FILE"


@dataclass(frozen=True, kw_only=True)
class TopoMatrix:
    """The matrix of one host.

    Attributes:
        host: its name, where the text has it as a prefix; else empty.
        source: file and line of its header.
        columns: what the header names.
        paths: class by row and column, like `NV18`, `PIX`, `SYS`, `XGMI`; `SOC` of old drivers is `SYS`.
        cpus: CPUs near each GPU; None where the text does not say, 0 where it says that there are none.
        names: what NIC0 and so on are.
        lines: the line of each GPU as it was read.
    """

    host: str
    source: str
    columns: tuple[str, ...] = ()
    paths: dict[str, dict[str, str]] = field(default_factory=dict)
    cpus: dict[str, int | None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        """The GPUs, in the order of their numbers."""
        return [name for name in self.paths if _GPU.fullmatch(name)]

    @property
    def nics(self) -> list[str]:
        """The adapters that the GPUs have a path to."""
        columns = next((self.paths[gpu] for gpu in self.gpus), {})
        return [name for name in columns if not _GPU.fullmatch(name)]

    def num_links(self, gpu: str, other: str) -> int:
        """Return the number of NVLinks between two GPUs; 1 for XGMI, whose number is not printed."""
        path = self.paths[gpu].get(other, "")
        return 1 if path == "XGMI" else int(path[2:]) if re.fullmatch(r"NV\d+", path) else 0


def read_topo(*paths: Path) -> tuple[TopoMatrix, ...]:
    """Return the matrices in some files.

    Raises:
        UsageError: a file cannot be read, has no matrix, or one whose rows do not fit its header.
    """
    made: list[TopoMatrix] = []
    for path in paths:
        try:
            lines = [
                (number, without_colours(line).decode("utf-8", "replace")) for number, line in _bounded(log_lines(path))
            ]
        except (OSError, EOFError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read --topo {path}: {printable(reason)}") from error
        found = list(_matrices(path, lines))
        if not found:
            raise UsageError(f"{path} has no matrix of GPUs: save the output of nvidia-smi topo -m in it")
        made += found
    return tuple(made)


def _bounded(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    for count, line in enumerate(lines):
        if count > _MAX_LINES:
            raise ValueError(f"more than {_MAX_LINES} lines")
        yield line


def _matrices(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[TopoMatrix]:
    """Yield the matrices of a file that have links; those of weights and hops have numbers only."""
    made: dict[str, list[TopoMatrix]] = {}
    known: list[tuple[object, ...]] = []
    for number, raw in lines:
        text = raw.lstrip("\ufeff").rstrip("\r\n")
        front = front_of(text)
        labels, text = ("", text) if _LEGEND.match(text) else (" ".join(front.labels.split()), front.text)
        columns = _header(text)
        if columns:
            host = front.host or ("" if front.task is None else str(front.task))
            made.setdefault(labels, []).append(
                TopoMatrix(host=printable(host), source=f"{path.name}:{number}", columns=tuple(columns))
            )
        elif found := _LEGEND.match(text):
            for matrix in made.get(labels, [])[-1:]:
                matrix.names[found[1]] = printable(found[2])
        elif labels in made:
            _row(made[labels][-1], text, f"{path.name}:{number}")
    for matrix in (matrix for matrices in made.values() for matrix in matrices if matrix.gpus):
        missing = [name for name in matrix.columns if _GPU.fullmatch(name) and name not in matrix.paths]
        if missing:
            raise UsageError(f"{matrix.source}: {missing[0]} has no row: {_CUT}")
        # Each task of a host may have printed the same one.
        seen = (matrix.host, matrix.columns, matrix.paths, matrix.cpus)
        if not matrix.host or seen not in known:
            known.append(seen)
            yield matrix


def _header(text: str) -> list[str]:
    """Return the columns of a header; empty if the line is none."""
    affinity = re.compile("|".join(name.replace(" ", r"\s+") for name in reversed(_AFFINITY)))
    found = [" ".join(name.split()) for name in affinity.findall(text)]
    devices = affinity.sub(" ", text).split()
    are_names = all(_DEVICE.fullmatch(word) and not _CELL.fullmatch(word) for word in devices)
    has_gpu = any(_GPU.fullmatch(word) for word in devices)
    return [*devices, *found] if are_names and has_gpu and len(devices) <= _MAX_DEVICES else []


def _row(matrix: TopoMatrix, text: str, place: str) -> None:
    """Add a row; lines that are none are passed over.

    Raises:
        UsageError: it is one, and has another number of devices than the header.
    """
    devices = [name for name in matrix.columns if name not in _AFFINITY]
    words = text.split()
    if not words or words[0] not in devices or len(words) < 2 or not _CELL.fullmatch(words[1]):
        # rocm-smi has a row for each GPU, with 0 for itself.
        if not words or words[0] not in devices or len(words) != len(devices) + 1 or "0" not in words[1:]:
            return
        if all(word.isdigit() for word in words[1:]):
            return
    cells = words[1 : len(devices) + 1]
    if len(cells) < len(devices) or not all(_CELL.fullmatch(cell) or cell == "0" for cell in cells):
        count = sum(bool(_CELL.fullmatch(cell)) for cell in cells)
        raise UsageError(f"{place}: {words[0]} has {count} of {len(devices)} paths: {_CUT}")
    name = words[0]
    matrix.paths[name] = {
        device: cell.upper().replace("SOC", "SYS")
        for device, cell in zip(devices, cells, strict=True)
        if device != name
    }
    if not _GPU.fullmatch(name):
        return
    matrix.lines[name] = f"{place}: {printable(' '.join(words))[:200]}"
    near = _near(
        text, words[len(devices) + 1 :], [column for column in matrix.columns if column in _AFFINITY], len(devices)
    )
    if "CPU Affinity" in near:
        matrix.cpus[name] = _cpus(near["CPU Affinity"])


def _near(text: str, words: Sequence[str], columns: Sequence[str], num_devices: int) -> dict[str, str]:
    """Return the affinities of a row: by tabs where there are any, since cells may be empty; else by their number."""
    cells = [cell.strip() for cell in text.rstrip("\t ").split("\t")]
    if len(cells) > num_devices:
        values = cells[num_devices + 1 :]
        return {name: values[place] if place < len(values) else "" for place, name in enumerate(columns)}
    return dict(zip(columns, words, strict=True)) if len(words) == len(columns) else {}


def _cpus(text: str) -> int | None:
    if text in ("", "N/A"):
        return 0
    try:
        return cpusets.parse_list(text)
    except ValueError:
        return None
