"""Snapshots as files: a folder with one HOST.json per host, in a run or anywhere else.

Folders may belong to another user: files that are not regular, too large or not snapshots are left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.schema import snapshot_from, snapshot_text
from hpcpace.core.errors import SnapshotError, UsageError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import printable

NUM_OURS_OF_RUN = 2
"""How many names at the end of an attempt's snapshot folder hpcpace has chosen, for `Folder.open`."""

_MOST_READ_BYTES = 1 << 20
_MOST_REASON = 200
# Limits for all snapshots of a folder: 16,384 files, and 256 MiB including what their ranks take in memory.
_MOST_WEIGHT, _LEAST_WEIGHT, _WEIGHT_OF_VALUE = 1 << 28, 1 << 14, 32


def save_snapshots(folder: Path, snapshots: Sequence[Snapshot], *, num_ours: int = 0) -> list[Path]:
    """Write each snapshot as HOST.json.

    Args:
        folder: where to write; it is created if necessary.
        snapshots: snapshots of hosts with distinct names.
        num_ours: how many names at the end of `folder` hpcpace has chosen, for `Folder.open`.

    Raises:
        UsageError: the folder is not writable.
        SnapshotError: some snapshots are too large, or cannot replace what has their name; the others are saved.
    """
    paths, problems = [], []
    try:
        held = Folder.open(folder, make=True, num_ours=num_ours)
    except OSError as error:
        raise UsageError(f"cannot save snapshots in {folder}: {error.strerror}; name another folder") from error
    with held:
        for snapshot in snapshots:
            try:
                paths.append(held.write(f"{file_name(snapshot.host)}.json", snapshot_text(snapshot)))
            except SnapshotError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{printable(snapshot.host)}: {error.strerror}")
    if problems:
        raise SnapshotError(f"cannot save snapshots in {folder}: {'; '.join(problems)[:_MOST_REASON]}")
    return paths


def load_snapshots(path: Path) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots in a folder, a run or a file, and a sentence for each one that cannot be read.

    Raises:
        UsageError: there are no snapshots at all.
    """
    try:
        folder = Folder.open(path)
    except OSError:
        snapshots, problems = _read_file(path)
    else:
        with folder:
            attempts = RunDirectory(path, folder).attempts()
            snapshots, problems = read_attempt(attempts[-1]) if attempts else _read_all(folder)
    if not snapshots:
        raise UsageError(problems[0] if problems else f"no snapshots in {path}: `hpcpace audit --save DIR` writes them")
    return snapshots, problems


def read_attempt(attempt: Attempt) -> tuple[list[Snapshot], list[str]]:
    """Return the snapshots of an attempt, and a sentence for each invalid file; both empty without a folder."""
    try:
        with attempt.open() as folder, folder.folder(attempt.snapshot_dir.name) as held:
            return _read_all(held)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [_unread(attempt.snapshot_dir, error)]


def with_distinct_names(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return snapshots with a number added to repeated host names: containers may share a name."""
    seen: dict[str, int] = {}
    made = []
    for snapshot in snapshots:
        seen[snapshot.host] = seen.get(snapshot.host, 0) + 1
        count = seen[snapshot.host]
        made.append(snapshot if count == 1 else replace(snapshot, host=f"{snapshot.host}#{count}"))
    return made


def file_name(host: str) -> str:
    """Return a host name as a safe file name."""
    return re.sub(r"[^A-Za-z0-9_.#-]", "_", host).lstrip(".")[:120] or "host"


def _read_file(path: Path) -> tuple[list[Snapshot], list[str]]:
    try:
        with Folder.open(path.parent) as folder:
            return _read(folder, [path.name])
    except OSError as error:
        return [], [_unread(path, error)]


def _read_all(folder: Folder) -> tuple[list[Snapshot], list[str]]:
    return _read(folder, [name for name in folder.names() if name.endswith(".json") and not name.startswith(".")])


def _read(folder: Folder, names: Sequence[str]) -> tuple[list[Snapshot], list[str]]:
    snapshots, problems = [], []
    weight = 0
    for number, name in enumerate(names):
        if weight >= _MOST_WEIGHT:
            problems.append(
                f"{len(names) - number} more files of {printable(str(folder.path))} are left out: too much data"
            )
            break
        weight += _LEAST_WEIGHT
        try:
            content = folder.read(name, most_bytes=_MOST_READ_BYTES)
            weight += len(content)
            snapshots.append(snapshot_from(content))
        except OSError as error:
            problems.append(_unread(folder.path / name, error))
        except SnapshotError as error:
            problems.append(f"{printable(str(folder.path / name))}: {error}")
        else:
            weight += _WEIGHT_OF_VALUE * _num_values(snapshots[-1])
    return with_distinct_names(snapshots), problems


def _num_values(snapshot: Snapshot) -> int:
    """Return roughly how many values the ranks hold; the text has each value that all ranks share only once."""
    return sum(32 + len(rank.variables) + len(rank.user_conf) + len(rank.gpus or ()) for rank in snapshot.ranks)


def _unread(path: Path, error: OSError) -> str:
    return f"cannot read {printable(str(path))}: {error.strerror}"
