"""Training data and held-out data: text as bytes or GPT-2's tokens, or images.

A batch depends on the seed and the step alone, never on the mesh: each replica takes its slice of the same batch. Byte
pairs are encoded as GPT-2 does it, from its two vocabulary files (Radford et al. 2019, section 2.2): a text is cut
into words, and the bytes of a word are joined pair by pair, the pair first in merges.txt first. No tokenizer library
is among the packages that a login node has, and the algorithm is forty lines.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import sys
import sysconfig
import unicodedata
from array import array
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cache, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.codec import Count, convert
from hpcpace.core.errors import DataError
from hpcpace.core.records import dataclass
from hpcpace.train.plan import TrainPlan
from hpcpace.train.settings import GPT2Shape

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


Batch = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs and targets: tokens and the next ones, int64, (num_rows, seq_len); or images and labels, see `Images`."""


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

    def batch(self, step: int, *, seed: int, batch_size: int, rows: slice) -> Batch:
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

    def held_out_batch(self, rows: NDArray[np.int64]) -> Batch:
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


def _decoded(records: NDArray[np.uint8]) -> Batch:
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


VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
# Unicode's White_Space; Python's own \s has four separators more.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_MAX_WORDS_KEPT = 1_000_000


class BytePairEncoder:
    """Maps text to GPT-2's token numbers.

    Args:
        numbers: the number of each token, written in byte characters.
        merges: the pairs that may be joined, in order of precedence.
    """

    def __init__(self, numbers: dict[str, int], merges: Iterable[tuple[str, str]]) -> None:
        self._numbers = numbers
        self._precedence = {pair: index for index, pair in enumerate(merges)}
        self._encode_word = lru_cache(_MAX_WORDS_KEPT)(self._encode_new_word)

    @property
    def num_tokens(self) -> int:
        """One more than the largest token number."""
        return max(self._numbers.values()) + 1

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the token numbers of a text: uint32, (num_tokens,).

        Raises:
            KeyError: the vocabulary lacks a token that merging leads to.
        """
        tokens = array("I")
        for match in word_pattern().finditer(text):
            tokens.extend(self._encode_word(match[0]))
        return np.array(tokens, dtype=np.uint32)

    def _encode_new_word(self, word: str) -> tuple[int, ...]:
        characters = byte_characters()
        parts = [characters[byte] for byte in word.encode("utf-8", errors="surrogatepass")]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._precedence.get(pair, sys.maxsize))
            if best not in self._precedence:
                break
            parts = _joined(parts, best)
        return tuple(self._numbers[part] for part in parts)


def load_encoder(folder: Path) -> BytePairEncoder:
    """Read vocab.json and merges.txt of a folder.

    Raises:
        DataError: a file is missing or cannot be read as what it should be.
    """
    remedy = f"name the folder of GPT-2's {VOCABULARY_FILE} and {MERGES_FILE} with --vocabulary"
    path = folder / VOCABULARY_FILE
    try:
        numbers = convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Count])
        path = folder / MERGES_FILE
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"no file at {path}: {remedy}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}): {remedy}") from error
    missing = [character for character in byte_characters() if character not in numbers]
    if missing:
        raise DataError(f"{folder / VOCABULARY_FILE} lacks {len(missing)} of the 256 byte tokens: {remedy}")
    # The first line is a comment with the version.
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    if any(len(pair) != 2 or "".join(pair) not in numbers for pair in pairs):
        raise DataError(f"{path} has lines that join no two tokens into one of {VOCABULARY_FILE}: {remedy}")
    return BytePairEncoder(numbers, [(pair[0], pair[1]) for pair in pairs])


@cache
def byte_characters() -> tuple[str, ...]:
    """Return the printable character that stands for each byte.

    Printable characters of Latin-1 stand for themselves, the other bytes in order for the characters from 256 on.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in own else next(others)) for byte in range(256))


@cache
def word_pattern() -> re.Pattern[str]:
    r"""Return GPT-2's pattern of words, in which `re` lacks the classes \p{L} and \p{N}."""
    letters, numbers = _character_class("L"), _character_class("N")
    return re.compile(
        rf"'(?:s|t|re|ve|m|ll|d)| ?[{letters}]+| ?[{numbers}]+| ?[^{_SPACE}{letters}{numbers}]+"
        rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )


