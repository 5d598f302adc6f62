"""The configuration files of a lab's Slurm, as text, for Slurm 22.05 and later; nothing here touches the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A compute node as slurm.conf describes it."""

    name: str
    """Name in Slurm."""
    host_name: str
    """What `hostname` says there."""
    port: int
    """Port of its slurmd."""
    address: str = "127.0.0.1"
    """Address of its slurmd."""
    num_cpus: int = 8
    """CPUs that it claims; may be more than the machine has."""


@dataclass(frozen=True, kw_only=True)
class ClusterFiles:
    """Every file of a lab's Slurm, in one folder."""

    folder: Path

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.folder / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Read by slurmd from beside slurm.conf."""
        return self.folder / "cgroup.conf"

    @property
    def munge_key(self) -> Path:
        """Secret of this cluster."""
        return self.folder / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where clients and daemons reach munged."""
        return self.folder / "munge.socket"

    @property
    def state_dir(self) -> Path:
        """State of slurmctld."""
        return self.folder / "state"

    @property
    def finished_jobs(self) -> Path:
        """One line per finished job."""
        return self.folder / "jobs.txt"

    def spool_dir(self, node: str) -> Path:
        """Return the spool folder of a node."""
        return self.folder / f"spool-{node}"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon."""
        return self.folder / f"{daemon}.log"


def slurm_conf(files: ClusterFiles, *, controller: str, controller_port: int, nodes: Sequence[Node]) -> str:
    """Return slurm.conf for a cluster with one partition.

    Args:
        files: where everything lies.
        controller: host name of the machine that runs slurmctld; it is reached by the loopback address.
        controller_port: port of slurmctld.
        nodes: the compute nodes.
    """
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{controller}(127.0.0.1)",
        "SlurmctldPort": controller_port,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job is held until its credential has expired: 120 s unless set.
        "AuthInfo": f"socket={files.munge_socket},cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": files.state_dir,
        "SlurmdSpoolDir": files.spool_dir("%n"),
        "SlurmctldPidFile": files.folder / "slurmctld.pid",
        "SlurmdPidFile": files.folder / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        # task/affinity refuses more tasks on a node than the machine has cores.
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # Take the number of CPUs from this file, whatever the machine has.
        "SlurmdParameters": "config_overrides",
        # Refuse a job that can never start; else it would wait for ever.
        "EnforcePartLimits": "ALL",
        "ReturnToService": 2,
        "JobAcctGatherType": "jobacct_gather/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": files.finished_jobs,
        "MailProg": "/bin/true",
        # What the MPICH wheel speaks.
        "MpiDefault": "pmi2",
        "SwitchType": "switch/none",
        "KillWait": 5,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={node.name} NodeHostname={node.host_name} NodeAddr={node.address} Port={node.port} "
        f"CPUs={node.num_cpus} State=UNKNOWN"
        for node in nodes
    ]
    lines.append("PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"
