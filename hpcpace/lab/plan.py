"""A lab as its settings describe it: hosts, switches, links, and the true clock offsets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpcpace.config import LabConfig
from hpcpace.errors import UsageError
from hpcpace.units import parse_rate, parse_size

SPINE = "spine"
CONTROLLER = "login"
"""Host name where slurmctld runs, and where `hpcpace lab run` runs commands."""
CONTROLLER_ADDRESS = "10.77.255.1"
PREFIX_LENGTH = 16
SLURMD_PORT = 6818


def hardware_address(address: str) -> str:
    """Return the Ethernet address that goes with an IPv4 address.

    A host that boots again keeps it, because others cache it for minutes.
    """
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """A compute node.

    Attributes:
        name: its name in Slurm, and its host name.
        address: IPv4 address of its eth0.
        leaf: the switch that it is connected to.
        clock_offset_s: its CLOCK_MONOTONIC minus the machine's.
    """

    name: str
    address: str
    leaf: str
    clock_offset_s: int

    @property
    def hardware_address(self) -> str:
        """Ethernet address of its eth0."""
        return hardware_address(self.address)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link, named after its lower end: `n3` for a host's link, `leaf1` for the uplink of a leaf.

    Attributes:
        upper: network device at the switch above.
        lower: network device at the lower end; for a host it is in the host's network namespace.
        rate_bps: rate in each direction, in bits per second.
    """

    name: str
    upper: str
    lower: str
    rate_bps: int


@dataclass(frozen=True)
class LabPlan:
    """Everything that follows from the settings of a lab."""

    config: LabConfig

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """Names of the leaf switches."""
        return tuple(f"leaf{number}" for number in range(1, self.config.leaves + 1))

    @cached_property
    def hosts(self) -> tuple[LabHost, ...]:
        """The hosts, distributed over the leaves in blocks whose sizes differ by at most one."""
        config = self.config
        return tuple(
            LabHost(
                name=f"n{index + 1}",
                address=f"10.77.0.{index + 1}",
                leaf=self.leaves[index * config.leaves // config.hosts],
                clock_offset_s=config.clock_step_s * (index + 1),
            )
            for index in range(config.hosts)
        )

    @cached_property
    def links(self) -> dict[str, Link]:
        """The links by name, hosts first, then uplinks."""
        host_bps, uplink_bps = parse_rate(self.config.link), parse_rate(self.config.uplink)
        links = [Link(name=h.name, upper=h.name, lower="eth0", rate_bps=host_bps) for h in self.hosts]
        links += [
            Link(name=leaf, upper=f"{SPINE}-{leaf}", lower=f"{leaf}-up", rate_bps=uplink_bps) for leaf in self.leaves
        ]
        return {link.name: link for link in links}

    @property
    def tmp_size_bytes(self) -> int:
        """Size of each host's own /tmp."""
        return parse_size(self.config.tmp_size)

    @property
    def num_cpus(self) -> int:
        """Number of CPUs that all hosts together claim."""
        return self.config.hosts * self.config.cpus_per_host

    @property
    def emulation(self) -> str:
        """A sentence on how computation is emulated; empty if each claimed CPU is a core."""
        cores = os.cpu_count() or 1
        if self.num_cpus <= cores:
            return ""
        return (
            f"the hosts claim {self.num_cpus} CPUs and this machine has {cores}: ranks share cores, so computation is "
            "emulated and its speed means nothing"
        )

    def hosts_see(self, folder: Path) -> bool:
        """Return whether the hosts see a folder of the machine: all except those below /tmp that are not shared."""
        above = {folder, *folder.parents}
        return Path("/tmp") not in above or bool(above & set(map(Path, self.config.share)))

    def host(self, name: str) -> LabHost:
        """Return a host by name.

        Raises:
            UsageError: no such host or link.
        """
        found = next((host for host in self.hosts if host.name == name), None)
        if found is None:
            raise UsageError(
                f"no host {name!r} in this lab: the hosts are {self.hosts[0].name} to {self.hosts[-1].name}"
            )
        return found

    def link(self, name: str) -> Link:
        """Return a link by name.

        Raises:
            UsageError: no such host or link.
        """
        if name not in self.links:
            raise UsageError(
                f"no link {name!r} in this lab: a host's link is named after the host ({self.hosts[0].name} to "
                f"{self.hosts[-1].name}), an uplink after its leaf ({', '.join(self.leaves)})"
            )
        return self.links[name]
