"""Every file of a lab as a property of one class; below /run, so that a reboot removes them with the lab."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.config import check_lab_name
from hpcpace.core.errors import UsageError

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


@dataclass(frozen=True)
class LabFiles:
    """The folder of a lab."""

    folder: Path

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

    @property
    def config_json(self) -> Path:
        """The settings that the lab was started with."""
        return self.folder / "config.json"

    @property
    def anchor_json(self) -> Path:
        """The process that holds the namespaces."""
        return self.folder / "anchor.json"

    @property
    def ready_json(self) -> Path:
        """Written once every host accepts jobs."""
        return self.folder / "ready.json"

    @property
    def truth(self) -> Path:
        """The log of truth, one JSON object per line."""
        return self.folder / "truth.jsonl"

    @property
    def hosts_file(self) -> Path:
        """The lab's /etc/hosts."""
        return self.folder / "etc-hosts"

    @property
    def faults_dir(self) -> Path:
        """Folder with one JSON file per fault."""
        return self.folder / "faults"

    def fault_json(self, fault_id: str) -> Path:
        """Return the file of a fault."""
        return self.faults_dir / f"{fault_id}.json"

    @property
    def pids_dir(self) -> Path:
        """Folder with the first process of each host, by its PID in the lab's PID namespace."""
        return self.folder / "pids"

    def pid(self, host: str) -> Path:
        """Return the file with the PID of a host's first process."""
        return self.pids_dir / host

    @property
    def mounts_dir(self) -> Path:
        """Where hosts mount their own /tmp."""
        return self.folder / "mounts"

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.folder / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Read by slurmd from the folder of slurm.conf."""
        return self.folder / "cgroup.conf"

    @property
    def topology_conf(self) -> Path:
        """Read by slurmctld from the folder of slurm.conf."""
        return self.folder / "topology.conf"

    @property
    def munge_key(self) -> Path:
        """Munge key of this cluster."""
        return self.folder / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Socket of munged."""
        return self.folder / "munge.socket"

    @property
    def state_dir(self) -> Path:
        """Folder with the state of slurmctld."""
        return self.folder / "state"

    @property
    def finished_jobs(self) -> Path:
        """One line per finished job."""
        return self.folder / "jobs.txt"

    def spool_dir(self, node: str) -> Path:
        """Return the spool folder of a node."""
        return self.folder / f"spool-{node}"

    def daemon_pid(self, daemon: str) -> Path:
        """Return the file with the PID of munged or slurmctld in the lab's PID namespace."""
        return self.folder / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon, or of a host."""
        return self.folder / f"{daemon}.log"
