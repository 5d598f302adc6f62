"""Damage to the bytes of files: cut, flipped, zeroed, overwritten, swapped for something else.

Two tables are for every file of a run: `CHANGES` of bytes, and `NO_FILES` to put in its place.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path

import h5py
import numpy as np

from experiments.damage import specimen
from experiments.damage.chance import Random
from experiments.damage.reports import kinds_of
from hpcpace.trace.schema import header_values

SUPERBLOCK_BYTES, HEADER_BYTES = 48, 4096

Change = Callable[[bytearray, Random], None]


def flips(num_bits: int, region_bytes: int | None = None) -> Change:
    """Return a change that flips bits in the first bytes, or anywhere."""

    def change(content: bytearray, random: Random) -> None:
        stop = min(region_bytes or len(content), len(content))
        for bit in random.integers(stop * 8, size=num_bits).tolist():
            content[bit // 8] ^= 1 << bit % 8

    return change


def truncate(content: bytearray, random: Random) -> None:
    """Cut the end off, often within the first kilobytes."""
    bound = random.one(len(content), 64, 4096)
    del content[int(random.integers(min(bound, len(content)))) :]


def zero(content: bytearray, random: Random) -> None:
    """Zero some pages or sectors."""
    size = random.one(512, 4096)
    for _ in range(random.count(1, 5)):
        begin = int(random.integers(len(content))) // size * size
        content[begin : begin + size] = bytes(len(content[begin : begin + size]))


def overwrite(content: bytearray, random: Random) -> None:
    """Write noise over some place."""
    begin, size = int(random.integers(len(content))), random.count(1, 2000)
    content[begin : begin + size] = random.bytes(len(content[begin : begin + size]))


def append(content: bytearray, random: Random) -> None:
    """Append noise."""
    content += random.bytes(random.count(1, 100_000))


def insert(content: bytearray, random: Random) -> None:
    """Insert noise, which moves all that follows."""
    begin = int(random.integers(len(content)))
    content[begin:begin] = random.bytes(random.count(1, 100))


def exchange(content: bytearray, random: Random) -> None:
    """Exchange two sectors."""
    one, other = (int(begin) // 512 * 512 for begin in random.integers(max(len(content) - 512, 1), size=2))
    content[one : one + 512], content[other : other + 512] = content[other : other + 512], content[one : one + 512]


CHANGES: Mapping[str, Change] = {
    **{"truncate": truncate, "zero": zero, "overwrite": overwrite, "append": append, "insert": insert},
    **{"exchange": exchange, "flip-1": flips(1), "flip-64": flips(64)},
}
"""Of the bytes of any file."""


def change_bytes(path: Path, random: Random, *changes: Change) -> None:
    """Change the bytes of a file in place, by one of some changes."""
    content = bytearray(path.read_bytes())
    random.of(changes or [*CHANGES.values()])(content, random)
    path.write_bytes(content)


def write(content: bytes) -> specimen.Make:
    """Return the maker of a file with this content."""
    return lambda path, _: path.write_bytes(content)


def link(target: str) -> specimen.Make:
    """Return the maker of a symbolic link."""
    return lambda path, _: path.symlink_to(target)


def folder(path: Path, random: Random) -> None:
    """Make a folder with a file in it."""
    path.mkdir()
    (path / "file").write_text("content")


def sparse(path: Path, random: Random) -> None:
    """Make a file of a terabyte without content."""
    path.touch()
    os.truncate(path, 1 << 40)


def bound_socket(path: Path, random: Random) -> None:
    """Make a socket."""
    with socket.socket(socket.AF_UNIX) as made, chdir(path.parent):  # a socket's path is short
        made.bind(path.name)


NO_FILES: Mapping[str, specimen.Make] = {
    "empty": write(b""),
    "text": write(b"slurmstepd: error: *** JOB 42 CANCELLED ***\n" * 50),
    "folder": folder,
    # Whoever opens a FIFO to read waits for a writer that never comes.
    "fifo": lambda path, _: os.mkfifo(path),
    "socket": bound_socket,
    "sparse": sparse,
    "dangling-link": link("nowhere/file"),
    "link-to-zero": link("/dev/zero"),
}
"""What may have the name of a file of a run."""


def edited(*changes: Change) -> specimen.Make:
    """Return what changes the bytes of a file by one of some changes; of all of `CHANGES` if there is none."""
    return lambda path, random: change_bytes(path, random, *changes)


def instead(make: specimen.Make) -> specimen.Make:
    """Return what puts something else in the place of a file."""

    def replace(path: Path, random: Random) -> None:
        path.unlink(missing_ok=True)
        make(path, random)

    return replace


def _several(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    ranks = specimen.some_ranks(run, random, max(run.num_ranks // 2, 1))
    for rank in sorted(ranks):
        change_bytes(run.file(rank), random)
    return specimen.of_ranks(run, ranks)


def _program(path: Path, random: Random) -> None:
    with open(sys.executable, "rb") as file:
        path.write_bytes(file.read(100_000))


def _signed_noise(path: Path, random: Random) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes([random.count(0, 5)]) + random.bytes(20_000))


def _other_hdf5(path: Path, random: Random) -> None:
    with h5py.File(path, "w") as file:
        file["data/values"] = random.normal(size=1000)


def _odd_format(path: Path, random: Random) -> None:
    """Make HDF5 whose attributes have types that no writer of traces uses."""
    odd = (np.arange(3), 1.5, np.array([b"hpcpace-trace"]), h5py.Empty("f"), "hpcpace\ud800".encode("utf-8", "replace"))
    with h5py.File(path, "w") as file:
        file.attrs["format"], file.attrs["format_version"] = random.of(odd), random.of(odd)


def _circular(path: Path, random: Random) -> None:
    """Make HDF5 that has the right attributes and tables that are links: to itself, to nothing, to other files."""
    values = header_values(specimen.header_of(0, 4))
    with h5py.File(path, "w", libver="v110") as file:
        file.attrs.update({name: values[name] for name in values.keys() - {"samples_unit", "interfaces"}})
        file["steps"] = h5py.SoftLink("/steps")
        file["collectives"] = file["/"]
        file["groups"] = h5py.ExternalLink("/etc/passwd", "/")
        file["account"] = h5py.ExternalLink(path.name, "/account")
        file["phases"] = h5py.SoftLink("/nowhere")


def _unreadable(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    rank = specimen.some_rank(run, random)
    run.path.chmod(0o777)
    run.file(rank).chmod(0)
    return specimen.of_rank(run, rank, f"rank-{rank:05d}", without_rights=True)


def _unreadable_folder(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    run.path.chmod(0o777)
    run.attempt.trace_dir.chmod(random.one(0, 0o444, 0o111))
    return specimen.Damaged(hurt=run.ranks, places=(str(run.path),), without_rights=True)


def _copied_over(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Copy one rank's file over another one's; the one that was copied stays sound."""
    source, target = specimen.some_ranks(run, random, 2)
    shutil.copyfile(run.file(source), run.file(target))
    return specimen.of_rank(run, target, f"rank-{target:05d}")


