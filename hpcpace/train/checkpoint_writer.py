"""Writing a checkpoint into a folder that is held, for nobody but the user to write to, whatever the umask.

Torch's FileSystemWriter opens files by their path: whoever exchanges a folder on the way, or puts a link there, makes
it write elsewhere. Here every file is a new one in the folder itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from hpcpace.errors import DataError
from hpcpace.files import Folder
from hpcpace.ownership import other_writers
from hpcpace.train.checkpoint_access import WRITERS_FILE_MODE, WRITERS_FOLDER_MODE, withhold_write

_NAME = re.compile(r"step-([0-9]+)")
_WRITING = re.compile(r"\.step-[0-9]+\.writing")


def clear_checkpoints(path: Path) -> None:
    """Make the folder of a run's checkpoints if there is none, and remove what a killed job left in it.

    Raises:
        OSError: it cannot be made or cleared.
        DataError: somebody else owns it.
    """
    with (
        Folder.open(path.parent, make=True) as run,
        run.make_folder(path.name, mode=WRITERS_FOLDER_MODE) as folder,
    ):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def writer(self) -> dcp.FileSystemWriter:
        """Return what writes tensors into it."""
        return _HeldWriter(self.folder)

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


class _HeldWriter(dcp.FileSystemWriter):
    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.path)
        self.fs = _HeldFileSystem(folder)


class _HeldFileSystem(FileSystem):
    """The files in one folder; of a path only the name counts."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with os.fdopen(self._folder.create_file(Path(path).name, mode=WRITERS_FILE_MODE), "wb") as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        descriptor = self._folder.descriptor
        os.rename(Path(path).name, Path(new_path).name, src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder is there."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).name in self._folder.names()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        os.unlink(Path(path).name, dir_fd=self._folder.descriptor)


def _check_own(folder: Folder) -> None:
    writers = other_writers(os.fstat(folder.descriptor))
    if writers:
        raise DataError(f"{folder.path} {writers}; give a --run-dir of your own")
