"""The folder of a checkpoint: its owner, who else can write to it, and how it is made.

A checkpoint decides what a training resumes from, so it must be the work of the user who resumes it, or of root. Owner
and mode are read from descriptors that are held, and what is read later is opened in the same folder: nothing can be
exchanged between the check and the use. A new one is closed to the writes of others, whatever the umask. Rank 0 writes
progress.json last and reads it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from hpcpace.core.codec import Count, convert
from hpcpace.core.errors import DataError
from hpcpace.core.files import Folder, closing_descriptor, other_writers, read_most
from hpcpace.core.records import dataclass
from hpcpace.core.text import shown
from hpcpace.train.plan import TrainPlan

WRITERS_FOLDER_MODE = 0o755
WRITERS_FILE_MODE = 0o644
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_checkpoint(path: Path) -> Folder:
    """Open the folder of a checkpoint.

    Raises:
        DataError: there is none, or somebody else could have written to it.
    """
    try:
        folder = Folder.open(path)
    except OSError as error:
        raise unreadable(path, error) from error
    check_access(folder.descriptor, path, checkpoint=path)
    return folder


def open_checkpoint_file(folder: Folder, name: str) -> int:
    """Return a descriptor that reads a file of a checkpoint.

    Raises:
        DataError: there is none, it is not a regular file, or somebody else could have written to it.
    """
    try:
        descriptor = folder.open_file(name)
    except OSError as error:
        raise unreadable(folder.path, error) from error
    try:
        check_access(descriptor, folder.path / name, checkpoint=folder.path)
    except DataError:
        os.close(descriptor)
        raise
    return descriptor


def held_path(folder: Folder) -> str:
    """Return a path that leads to the folder that is open, even if another one has taken its place since."""
    return f"/proc/self/fd/{folder.descriptor}"


def check_files(folder: Folder) -> None:
    """Let a checkpoint pass if every file in it does.

    Raises:
        DataError: as `open_checkpoint_file`.
    """
    for name in folder.names():
        os.close(open_checkpoint_file(folder, name))


def check_access(descriptor: int, path: Path, *, checkpoint: Path) -> None:
    """Let a file or folder pass that only the user and root can have written to.

    Args:
        descriptor: the open file or folder.
        path: what messages call it.
        checkpoint: the checkpoint that it belongs to.

    Raises:
        DataError: somebody else could have written to it; says who, and what to do.
    """
    facts = os.fstat(descriptor)
    writers = other_writers(facts)
    if not writers:
        return
    if facts.st_uid == os.geteuid():
        folder = path if stat.S_ISDIR(facts.st_mode) else path.parent
        advice = f"if all in it is yours, chmod -R go-w {shlex.quote(str(folder))}"
    else:
        copied = shlex.quote(str(checkpoint))
        advice = (
            f"if you trust whoever made it, cp -r {copied} COPY, and give --resume COPY with a --run-dir of your own"
        )
    raise DataError(f"the checkpoint {checkpoint} is not loaded: {path} {writers}; {advice}, or --resume never")


def withhold_write(descriptor: int) -> None:
    """Take the right to write to a folder of the user's own from everybody else.

    Raises:
        OSError: the file system refuses that.
    """
    facts = os.fstat(descriptor)
    if facts.st_mode & _WRITE_OF_OTHERS and facts.st_uid == os.geteuid():
        os.fchmod(descriptor, stat.S_IMODE(facts.st_mode) & ~_WRITE_OF_OTHERS)


def unreadable(path: Path, reason: object) -> DataError:
    """Return the error for a checkpoint that cannot be read."""
    if isinstance(reason, OSError) and reason.strerror:
        name = f"{Path(os.fsdecode(reason.filename)).name}: " if reason.filename else ""
        reason = f"{name}{reason.strerror}"
    return DataError(
        f"cannot read the checkpoint {path} ({reason}): use another one, or start over with --resume never"
    )


_NAME = re.compile(r"step-([0-9]+)")
_WRITING = re.compile(r"\.step-[0-9]+\.writing")


def clear_checkpoints(path: Path) -> None:
    """Make the folder of a run's checkpoints if there is none, and remove what a killed job left in it.

    Raises:
        OSError: it cannot be made or cleared.
        DataError: somebody else owns it.
    """
    with Folder.open(path.parent, make=True) as run, run.make_folder(path.name, mode=WRITERS_FOLDER_MODE) as folder:
        withhold_write(folder.descriptor)
        _check_own(folder)
        for left_over in filter(_WRITING.fullmatch, folder.names()):
            folder.remove_tree(left_over)


class NewCheckpoint:
    """A checkpoint that is being written, under a name that no resume looks at; a context manager.

    Args:
        path: the folder of the run's checkpoints, cleared.
        name: what the checkpoint will be called.

    Raises:
        OSError: it cannot be made or opened.
        DataError: somebody else owns the folder.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._name, self._writing = name, f".{name}.writing"
        with ExitStack() as held, Folder.open(path.parent) as run:
            self._parent = held.enter_context(run.folder(path.name))
            _check_own(self._parent)
            # Every rank makes it: to look for it alone may be answered from the cache of a network file system.
            self.folder = held.enter_context(self._parent.make_folder(self._writing, mode=WRITERS_FOLDER_MODE))
            _check_own(self.folder)
            self._held = held.pop_all()

    def __enter__(self) -> NewCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @contextmanager
    def writer(self) -> Iterator[HuggingFaceStorageWriter]:
        """Yield the writer of its tensors, while new files of this process are closed to the writes of others."""
        mask = os.umask(_WRITE_OF_OTHERS)
        os.umask(mask | _WRITE_OF_OTHERS)
        try:
            yield HuggingFaceStorageWriter(held_path(self.folder), save_distributed=True)
        finally:
            os.umask(mask)

    def publish(self, *, num_kept: int) -> None:
        """Give it its name once all of it is on the disk, and remove all but the last `num_kept`.

        Raises:
            OSError: it cannot be renamed; those before are still there.
        """
        parent = self._parent.descriptor
        os.fsync(self.folder.descriptor)
        if self._name in self._parent.names():
            self._parent.remove_tree(self._name)
        os.rename(self._writing, self._name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)
        whole = sorted(name for name in self._parent.names() if _NAME.fullmatch(name))
        # Later ones are of a training that was begun anew.
        last = whole.index(self._name) + 1
        for other in {*whole} - {*whole[max(last - num_kept, 0) : last]}:
            with contextlib.suppress(OSError):
                self._parent.remove_tree(other)


