"""Training text as bytes: every byte is a token, so that any text file will do and no vocabulary file is needed.

A batch depends on the seed and the step alone, never on the mesh: each replica takes its slice of the same batch.
"""

from __future__ import annotations

import hashlib
import mmap
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import DataError

NUM_BYTE_TOKENS = 256
_DIGEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ByteText:
    """A text as tokens.

    Attributes:
        source: where the text is from.
        tokens: uint8, (num_bytes,); the file itself, mapped, where the text is one file.
    """

    source: str
    tokens: NDArray[np.uint8] = field(repr=False)

    def digest(self) -> str:
        """Return the SHA-256 of the length and the first MiB: enough to tell texts apart, quick on any size."""
        digest = hashlib.sha256(str(self.tokens.size).encode())
        digest.update(self.tokens[:_DIGEST_BYTES].tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return what a run records of its data."""
        return {
            "source": self.source,
            "size_bytes": int(self.tokens.size),
            "sha256_of_length_and_first_mib": self.digest(),
            "synthetic": False,
            "tokens": "bytes",
        }

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
        starts = generator.integers(self.tokens.size - seq_len, size=batch_size)[rows]
        batch: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
        return batch


def open_text(path: Path | None, seq_len: int) -> ByteText:
    """Open a text file, or the sources of Python's own standard library when no path is given.

    Raises:
        DataError: the file is missing, unreadable, empty or shorter than one sequence and its next token.
    """
    text = _python_sources() if path is None else _open_file(path)
    if text.tokens.size < seq_len + 1:
        raise DataError(
            f"{text.source} has {text.tokens.size} bytes, fewer than one sequence of {seq_len} tokens and the next: "
            "take a longer text, or a smaller --seq-len"
        )
    return text


def _open_file(path: Path) -> ByteText:
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
    return ByteText(source=str(path.absolute()), tokens=np.frombuffer(content, dtype=np.uint8))


def _python_sources() -> ByteText:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"{folder} holds no Python sources, the default text: name a text file with --data")
    try:
        content = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; name a text file with --data") from error
    return ByteText(source=f"{len(files)} modules of {folder}", tokens=np.frombuffer(content, dtype=np.uint8))
