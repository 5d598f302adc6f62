from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import DataError
from hpcpace.train.data import TextData, TokenText, byte_characters, check_data, open_data, open_text
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.settings import TrainConfig


def _text(num_bytes: int = 1000) -> TokenText:
    return TokenText(source="test", tokens=np.arange(num_bytes, dtype=np.uint8))


def test_the_default_text_is_large_real_and_the_same_each_time() -> None:
    first, second = open_text(None, 128), open_text(None, 128)
    assert first.tokens.size > 1_000_000
    assert first.digest() == second.digest()


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


@each_case(
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


def test_refuses_a_folder_as_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        open_text(tmp_path, 10)


def test_refuses_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot read"):
        open_text(tmp_path / "file" / "text", 10)


def _plan(**settings: Any) -> TrainPlan:
    return plan_training(TrainConfig(**{"seq_len": 8, "batch_size": 2, **settings}), 1)


def _vocabulary(folder: Path, *merges: tuple[str, str]) -> Path:
    tokens = [*byte_characters(), *("".join(pair) for pair in merges)]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    data = open_data(_plan(data=path))
    assert data.num_held_out() == 2
    inputs, targets = data.held_out_batch(np.array([1]))
    np.testing.assert_array_equal(inputs, [range(188, 196)])
    np.testing.assert_array_equal(targets, [range(189, 197)])
    trained = [data.batch(step, seed=0, batch_size=2, rows=slice(None))[1].max() for step in range(200)]
    assert max(trained) == 179


def test_inputs_and_targets_are_one_token_apart() -> None:
    inputs, targets = open_data(_plan()).batch(3, seed=0, batch_size=2, rows=slice(None))
    assert inputs.shape == targets.shape == (2, 8)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_wikitext_has_files_of_its_own_for_training_and_held_out(tmp_path: Path, suffix: str) -> None:
    for part, byte in (("train", b"a"), ("valid", b"b"), ("test", b"c")):
        (tmp_path / f"wiki.{part}.{suffix}").write_bytes(byte * 50)
    data = open_data(_plan(data=tmp_path))
    assert set(data.batch(0, seed=0, batch_size=2, rows=slice(None))[0].flat) == {ord("a")}
    assert set(data.held_out_batch(np.array([0, 5]))[0].flat) == {ord("b")}
    assert data.facts()["source"] == str(tmp_path / f"wiki.train.{suffix}")
    assert data.facts()["synthetic"] is False


def test_text_is_encoded_where_a_vocabulary_is_given(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab" * 100)
    vocabulary = _vocabulary(tmp_path / "gpt2", ("a", "b"))
    data = open_data(_plan(preset="small", data=tmp_path / "text", vocabulary=vocabulary))
    assert isinstance(data, TextData)
    assert data.training.tokens.dtype == np.uint16
    assert set(data.training.tokens) == {256}
    assert data.training.tokens.size == 90
    assert data.facts()["tokens"] == "byte-pair encoding of 257 tokens"


def test_refuses_a_vocabulary_that_is_larger_than_the_models(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 257 tokens and the model 256: use a larger --preset"):
        check_data(_plan(vocabulary=_vocabulary(tmp_path, ("a", "b"))))


@each_case(
    ("settings", "seen"),
    [
        ({"data": "folder"}, "without wiki.train.tokens or wiki.train.raw"),
        ({"data": "text", "eval_every": 1, "batch_size": 3}, "2 sequences or images are held out, fewer than the 3"),
        ({"data": "short", "eval_every": 1}, "0 sequences or images are held out"),
        ({"vocabulary": "folder", "preset": "small"}, "vocab.json: name the folder"),
        ({"data": "missing"}, "no file at"),
        ({"model": "resnet18", "data": "folder"}, "holds no data_batch_"),
    ],
)
def test_refuses_data_before_anything_slow(tmp_path: Path, settings: dict[str, Any], seen: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_bytes(bytes(200))
    (tmp_path / "short").write_bytes(bytes(20))
    paths = {key: tmp_path / settings[key] for key in ("data", "vocabulary") if key in settings}
    with pytest.raises(DataError) as caught:
        check_data(_plan(**settings | paths))
    assert seen in str(caught.value)
