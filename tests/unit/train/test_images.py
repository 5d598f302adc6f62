from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcpace.core.errors import DataError
from hpcpace.train.data import Images, open_images


def _record(label: int, red: int, green: int, blue: int) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Two training files of three and two images, and one test image."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"".join(_record(label, 10 * label, 0, 255) for label in range(3)))
    (folder / "data_batch_2.bin").write_bytes(b"".join(_record(label, 10 * label, 0, 255) for label in (3, 4)))
    (folder / "test_batch.bin").write_bytes(_record(9, 1, 2, 3))
    return folder


def _red(images: np.ndarray) -> np.ndarray:
    """Return the red values as they are in the files."""
    return np.rint(images[:, 0, 0, 0] * 63.0 + 125.3)


@pytest.mark.parametrize("is_parent", [False, True])
def test_reads_the_binary_version_of_cifar10(cifar: Path, is_parent: bool) -> None:
    data = open_images(cifar.parent if is_parent else cifar)
    assert (data.num_images, data.num_held_out()) == (5, 1)
    assert (data.source, data.facts()["synthetic"]) == (str(cifar), False)
    images, labels = data.batch(0, seed=0, batch_size=64, rows=slice(None))
    assert (images.shape, images.dtype, labels.dtype) == ((64, 3, 32, 32), np.float32, np.int64)
    assert set(labels) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(_red(images), 10 * labels)


def test_colours_are_planes_of_the_image(cifar: Path) -> None:
    images, labels = open_images(cifar).held_out_batch(np.array([0]))
    np.testing.assert_array_equal(labels, [9])
    np.testing.assert_allclose(images[0, 1], (2 - 123.0) / 62.1, rtol=1e-6)
    np.testing.assert_allclose(images[0, 2], (3 - 113.9) / 66.7, rtol=1e-6)


def test_replicas_together_have_the_global_batch(cifar: Path) -> None:
    data = open_images(cifar)
    whole = data.batch(7, seed=3, batch_size=6, rows=slice(None))
    parts = [data.batch(7, seed=3, batch_size=6, rows=slice(first, first + 3)) for first in (0, 3)]
    for index in range(2):
        np.testing.assert_array_equal(np.concatenate([part[index] for part in parts]), whole[index])


def test_seed_and_step_choose_the_batch() -> None:
    data = open_images(None)

    def labels(step: int, seed: int) -> bytes:
        return data.batch(step, seed=seed, batch_size=16, rows=slice(None))[1].tobytes()

    assert labels(0, 0) == labels(0, 0)
    assert len({labels(0, 0), labels(1, 0), labels(0, 1)}) == 3


def test_synthetic_images_say_so_and_are_the_same_each_time() -> None:
    first, second = open_images(None), open_images(None)
    assert first.facts() == second.facts()
    assert first.facts()["synthetic"] is True
    assert "synthetic" in first.source


def test_synthetic_images_of_a_class_have_a_pattern_in_common() -> None:
    data = open_images(None)
    values, labels = data.batch(0, seed=0, batch_size=2000, rows=slice(None))
    values = values.reshape(len(values), -1)
    patterns = np.stack([values[labels == label].mean(axis=0) for label in range(10)])
    held_out, right = data.held_out_batch(np.arange(100))
    distances = ((held_out.reshape(100, 1, -1) - patterns) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == right).mean() > 0.9


def test_the_digest_tells_images_apart(cifar: Path) -> None:
    assert open_images(None).digest() != open_images(cifar).digest()


def _remove_test_batch(folder: Path) -> None:
    (folder / "test_batch.bin").unlink()


def _cut(folder: Path) -> None:
    (folder / "data_batch_2.bin").write_bytes(b"12")


def _empty(folder: Path) -> None:
    (folder / "data_batch_2.bin").write_bytes(b"")


def _mislabel(folder: Path) -> None:
    (folder / "data_batch_2.bin").write_bytes(_record(10, 0, 0, 0))


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (_remove_test_batch, "cannot read .*test_batch.bin"),
        (_cut, "has 2 bytes, no multiple of 3073"),
        (_empty, "cannot read .*data_batch_2.bin"),
        (_mislabel, "has a label of 10, and there are 10 classes"),
    ],
)
def test_refuses_files_that_are_not_cifar10s(cifar: Path, damage, seen: str) -> None:
    damage(cifar)
    with pytest.raises(DataError, match=seen):
        open_images(cifar)


def test_a_file_of_several_is_found_by_number(cifar: Path) -> None:
    data = open_images(cifar)
    assert isinstance(data, Images)
    assert [len(records) for records in data.records] == [3, 2]
