"""A lab as its settings describe it: hosts, links, its files, and its log of truth.

The log has one JSON object per line with `event`, `unix_ns` and `monotonic_ns` (the machine's CLOCK_MONOTONIC; a host's
clock is ahead of it by the host's `clock_offset_s`). It is kept in the lab's folder, outside every run directory, and
only the lab's own commands and tests read it. All files are below /run, so that a reboot removes them with the lab.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcpace.core.codec import convert, parse_json
from hpcpace.core.errors import UsageError
from hpcpace.core.files import closing_descriptor
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction
from hpcpace.core.rundir import write_json
from hpcpace.core.text import parse_rate, parse_size
from hpcpace.lab.settings import LabConfig, check_lab_name

BASE = Path("/run/hpcpace-lab")


def check_base() -> None:
    """Refuse a base folder that anybody but root may have created or can write to.

    Raises:
        UsageError: it is such a folder; a missing folder is fine.
    """
    try:
        found = os.lstat(BASE)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{BASE} is not a folder: remove it, because labs are kept there")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{BASE} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, so users other than "
            "root can write there: remove it, because labs are kept there"
        )


@contextmanager
def writable_to_owner_only() -> Iterator[None]:
    """Make everything that this process and its children create meanwhile writable to its owner only."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


class _Inside:
    """A file of a lab by its name in the lab's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: LabFiles, owner: type[LabFiles]) -> Path:
        return files.folder / self._name


class LabFiles:
    """Every file of a lab.

    Args:
        folder: of the lab.
    """

    config_json = _Inside("config.json")
    """The settings that the lab was started with."""
    anchor_json = _Inside("anchor.json")
    """The process that holds the namespaces."""
    ready_json = _Inside("ready.json")
    """Written once every host accepts jobs."""
    truth = _Inside("truth.jsonl")
    """The log of truth, one JSON object per line."""
    hosts_file = _Inside("etc-hosts")
    """The lab's /etc/hosts."""
    faults_dir = _Inside("faults")
    """One JSON file per fault."""
    pids_dir = _Inside("pids")
    """The first process of each host, by its PID in the lab's PID namespace."""
    mounts_dir = _Inside("mounts")
    """Where hosts mount their own /tmp."""
    slurm_conf = _Inside("slurm.conf")
    """The file that SLURM_CONF names; slurmd and slurmctld read the next two from its folder."""
    cgroup_conf = _Inside("cgroup.conf")
    topology_conf = _Inside("topology.conf")
    munge_key = _Inside("munge.key")
    munge_socket = _Inside("munge.socket")
    state_dir = _Inside("state")
    """The state of slurmctld."""
    clock_library = _Inside("host_clock.so")
    """What all processes of the lab preload, so that clocks of hosts can be stepped; missing if it was not compiled."""
    finished_jobs = _Inside("jobs.txt")
    """One line per finished job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, name: str) -> LabFiles:
        """Return the files of the lab with this name.

        Raises:
            ConfigError: the name is invalid, such as `../lock`: the folder is removed in the end.
            UsageError: users other than root can write to the folder of all labs.
        """
        check_lab_name(name)
        check_base()
        return cls(BASE / name)

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.folder.name

    @property
    def lock(self) -> Path:
        """Lock held while a lab is brought up or down; next to the folder, because that is removed."""
        return self.folder.with_name(f"{self.name}.lock")

    def fault_json(self, fault_id: str) -> Path:
        """Return the file of a fault."""
        return self.faults_dir / f"{fault_id}.json"

    def pid(self, host: str) -> Path:
        """Return the file with the PID of a host's first process."""
        return self.pids_dir / host

    def spool_dir(self, node: str) -> Path:
        """Return the spool folder of a node."""
        return self.folder / f"spool-{node}"

    def daemon_pid(self, daemon: str) -> Path:
        """Return the file with the PID of munged or slurmctld in the lab's PID namespace."""
        return self.folder / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon, or of a host."""
        return self.folder / f"{daemon}.log"


def write_config(files: LabFiles, config: LabConfig) -> None:
    """Save the settings of a lab."""
    write_json(files.config_json, dataclasses.asdict(config))


def read_config(files: LabFiles) -> LabConfig:
    """Return the settings that a lab was started with."""
    return convert(parse_json(files.config_json.read_text()), LabConfig)


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
        """A sentence on why speeds of computation mean nothing; empty if each claimed CPU is a core."""
        cores = os.cpu_count() or 1
        if self.num_cpus <= cores:
            return ""
        return (
            f"the hosts claim {self.num_cpus} CPUs and this machine has {cores}: ranks share cores, so the speed of "
            "computation means nothing"
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

    def switch_above(self, link: Link) -> str:
        """Return the switch at the upper end of a link."""
        return SPINE if link.name in self.leaves else self.host(link.name).leaf


CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"
NODE_TIMEOUT_S = 30
KILL_WAIT_S = 15
"""Seconds from SIGTERM to SIGKILL, long enough for a report."""


def slurm_conf(plan: LabPlan, files: LabFiles, *, first_job_id: int = 1) -> str:
    """Return slurm.conf for a cluster with one partition.

    Args:
        plan: plan of the lab.
        files: files of the lab.
        first_job_id: id of the first job.
    """
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{CONTROLLER}({CONTROLLER_ADDRESS})",
        "FirstJobId": first_job_id,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job is held until its credential expires, by default after 120 s.
        "AuthInfo": f"socket={files.munge_socket},cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": files.state_dir,
        "SlurmdSpoolDir": files.spool_dir("%n"),
        "SlurmctldPidFile": files.daemon_pid("slurmctld"),
        "SlurmdPort": SLURMD_PORT,
        "SlurmdPidFile": files.folder / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        # task/affinity refuses more tasks on a node than the machine has cores.
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # Use the number of CPUs in this file, whatever the machine has.
        "SlurmdParameters": "config_overrides",
        # Sets SLURM_TOPOLOGY_ADDR, which shows jobs where their nodes are in the network.
        "TopologyPlugin": "topology/tree",
        # The controller contacts every node directly, so that a dead node does not cut off others.
        "TreeWidth": 256,
        # A dead node is noticed after this time instead of the default 300 s.
        "SlurmdTimeout": NODE_TIMEOUT_S,
        # Refuse a job that can never start; otherwise it would wait forever.
        "EnforcePartLimits": "ALL",
        "ReturnToService": 2,
        "JobAcctGatherType": "jobacct_gather/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": files.finished_jobs,
        "MailProg": "/bin/true",
        # The protocol of the MPICH wheel.
        "MpiDefault": "pmi2",
        "SwitchType": "switch/none",
        "KillWait": KILL_WAIT_S,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={plan.config.cpus_per_host} State=UNKNOWN"
        for host in plan.hosts
    ]
    lines.append("PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def topology_conf(plan: LabPlan) -> str:
    """Return topology.conf: which nodes are connected to which leaf."""
    lines = [
        f"SwitchName={leaf} Nodes={','.join(host.name for host in plan.hosts if host.leaf == leaf)}"
        for leaf in plan.leaves
    ]
    lines.append(f"SwitchName={SPINE} Switches={','.join(plan.leaves)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class TruthLog:
    """The log file, to which several processes append."""

    path: Path

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with the current time, secrets redacted."""
        entry = {"event": event, "unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns(), **facts}
        line = json.dumps(Redaction().content(entry), sort_keys=True) + "\n"
        # A single write to a file opened for appending: lines of two processes do not mix.
        with closing_descriptor(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)) as descriptor:
            os.write(descriptor, line.encode())

    def write_lab(self, plan: LabPlan) -> None:
        """Append the lab itself: settings, hosts with their clocks, and links."""
        self.write(
            "lab",
            config=dataclasses.asdict(plan.config),
            hosts=[dataclasses.asdict(host) for host in plan.hosts],
            links=[dataclasses.asdict(link) for link in plan.links.values()],
            emulation=plan.emulation,
        )

    def read(self) -> list[dict[str, Any]]:
        """Return all events, the oldest first."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]
