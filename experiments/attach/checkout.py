"""Lays out a public script at its pinned commit, changes it for CPUs, and makes the data that it reads."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path

import numpy as np

from experiments.attach.edits import Edit
from experiments.attach.rows import Row

_VOCABULARY = 64


class CheckoutError(Exception):
    """A source is not as the row expects it."""


def lay_out(row: Row, sources: Path | None, folder: Path) -> Path:
    """Put a row's public script into a folder, and return the folder to run it in.

    Raises:
        CheckoutError: there is no clone, it lacks the commit, or an edit does not fit.
    """
    assert row.source is not None
    clone = (sources or Path()) / row.source.folder
    if sources is None or not clone.is_dir():
        raise CheckoutError(f"needs a clone of {row.source.repository} at {clone}: give --sources")
    archive = subprocess.run(
        ["git", "-C", clone, "archive", row.source.commit, *(row.parts or filter(None, [row.folder]))],
        capture_output=True,
    )
    if archive.returncode:
        raise CheckoutError(f"{clone} has no commit {row.source.commit}: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    place = folder / row.folder
    for edit in row.edits:
        _apply(place, edit)
    _make_data(place)
    return place


def _apply(place: Path, edit: Edit) -> None:
    path = place / edit.path
    text = path.read_text()
    if text.count(edit.old) != 1:
        raise CheckoutError(f"{edit.path} has {text.count(edit.old)} times, not once: {edit.old!r}")
    path.write_text(text.replace(edit.old, edit.new))


def _make_data(place: Path) -> None:
    """Write the tokens that nanoGPT reads, and the texts that torchtitan reads."""
    folder = place / "data" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, 20_000, dtype=np.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": _VOCABULARY}))
    texts = place / "tests" / "assets" / "c4_test" / "data.json"
    texts.parent.mkdir(parents=True, exist_ok=True)
    words = [" ".join(np.binary_repr(number) for number in row) for row in tokens[:16_000].reshape(-1, 80)]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
