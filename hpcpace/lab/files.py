"""Every file of a lab, as properties of one class: below /run, so that a reboot, which ends a lab, removes them too."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcpace.config import check_lab_name
from hpcpace.errors import UsageError

BASE = Path("/run/hpcpace-lab")


def check_base() -> None:
    """Refuse a folder of labs that somebody else could have made or could write to: labs are root's.

    Raises:
        UsageError: it is such a folder; where there is none nothing is refused.
    """
    try:
        found = os.lstat(BASE)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{BASE} is no folder: remove it, labs are kept there")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{BASE} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, so that others than "
            "root can write there: remove it, labs are kept there"
        )


@contextmanager
def writable_to_owner_only() -> Iterator[None]:
    """Let nobody else write to what this process and its children make meanwhile, whatever the umask."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


@dataclass(frozen=True)
class LabFiles:
    """The folder of a lab."""

    folder: Path

    @classmethod
    def of(cls, name: str) -> LabFiles:
        """Return the files of the lab of this name.

        Raises:
            ConfigError: it cannot be a lab's, such as `../lock`: the folder is removed in the end.
            UsageError: others than root can write to the folder of all labs.
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
        """Held while a lab is brought up or down; beside the folder, because the folder goes."""
        return self.folder.with_name(f"{self.name}.lock")

    @property
    def config_json(self) -> Path:
        """The settings that it was started with."""
        return self.folder / "config.json"

    @property
    def anchor_json(self) -> Path:
        """The process that holds the namespaces."""
        return self.folder / "anchor.json"

    @property
    def ready_json(self) -> Path:
        """Written when every host took jobs."""
        return self.folder / "ready.json"

    @property
    def truth(self) -> Path:
        """The log of truth, one JSON object a line."""
        return self.folder / "truth.jsonl"

    @property
    def hosts_file(self) -> Path:
        """What the lab's processes see as /etc/hosts."""
        return self.folder / "etc-hosts"

    @property
    def faults_dir(self) -> Path:
        """One JSON file a fault."""
        return self.folder / "faults"

    def fault_json(self, fault_id: str) -> Path:
        """Return the file of a fault."""
        return self.faults_dir / f"{fault_id}.json"

    @property
    def pids_dir(self) -> Path:
        """The first process of each host, by its number in the lab's PID namespace."""
        return self.folder / "pids"

    def pid(self, host: str) -> Path:
        """Return the file with the number of a host's first process."""
        return self.pids_dir / host

    @property
    def mounts_dir(self) -> Path:
        """Where hosts prepare their own /tmp."""
        return self.folder / "mounts"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.folder / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Read by slurmd from beside slurm.conf."""
        return self.folder / "cgroup.conf"

    @property
    def topology_conf(self) -> Path:
        """Read by slurmctld from beside slurm.conf."""
        return self.folder / "topology.conf"

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

    def daemon_pid(self, daemon: str) -> Path:
        """Return the file with the number of munged or slurmctld in the lab's PID namespace."""
        return self.folder / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon, or of a host."""
        return self.folder / f"{daemon}.log"
