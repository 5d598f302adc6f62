"""Where traces are while a job runs if `trace.trace_dir` is auto: the first usable disk of the node itself.

A disk is usable if its file system is known to be on a local device, it takes files and has room. A file system in
memory, as /dev/shm is, does not count: what is written there is memory of the job, which could cost its life.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

AUTO = Path("auto")
"""The value of `trace.trace_dir` that has a disk searched for."""

_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_FOLDERS = ("/tmp", "/var/tmp")
# Any other may be over the network, whatever it is called.
_LOCAL = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "overlay"])
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))
_LEAST_BYTES_OF_RANK = 256 << 20
_MOUNTS = Path("/proc/self/mountinfo")


def find_node_local_disk(environ: Mapping[str, str], num_ranks: int, *, mounts: Path = _MOUNTS) -> Path:
    """Return a folder on a disk of this node.

    Args:
        environ: may name folders in SLURM_TMPDIR and TMPDIR; then come /tmp and /var/tmp.
        num_ranks: number of ranks on this node, which share the disk.
        mounts: the mounts of this process, as in proc(5).

    Raises:
        OSError: there is none; its text says why, folder by folder.
    """
    objections = []
    for name, folder in candidates(environ):
        objection = _objection(folder, num_ranks, mounts)
        if not objection:
            return folder
        objections.append(f"{name} {objection}")
    raise OSError("; ".join(objections))


def candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the folders that may be on a disk of the node, each once, and what to call them."""
    seen = set()
    named = [(f"{name}={environ[name]}", environ[name]) for name in _VARIABLES if environ.get(name)]
    for name, text in (*named, *((folder, folder) for folder in _FOLDERS)):
        folder = Path(os.path.realpath(text))
        if folder not in seen:
            seen.add(folder)
            yield name, folder


def _objection(folder: Path, num_ranks: int, mounts: Path) -> str:
    try:
        if not folder.is_dir():
            return "is no folder"
        kind = file_system(folder, mounts.read_text(encoding="utf-8", errors="surrogateescape"))
        if kind in _IN_MEMORY:
            return f"is in memory ({kind})"
        if kind not in _LOCAL:
            return f"is on {kind or 'an unknown file system'}, not on a local disk"
        if not os.access(folder, os.W_OK | os.X_OK):
            return "takes no files of ours"
        room = os.statvfs(folder)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    free, least = room.f_bavail * room.f_frsize, num_ranks * _LEAST_BYTES_OF_RANK
    if free < least or (room.f_files and not room.f_favail):
        return f"has {free >> 20} MiB free, which is less than the {least >> 20} MiB for {num_ranks} ranks"
    return "is read-only" if room.f_flag & os.ST_RDONLY else ""


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that a folder is on; empty if no mount has it.

    Args:
        folder: its real path.
        mounts: the content of /proc/self/mountinfo.
    """
    found, longest = "", -1
    for line in mounts.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        # Blanks in a path are written as octal numbers.
        point = Path(fields[4].encode("latin-1", "backslashreplace").decode("unicode_escape"))
        # Of two mounts at one place, the later one is seen.
        if (point == folder or point in folder.parents) and len(point.parts) >= longest:
            found, longest = source.split()[0], len(point.parts)
    return found
