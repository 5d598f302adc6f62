"""A disk of a few bytes: what grows files in a folder ends there, in the middle of a write as on a real one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class FakeDisk:
    """Bounds the size of all files in a folder together, for those calls that hpcpace grows files with.

    Attributes:
        size_bytes: what the disk holds; a test may change it at any time.
    """

    def __init__(self, folder: Path, size_bytes: int, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.size_bytes = size_bytes
        self._pwrite, self._allocate = os.pwrite, os.posix_fallocate
        patch.setattr(os, "pwrite", self._write_some)
        patch.setattr(os, "posix_fallocate", self._allocate_some)

    @property
    def used_bytes(self) -> int:
        return sum(item.stat().st_size for item in self._folder.iterdir())

    def _largest_end(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size + max(self.size_bytes - self.used_bytes, 0)

    def _write_some(self, descriptor: int, content: bytes, offset: int) -> int:
        num_bytes = min(len(content), self._largest_end(descriptor) - offset)
        if num_bytes <= 0 < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, content[:num_bytes], offset)

    def _allocate_some(self, descriptor: int, offset: int, size_bytes: int) -> None:
        """As ext4 does: what there is is taken also where it is not enough."""
        end = min(offset + size_bytes, self._largest_end(descriptor))
        if end > offset:
            self._allocate(descriptor, offset, end - offset)
        if end < offset + size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
