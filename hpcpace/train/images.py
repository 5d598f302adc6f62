"""Training images: CIFAR-10's binary batches, or synthetic ones of the same form where no path is given.

A batch depends on the seed and the step alone, never on the mesh: each replica takes its slice of the same batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import DataError

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
_NUM_VALUES = 3 * 32 * 32
_RECORD_BYTES = 1 + _NUM_VALUES
"""One label, then 1,024 values of red, of green and of blue, row by row (www.cs.toronto.edu/~kriz/cifar.html)."""
_MEAN = np.array([125.3, 123.0, 113.9], np.float32)[:, None, None]
_STD = np.array([63.0, 62.1, 66.7], np.float32)[:, None, None]
"""Mean and standard deviation of CIFAR-10's training images by colour."""
_DIGEST_RECORDS = 256
_NUM_SYNTHETIC, _NUM_SYNTHETIC_HELD_OUT = 4096, 1024


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images to train on and images held out.

    Attributes:
        source: where the images are from.
        records: files of training records, each uint8, (num_images, 3073): label, then the image.
        held_out: records that are not trained on, uint8, (num_images, 3073).
        is_synthetic: whether the images are made up.
    """

    source: str
    records: tuple[NDArray[np.uint8], ...] = field(repr=False)
    held_out: NDArray[np.uint8] = field(repr=False)
    is_synthetic: bool

    @property
    def num_images(self) -> int:
        """Images to train on."""
        return sum(map(len, self.records))

    def digest(self) -> str:
        """Return the SHA-256 of the number of images and the first ones of each file."""
        digest = hashlib.sha256(str(self.num_images).encode())
        for records in (*self.records, self.held_out):
            digest.update(records[:_DIGEST_RECORDS].tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return what a run records of its data."""
        return {
            "source": self.source,
            "num_images": self.num_images,
            "num_held_out": len(self.held_out),
            "sha256_of_first_images": self.digest(),
            "synthetic": self.is_synthetic,
        }

    def batch(
        self, step: int, *, seed: int, batch_size: int, rows: slice
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return rows of the global batch of a step, drawn at random.

        Returns:
            Images, float32, (num_rows, 3, 32, 32), with mean 0 and deviation 1, and labels, int64, (num_rows,).
        """
        chosen = np.random.default_rng([seed, step]).integers(self.num_images, size=batch_size)[rows]
        drawn = np.empty((len(chosen), _RECORD_BYTES), np.uint8)
        first = 0
        for records in self.records:
            here = (chosen >= first) & (chosen < first + len(records))
            drawn[here] = records[chosen[here] - first]
            first += len(records)
        return _decoded(drawn)

    def num_held_out(self) -> int:
        """Return the number of images that are not trained on."""
        return len(self.held_out)

    def held_out_batch(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return some of the images held out, by number, and their labels; as `batch` does."""
        return _decoded(self.held_out[rows])


def open_images(path: Path | None) -> Images:
    """Open CIFAR-10's binary batches, or make synthetic images when no path is given.

    Args:
        path: the folder of data_batch_1.bin, ..., test_batch.bin, or the one above cifar-10-batches-bin.

    Raises:
        DataError: files are missing or are not what they should be.
    """
    if path is None:
        return _synthetic()
    folder = path / "cifar-10-batches-bin" if (path / "cifar-10-batches-bin").is_dir() else path
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files:
        raise DataError(f"{folder} holds no data_batch_*.bin: name the folder of CIFAR-10's binary version with --data")
    return Images(
        source=str(folder.absolute()),
        records=tuple(_open_records(file) for file in files),
        held_out=_open_records(folder / "test_batch.bin"),
        is_synthetic=False,
    )


def _open_records(path: Path) -> NDArray[np.uint8]:
    remedy = "name the folder of CIFAR-10's binary version with --data"
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot read {path} ({reason}): {remedy}") from error
    if len(content) % _RECORD_BYTES:
        raise DataError(f"{path} has {len(content)} bytes, no multiple of {_RECORD_BYTES}: {remedy}")
    records = np.asarray(content).reshape(-1, _RECORD_BYTES)
    if records[:, 0].max() >= NUM_CLASSES:
        raise DataError(f"{path} has a label of {records[:, 0].max()}, and there are {NUM_CLASSES} classes: {remedy}")
    return records


def _decoded(records: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images = (records[:, 1:].reshape(-1, *IMAGE_SHAPE).astype(np.float32) - _MEAN) / _STD
    return images, records[:, 0].astype(np.int64)


def _synthetic() -> Images:
    """Make images that can be learned: a pattern a class, faint behind noise, the same on every rank and run."""
    generator = np.random.default_rng(32)
    patterns = generator.normal(0.0, 24.0, (NUM_CLASSES, _NUM_VALUES)).astype(np.float32)
    num_images = _NUM_SYNTHETIC + _NUM_SYNTHETIC_HELD_OUT
    labels = generator.integers(NUM_CLASSES, size=num_images)
    values = 120.0 + patterns[labels] + 48.0 * generator.standard_normal((num_images, _NUM_VALUES), dtype=np.float32)
    records = np.empty((num_images, _RECORD_BYTES), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = values.clip(0, 255)
    return Images(
        source=f"{_NUM_SYNTHETIC} synthetic images, a pattern a class behind noise",
        records=(records[:_NUM_SYNTHETIC],),
        held_out=records[_NUM_SYNTHETIC:],
        is_synthetic=True,
    )
