"""Snapshots as files: a folder with one HOST.json for each host, in a run or anywhere else."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.schema import read_snapshot, snapshot_text
from hpcpace.errors import SnapshotError, UsageError
from hpcpace.rundir import RunDirectory


def save_snapshots(folder: Path, snapshots: Sequence[Snapshot]) -> list[Path]:
    """Write each snapshot as HOST.json.

    Raises:
        UsageError: the folder cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for snapshot in snapshots:
            path = folder / f"{file_name(snapshot.host)}.json"
            write_whole(path, snapshot_text(snapshot))
            paths.append(path)
    except OSError as error:
        raise UsageError(f"cannot save snapshots in {folder}: {error.strerror}: name another folder") from error
    return paths


def load_snapshots(path: Path) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots in a folder, a run or a file, and a sentence for each that cannot be read.

    Raises:
        UsageError: there is none at all.
    """
    if path.is_dir():
        attempts = RunDirectory(path).attempts()
        snapshots, problems = read_folder(attempts[-1].snapshot_dir if attempts else path)
    else:
        snapshots, problems = _read([path])
    if not snapshots:
        raise UsageError(problems[0] if problems else f"no snapshot in {path}: `hpcpace audit --save DIR` writes some")
    return snapshots, problems


def read_folder(folder: Path) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots in a folder, and a sentence for each file that is none; both empty where it is not there."""
    return _read(sorted(file for file in folder.glob("*.json") if not file.name.startswith(".")))


def with_own_names(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return snapshots with a number added to names that come again: containers may share a host name."""
    seen: dict[str, int] = {}
    made = []
    for snapshot in snapshots:
        seen[snapshot.host] = seen.get(snapshot.host, 0) + 1
        count = seen[snapshot.host]
        made.append(snapshot if count == 1 else replace(snapshot, host=f"{snapshot.host}#{count}"))
    return made


def file_name(host: str) -> str:
    """Return a name as that of a file."""
    return re.sub(r"[^A-Za-z0-9_.#-]", "_", host).lstrip(".")[:120] or "host"


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that nobody reads half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(files: Sequence[Path]) -> tuple[list[Snapshot], list[str]]:
    snapshots, problems = [], []
    for file in files:
        try:
            snapshots.append(read_snapshot(file))
        except SnapshotError as error:
            problems.append(str(error))
    return with_own_names(snapshots), problems
