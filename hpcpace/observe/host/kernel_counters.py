"""Counters that the kernel keeps in files, and those of the cgroups of this process: pressure, and CPU quotas.

Reading one costs some microseconds. A counter that a kernel lacks, or that says nothing sensible, reads as zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcpace.core.text import NS_PER_US
from hpcpace.trace.schema import MILLICORES

_TOTAL = re.compile(rb"^some\b.*\btotal=(\d{1,18})\s*$", re.MULTILINE)
# Of cgroup v2, and of v1 (Documentation/scheduler/sched-bwc.rst).
_THROTTLED = re.compile(rb"^(throttled_usec|throttled_time) (\d{1,18})\s*$", re.MULTILINE)
_MAX_LEVELS = 16  # of nested cgroups: each costs a file a second
_MAX_THROTTLED_NS = 1 << 60  # beyond what a counter can have reached


def read_counter(path: Path) -> bytes:
    """Return the content of a file of procfs or of a cgroup; empty if it cannot be read."""
    # Without the buffer and the text layer of `read_text`, which cost more than the kernel's part.
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


class Pressure:
    """CPU pressure of the cgroup of this process, or else of its host.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path, cgroup: Path) -> None:
        paths = [path for number, _, path in _memberships(proc) if number == "0"]
        candidates = [root / path / "cpu.pressure" for path in paths for root in (cgroup, cgroup / "unified")]
        candidates.append(proc / "pressure" / "cpu")
        # A kernel started with psi=0 has the files and refuses to read them.
        self._file = next((path for path in candidates if _TOTAL.search(read_counter(path))), None)

    def read_ns(self) -> int:
        """Return for how long some task waited for a core, cumulative, nanoseconds."""
        found = _TOTAL.search(read_counter(self._file)) if self._file is not None else None
        return int(found.group(1)) * NS_PER_US if found else 0


class CpuQuota(NamedTuple):
    """A CPU quota that stops this process.

    Attributes:
        file: that sets it, as this process sees it.
        millicores: thousandths of a core that it allows.
    """

    file: str
    millicores: int


class Throttling:
    """For how long CPU quotas have kept this process from running, and which ones: of its cgroup and those above it.

    A cgroup counts what its own quota does, not what those above it do.

    Args:
        proc: where procfs is mounted.
        cgroup: where the cgroup tree is mounted.
    """

    def __init__(self, *, proc: Path, cgroup: Path) -> None:
        self._folders = _cpu_folders(proc, cgroup)
        self._last_ns: dict[Path, int] = {}
        self._known: dict[Path, CpuQuota] = {}
        self._new: list[CpuQuota] = []

    def read_ns(self) -> int:
        """Return for how long quotas have stopped this process, cumulative, nanoseconds."""
        for folder in self._folders:
            found = _THROTTLED.search(read_counter(folder / "cpu.stat"))
            if found is None:
                continue
            now_ns = int(found.group(2)) * (NS_PER_US if found.group(1) == b"throttled_usec" else 1)
            # Only a quota that stops somebody is read.
            if now_ns > self._last_ns.get(folder, now_ns):
                self._look_at_quota(folder)
            self._last_ns[folder] = now_ns
        return min(sum(self._last_ns.values()), _MAX_THROTTLED_NS)

    def take_new(self) -> list[CpuQuota]:
        """Return the quotas that have stopped this process since the last call, and are new or have changed."""
        new, self._new = self._new, []
        return new

    def _look_at_quota(self, folder: Path) -> None:
        quota = _quota_of(folder)
        if quota is not None and self._known.get(folder) != quota:
            self._known[folder] = quota
            self._new.append(quota)


def _quota_of(folder: Path) -> CpuQuota | None:
    """Return the quota of a cgroup; None where it has none any more."""
    file = folder / "cpu.max"
    words = read_counter(file).split()
    if not words:
        file = folder / "cpu.cfs_quota_us"
        words = [*read_counter(file).split(), *read_counter(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdigit() and len(word) <= 15 for word in words) or not int(words[1]):
        return None
    return CpuQuota(str(file), MILLICORES * int(words[0]) // int(words[1]))


def _cpu_folders(proc: Path, cgroup: Path) -> list[Path]:
    """Return the folder of this process's cgroup in the tree that limits CPU time, and those above it."""
    for number, controllers, path in _memberships(proc):
        roots = [cgroup] if number == "0" else []
        if "cpu" in controllers:
            roots += [cgroup / ",".join(controllers), cgroup / "cpu"]
        for root in roots:
            if (root / path / "cpu.stat").is_file():
                return [root / path, *(above for above in (root / path).parents if above.is_relative_to(root))][
                    :_MAX_LEVELS
                ]
    return []


def _memberships(proc: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield number, controllers and path of each cgroup of this process."""
    for line in read_counter(proc / "self" / "cgroup").decode(errors="replace").splitlines():
        if line.count(":") >= 2:
            number, controllers, path = line.split(":", 2)
            yield number, controllers.split(","), path.lstrip("/")