def _character_class(category: str) -> str:
    """Return all characters of a general category of Unicode as the ranges of a class in `re`."""
    codes = (code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == category)
    ranges = []
    # In a run of neighbours, code and position grow alike.
    for _, run in groupby(enumerate(codes), key=lambda item: item[1] - item[0]):
        members = [code for _, code in run]
        ranges.append(f"{re.escape(chr(members[0]))}-{re.escape(chr(members[-1]))}")
    return "".join(ranges)


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Return the parts with every occurrence of a pair joined, from the left."""
    joined: list[str] = []
    position = 0
    while position < len(parts):
        if tuple(parts[position : position + 2]) == pair:
            joined.append(pair[0] + pair[1])
            position += 2
        else:
            joined.append(parts[position])
            position += 1
    return joined


_DIGEST_BYTES = 1 << 20
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class TokenText:
    """A text as tokens.

    Attributes:
        source: where the text is from.
        tokens: uint8 or uint16 or uint32, (num_tokens,); the file itself, mapped, where the text is the bytes of one.
        encoding: what a token is.
    """

    source: str
    tokens: NDArray[np.unsignedinteger[Any]] = field(repr=False)
    encoding: str = "bytes"

    def digest(self) -> str:
        """Return the SHA-256 of the length and the first MiB: enough to distinguish texts, fast for any size."""
        digest = hashlib.sha256(str(self.tokens.size).encode())
        digest.update(self.tokens[: _DIGEST_BYTES // self.tokens.itemsize].tobytes())
        return digest.hexdigest()

    def batch(self, step: int, *, seed: int, batch_size: int, seq_len: int, rows: slice) -> NDArray[np.int64]:
        """Return rows of the global batch of a step.

        Args:
            step: number of the step; each has its own batch.
            seed: the run's seed.
            batch_size: sequences of the global batch.
            seq_len: tokens of a sequence.
            rows: the rows wanted, those of one replica.

        Returns:
            int64, (num_rows, seq_len + 1): inputs are all but the last column, targets all but the first.
        """
        # A generator of its own for each step costs 20 us and makes any step's batch known without those before it.
        generator = np.random.default_rng([seed, step])
        return self.sequences(generator.integers(self.tokens.size - seq_len, size=batch_size)[rows], seq_len)

    def sequences(self, starts: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
        """Return the sequences that begin at some tokens, with the token behind: int64, (num_starts, seq_len + 1)."""
        sequences: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
        return sequences


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Sequences of a text to train on, and those of another one, or of its end, that are held out."""

    training: TokenText
    held_out: TokenText | None
    seq_len: int

    def digest(self) -> str:
        """Return a text that identifies these data, quickly."""
        return self.training.digest() + (self.held_out.digest() if self.held_out else "")

    def facts(self) -> dict[str, Any]:
        """Return what a run records of its data."""
        return {
            "source": self.training.source,
            "num_tokens": int(self.training.tokens.size),
            "num_held_out": self.num_held_out(),
            "sha256_of_length_and_first_mib": self.training.digest(),
            "synthetic": False,
            "tokens": self.training.encoding,
        }

    def batch(self, step: int, *, seed: int, batch_size: int, rows: slice) -> Batch:
        """Return tokens and next tokens of rows of the global batch of a step, at random places of the text."""
        return _shifted(self.training.batch(step, seed=seed, batch_size=batch_size, seq_len=self.seq_len, rows=rows))

    def num_held_out(self) -> int:
        """Return how many sequences are not trained on; they do not overlap."""
        return 0 if self.held_out is None else (self.held_out.tokens.size - 1) // self.seq_len

    def held_out_batch(self, rows: NDArray[np.int64]) -> Batch:
        """Return some of the sequences that are not trained on, by number."""
        assert self.held_out is not None
        return _shifted(self.held_out.sequences(rows * self.seq_len, self.seq_len))


TrainingData = TextData | Images
"""Data of a workload, with the same methods."""


def open_data(plan: TrainPlan) -> TrainingData:
    """Open the data of a workload.

    Raises:
        DataError: they are missing, unreadable or too short, or the vocabulary is larger than the model's.
    """
    settings = plan.settings
    data: TrainingData = (
        _open_text_data(plan, plan.shape) if isinstance(plan.shape, GPT2Shape) else open_images(settings.data)
    )
    if settings.eval_every and data.num_held_out() < settings.batch_size:
        raise DataError(
            f"{data.num_held_out()} sequences or images are held out, fewer than the {settings.batch_size} of a batch: "
            "use more data, a smaller --batch-size, or no --eval-every"
        )
    return data