def _copied_beside(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    source = specimen.some_rank(run, random)
    new = f"rank-{run.num_ranks + random.count(0, 3):05d}"
    shutil.copyfile(run.file(source), run.attempt.trace_dir / f"{new}.h5")
    return specimen.Damaged(places=(new,), says=(new,))


def exchange_files(one: Path, other: Path) -> None:
    """Give two files each other's name."""
    kept = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(kept)


def _exchanged(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    one, other = specimen.some_ranks(run, random, 2)
    exchange_files(run.file(one), run.file(other))
    return specimen.of_ranks(run, {one, other})


def _missing(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    permuted = random.permutation(run.num_ranks)
    ranks = permuted[: random.count(1, run.num_ranks)].tolist()
    for rank in ranks:
        run.file(rank).unlink()
    lost = f"{len(ranks)} of {run.num_ranks} ranks have no readable trace"
    return specimen.of_ranks(run, ranks, lost, f"{min(ranks)}")


_PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde\0\0\0\x0cIDAT"
    + zlib.compress(b"\0\0\0\0")
    + b"\0\0\0\0IEND\xaeB`\x82"
)
_FOREIGN: Mapping[str, specimen.Make] = {
    **NO_FILES,
    **{"program": _program, "signed-noise": _signed_noise, "hdf5": _other_hdf5, "odd-format": _odd_format},
    **{"png": write(_PNG), "noise": lambda path, random: path.write_bytes(random.bytes(random.count(1, 200_000)))},
    **{"circular": _circular, "circular-link": link("rank-00000.h5"), "link-to-null": link("/dev/null")},
    "link-to-folder": link("/"),
}
_FLIPS = {
    f"{bits}-{name}": specimen.to_file(edited(flips(bits, size)))
    for bits in (1, 8, 64)
    for name, size in (("superblock", SUPERBLOCK_BYTES), ("header", HEADER_BYTES), ("anywhere", None))
}
_OF_BYTES = {name: specimen.to_file(edited(change)) for name, change in CHANGES.items() if not name.startswith("flip")}
_OTHERS = {name: specimen.to_file(instead(make), "{path.stem}") for name, make in _FOREIGN.items()}
_UNREADABLE = {"unreadable": _unreadable, "unreadable-folder": _unreadable_folder}
_CUT, _FILES, _RANKS = "cut short", "foreign files", "ranks missing, copied, exchanged"
_ANY = "plain hosts pipeline single killed hang"
_MOVED = {"copied-over": _copied_over, "exchanged": _exchanged, "missing": _missing}
KINDS = (
    *kinds_of(_CUT, {"truncate": _OF_BYTES.pop("truncate")}, on=_ANY, weight=6),
    *kinds_of(_CUT, {"truncate-all": specimen.to_all(edited(truncate))}),
    *kinds_of("bits flipped", _FLIPS, "flip-", on=_ANY, weight=3),
    *kinds_of("zeroed, overwritten, shifted", {**_OF_BYTES, "several": _several}, on=_ANY, weight=3),
    *kinds_of(_FILES, _OTHERS, "foreign-", on="plain single", weight=0.4),
    *kinds_of(_FILES, _UNREADABLE, on="plain", weight=0.4),
    *kinds_of(_RANKS, _MOVED, on="plain hosts pipeline"),
    *kinds_of(_RANKS, {"copied-beside": _copied_beside}),
)
