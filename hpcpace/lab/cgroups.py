"""A control group per host, to limit its CPU time and to freeze its processes.

Supports cgroup v1, with a folder in each controller's tree, and v2, with a single folder. Control groups are the only
part of a lab that the kernel does not remove with its processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.errors import HpcpaceError

_CONTROLLERS = ("cpu", "freezer")
# Short, so that a limited host runs slowly instead of being stopped for most of a training step.
_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000
_REMOVE_TIMEOUT_S = 10.0


def _trees(mounts: Path = Path("/proc/mounts")) -> dict[str, tuple[Path, bool]]:
    """Return the mount point of each controller's tree, and whether it is cgroup v2."""
    found: dict[str, tuple[Path, bool]] = {}
    unified: Path | None = None
    for line in mounts.read_text().splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            found |= {name: (Path(place), False) for name in _CONTROLLERS if name in options.split(",")}
        elif kind == "cgroup2":
            unified = unified or Path(place)
    if unified is not None:
        found = {name: found.get(name, (unified, True)) for name in _CONTROLLERS}
    return found


@dataclass(frozen=True)
class HostCgroup:
    """The control group of one host; `create` makes its folders."""

    lab: str
    host: str

    def folders(self) -> dict[str, tuple[Path, bool]]:
        """Return the folder of each controller, and whether it is cgroup v2."""
        return {name: (tree / f"hpcpace-lab-{self.lab}" / self.host, v2) for name, (tree, v2) in _trees().items()}

    def create(self) -> list[Path]:
        """Create the folders and return them."""
        places = self.folders()
        for folder, is_v2 in places.values():
            folder.mkdir(parents=True, exist_ok=True)
            if is_v2:
                _enable_cpu(folder)
        return self.paths()

    def paths(self) -> list[Path]:
        """Return the folders; a process joins by writing 0 to `cgroup.procs` in each."""
        return sorted({folder for folder, _ in self.folders().values()})

    def limit_cpu(self, cores: float | None) -> None:
        """Limit the host to this many cores' worth of CPU time; None removes the limit.

        Raises:
            HpcpaceError: the machine has no cpu controller.
        """
        folder, is_v2 = self._place("cpu", "limit CPU time")
        quota_us = -1 if cores is None else max(round(cores * _PERIOD_US), _LEAST_QUOTA_US)
        try:
            if is_v2:
                (folder / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} {_PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise HpcpaceError(f"cannot limit CPU time in {folder}: {error.strerror}") from error

    def freeze(self, frozen: bool) -> None:
        """Stop all processes of the host, or let them continue.

        Raises:
            HpcpaceError: the machine has no freezer controller.
        """
        folder, is_v2 = self._place("freezer", "freeze processes")
        name, words = ("cgroup.freeze", ("0", "1")) if is_v2 else ("freezer.state", ("THAWED", "FROZEN"))
        (folder / name).write_text(words[frozen])

    def _place(self, controller: str, purpose: str) -> tuple[Path, bool]:
        places = self.folders()
        if controller not in places:
            raise HpcpaceError(f"cannot {purpose}: this machine mounts no cgroup tree with the {controller} controller")
        return places[controller]


def remove_cgroups(lab: str) -> None:
    """Remove the folders that `HostCgroup.create` made for a lab, after its processes have ended.

    Raises:
        HpcpaceError: a folder still has processes.
    """
    deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
    for folder in _folders(lab):
        while folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise HpcpaceError(f"cannot remove {folder}: {error.strerror}") from error
                time.sleep(0.02)


def thaw_all(lab: str) -> None:
    """Let all frozen processes of a lab continue: with cgroup v1 a frozen process cannot die."""
    for folder in _folders(lab):
        if (folder / "freezer.state").exists() and os.access(folder / "freezer.state", os.W_OK):
            (folder / "freezer.state").write_text("THAWED")


def _folders(lab: str) -> Iterator[Path]:
    for tree in sorted({tree for tree, _ in _trees().values()}):
        parent = tree / f"hpcpace-lab-{lab}"
        if parent.is_dir():
            yield from sorted(path for path in parent.iterdir() if path.is_dir())
            yield parent


def _enable_cpu(folder: Path) -> None:
    for above in (folder.parent.parent, folder.parent):
        control = above / "cgroup.subtree_control"
        if "cpu" not in control.read_text().split():
            try:
                control.write_text("+cpu")
            except OSError:  # the lab works without; setting a limit fails later with the reason
                return