def check_data(plan: TrainPlan) -> None:
    """Refuse data that cannot be opened, without the seconds that encoding a text takes.

    Raises:
        DataError: as `open_data`, but for a text that has too few tokens once it is encoded.
    """
    settings = plan.settings
    if isinstance(plan.shape, GPT2Shape) and settings.vocabulary is not None:
        _encoder(settings.vocabulary, plan.shape)
        plan = replace(plan, settings=replace(settings, vocabulary=None))
    open_data(plan)


def _open_text_data(plan: TrainPlan, shape: GPT2Shape) -> TextData:
    settings, seq_len = plan.settings, plan.seq_len
    encoder = _encoder(settings.vocabulary, shape)
    if settings.data is not None and settings.data.is_dir():
        training = _open_file(_wikitext_file(settings.data, "train"))
        held_out: TokenText | None = _open_file(_wikitext_file(settings.data, "valid"))
    else:
        training, held_out = _split(open_text(settings.data, seq_len), seq_len)
    if encoder is not None:
        training, held_out = _encoded(training, encoder), held_out and _encoded(held_out, encoder)
    for text in filter(None, (training, held_out)):
        _check_length(text, seq_len)
    return TextData(training=training, held_out=held_out, seq_len=seq_len)


def open_text(path: Path | None, seq_len: int) -> TokenText:
    """Open a text file as bytes, or the sources of Python's own standard library when no path is given.

    Raises:
        DataError: the file is missing, unreadable, empty or shorter than one sequence and its next token.
    """
    text = _python_sources() if path is None else _open_file(path)
    _check_length(text, seq_len)
    return text


def _check_length(text: TokenText, seq_len: int) -> None:
    if text.tokens.size < seq_len + 1:
        unit = "bytes" if text.encoding == "bytes" else "tokens"
        raise DataError(
            f"{text.source} has {text.tokens.size} {unit}, fewer than one sequence of {seq_len} tokens and its "
            "next token: use a longer text, or a smaller --seq-len"
        )


def _encoder(vocabulary: Path | None, shape: GPT2Shape) -> BytePairEncoder | None:
    if vocabulary is None:
        return None
    encoder = load_encoder(vocabulary)
    if encoder.num_tokens > shape.vocabulary:
        raise DataError(
            f"the vocabulary of {vocabulary} has {encoder.num_tokens} tokens and the model {shape.vocabulary}: use a "
            "larger --preset, or drop --vocabulary to train on bytes"
        )
    return encoder


def _encoded(text: TokenText, encoder: BytePairEncoder) -> TokenText:
    content = text.tokens.tobytes().decode("utf-8", errors="replace")
    try:
        tokens = encoder.encode(content)
    except KeyError as error:
        raise DataError(
            f"the vocabulary lacks the token {error}, which merges.txt refers to: use GPT-2's own files"
        ) from error
    return TokenText(
        source=text.source,
        tokens=tokens.astype(np.uint16) if encoder.num_tokens <= 1 << 16 else tokens,
        encoding=f"byte-pair encoding of {encoder.num_tokens} tokens",
    )


def _split(text: TokenText, seq_len: int) -> tuple[TokenText, TokenText | None]:
    """Hold the last tenth of a text out, unless it is shorter than a sequence."""
    num_held_out = int(text.tokens.size * _HELD_OUT_SHARE)
    if num_held_out <= seq_len:
        return text, None
    return replace(text, tokens=text.tokens[:-num_held_out]), replace(
        text, tokens=text.tokens[-num_held_out:], source=f"the end of {text.source}"
    )


def _shifted(sequences: NDArray[np.int64]) -> Batch:
    return sequences[:, :-1], sequences[:, 1:]


def _wikitext_file(folder: Path, part: str) -> Path:
    """Return a file of a data set in the layout of Wikitext (Merity et al. 2016)."""
    for suffix in ("tokens", "raw"):
        path = folder / f"wiki.{part}.{suffix}"
        if path.exists():
            return path
    raise DataError(
        f"{folder} is a folder without wiki.{part}.tokens or wiki.{part}.raw: name Wikitext's folder or a text file "
        "with --data"
    )


def _open_file(path: Path) -> TokenText:
    try:
        with path.open("rb") as stream:
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty: name a text file with --data")
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DataError(f"no file at {path}: name a text file with --data") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder: name a text file with --data") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}): name a readable text file with --data") from error
    return TokenText(source=str(path.absolute()), tokens=np.frombuffer(content, dtype=np.uint8))


def _python_sources() -> TokenText:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"{folder} holds no Python sources, the default text: name a text file with --data")
    try:
        content = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; name a text file with --data") from error
    return TokenText(source=f"{len(files)} modules of {folder}", tokens=np.frombuffer(content, dtype=np.uint8))
