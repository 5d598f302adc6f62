from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcpace.errors import DataError
from hpcpace.train.data import ByteText, open_text


def _text(num_bytes: int = 1000) -> ByteText:
    return ByteText(source="test", tokens=np.arange(num_bytes, dtype=np.uint8))


def test_the_default_text_is_large_real_and_the_same_each_time() -> None:
    first, second = open_text(None, 128), open_text(None, 128)
    assert first.tokens.size > 1_000_000
    assert first.facts() == second.facts()
    assert first.facts()["synthetic"] is False


def test_a_file_is_read_as_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("naïve text".encode())
    text = open_text(path, 4)
    assert text.tokens.tobytes() == path.read_bytes()
    assert text.source == str(path)


def test_replicas_together_have_the_global_batch() -> None:
    def rows(rows: slice) -> np.ndarray:
        return _text().batch(7, seed=3, batch_size=6, seq_len=10, rows=rows)

    parts = [rows(slice(0, 2)), rows(slice(2, 4)), rows(slice(4, 6))]
    np.testing.assert_array_equal(np.concatenate(parts), rows(slice(None)))


def test_a_batch_is_text_that_stands_together() -> None:
    batch = _text(200).batch(0, seed=0, batch_size=4, seq_len=10, rows=slice(None))
    assert batch.dtype == np.int64
    assert batch.shape == (4, 11)
    assert (np.diff(batch) == 1).all()


def test_seed_and_step_choose_the_batch() -> None:
    def batch(step: int, seed: int) -> bytes:
        return _text().batch(step, seed=seed, batch_size=8, seq_len=10, rows=slice(None)).tobytes()

    assert batch(0, 0) == batch(0, 0)
    assert len({batch(0, 0), batch(1, 0), batch(0, 1)}) == 3


def test_the_shortest_text_that_is_accepted_fills_one_sequence(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(11)))
    batch = open_text(path, 10).batch(0, seed=0, batch_size=2, seq_len=10, rows=slice(None))
    np.testing.assert_array_equal(batch, [list(range(11))] * 2)


def test_the_digest_tells_texts_apart() -> None:
    assert len({_text(100).digest(), _text(101).digest(), open_text(None, 1).digest()}) == 3


@pytest.mark.parametrize(
    ("content", "seen"), [(None, "no file at"), (b"", "is empty"), (b"0123456789", "fewer than one sequence of 10")]
)
def test_refuses_a_file_that_cannot_be_trained_on(tmp_path: Path, content: bytes | None, seen: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_text(path, 10)
    assert seen in str(caught.value)
    assert str(path) in str(caught.value)


def test_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        open_text(tmp_path, 10)


def test_refuses_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot read"):
        open_text(tmp_path / "file" / "text", 10)