def _check_own(folder: Folder) -> None:
    writers = other_writers(os.fstat(folder.descriptor))
    if writers:
        raise DataError(f"{folder.path} {writers}; give a --run-dir of your own")


CHECKPOINT_SCHEMA = "hpcpace-checkpoint/2"
PROGRESS = "progress.json"
# A loss takes some 30 bytes, an evaluation some 150. The rest is for runs that had more steps than they are given now.
_BYTES_PER_STEP = 512
_MAX_OTHER_BYTES = 16 << 20
# Settings that change nothing of the losses; all others must be as they were.
_FREE_SETTINGS = (
    "steps", "warmup_steps", "log_every", "eval_every", "eval_batches", "checkpoint_every", "resume", "inject",
    "shared_cores", "data", "vocabulary", "mesh",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingHistory:
    """What a training has come to by some step.

    Attributes:
        num_steps: steps done.
        losses: the loss of each.
        evaluations: facts of the evaluations so far.
    """

    num_steps: int = 0
    losses: tuple[float, ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()


def read_history(path: Path, plan: TrainPlan, *, data_digest: str) -> TrainingHistory:
    """Return how far the training of a checkpoint was.

    Raises:
        DataError: it cannot be read, somebody else could have written to it, or it belongs to a training with other
            settings or data.
    """
    most_bytes = _MAX_OTHER_BYTES + _BYTES_PER_STEP * plan.settings.steps
    with open_checkpoint(path) as folder:
        check_files(folder)
        descriptor = open_checkpoint_file(folder, PROGRESS)
        try:
            identity, history = _parse(read_most(descriptor, most_bytes))
        except (OSError, ValueError, RecursionError) as error:  # json raises the last one for lists in lists in lists
            raise unreadable(path, f"{PROGRESS}: {error}") from error
        finally:
            os.close(descriptor)
    wanted = identity_of(plan, data_digest)
    for key in sorted(wanted.keys() | identity.keys()):
        if identity.get(key) != wanted.get(key):
            name = key if key in wanted else shown(key)
            raise DataError(
                f"the checkpoint {path} was trained with {name} {shown(identity.get(key))}, not "
                f"{shown(wanted.get(key))}: use the same settings, another --run-dir, or --resume never"
            )
    return history


def write_history(folder: Folder, history: TrainingHistory, identity: Mapping[str, Any]) -> None:
    """Write how far a training is into its checkpoint, and bring it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    content = {"schema": CHECKPOINT_SCHEMA, "identity": identity, **asdict(history)}
    folder.write(PROGRESS, json.dumps(content, indent=2, sort_keys=True) + "\n", mode=WRITERS_FILE_MODE)
    with closing_descriptor(folder.open_file(PROGRESS)) as descriptor:
        os.fsync(descriptor)


def identity_of(plan: TrainPlan, data_digest: str) -> dict[str, Any]:
    """Return the settings that a training must keep, as plain values."""
    settings = {key: value for key, value in asdict(plan.settings).items() if key not in _FREE_SETTINGS}
    return {**settings, "seq_len": plan.seq_len, "mesh": str(plan.mesh), "data": data_digest}


@dataclass(frozen=True, kw_only=True)
class _Progress:
    """What the file has behind its schema; the losses of a training that diverged are NaN."""

    identity: dict[str, Any]
    num_steps: Count
    losses: tuple[float, ...]
    evaluations: tuple[dict[str, int | float], ...]


def _parse(data: bytes) -> tuple[dict[str, Any], TrainingHistory]:
    content = json.loads(data)
    if isinstance(content, dict) and content.get("schema") != CHECKPOINT_SCHEMA:
        raise ValueError(f"it has schema {shown(content.get('schema'))}, not {CHECKPOINT_SCHEMA}")
    found = convert(content, _Progress)
    if len(found.losses) != found.num_steps:
        raise ValueError(f"it has {len(found.losses)} losses for {found.num_steps} steps")
    return found.identity, TrainingHistory(
        num_steps=found.num_steps, losses=found.losses, evaluations=found.evaluations
    )
