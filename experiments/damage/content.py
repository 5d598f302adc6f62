"""Damage to the bytes of files: cut, flipped, zeroed, overwritten, swapped for something else."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from experiments.damage.kind import ALL_WITH_FILES, Damaged, Kind, Random, of_rank, of_ranks, some_rank
from experiments.damage.specimen import RunCopy
from hpcpace.trace.schema import header_values

SUPERBLOCK_BYTES, HEADER_BYTES = 48, 4096
_ANY = (*ALL_WITH_FILES, "killed", "hang")

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
    bound = (len(content), 64, 4096)[int(random.integers(3))]
    del content[int(random.integers(min(bound, len(content)))) :]


def zero(content: bytearray, random: Random) -> None:
    """Zero some pages or sectors."""
    size = (512, 4096)[int(random.integers(2))]
    for _ in range(int(random.integers(1, 5))):
        begin = int(random.integers(len(content))) // size * size
        content[begin : begin + size] = bytes(len(content[begin : begin + size]))


def overwrite(content: bytearray, random: Random) -> None:
    """Write noise over some place."""
    begin, size = int(random.integers(len(content))), int(random.integers(1, 2000))
    content[begin : begin + size] = random.bytes(len(content[begin : begin + size]))


def append(content: bytearray, random: Random) -> None:
    """Append noise."""
    content += random.bytes(int(random.integers(1, 100_000)))


def insert(content: bytearray, random: Random) -> None:
    """Insert noise, which moves all that follows."""
    begin = int(random.integers(len(content)))
    content[begin:begin] = random.bytes(int(random.integers(1, 100)))


def exchange(content: bytearray, random: Random) -> None:
    """Exchange two sectors."""
    one, other = (int(begin) // 512 * 512 for begin in random.integers(max(len(content) - 512, 1), size=2))
    content[one : one + 512], content[other : other + 512] = content[other : other + 512], content[one : one + 512]


def in_container(change: Change) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that changes the bytes of one rank's HDF5 file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        change_bytes(run.file(rank), change, random)
        return of_rank(run, rank)

    return damage


def change_bytes(path: Path, change: Change, random: Random) -> None:
    """Change the bytes of a file in place."""
    content = bytearray(path.read_bytes())
    change(content, random)
    path.write_bytes(content)


def _several(run: RunCopy, random: Random) -> Damaged:
    ranks = frozenset(random.permutation(run.num_ranks)[: max(run.num_ranks // 2, 1)].tolist())
    changes = (flips(8), truncate, zero, overwrite, append, insert, exchange)
    for rank in sorted(ranks):
        change_bytes(run.file(rank), changes[int(random.integers(len(changes)))], random)
    return of_ranks(run, ranks)


def _all(run: RunCopy, random: Random) -> Damaged:
    for rank in sorted(run.ranks):
        change_bytes(run.file(rank), truncate, random)
    return of_ranks(run, run.ranks)


def instead(make: Callable[[Path, Random], None], suffix: str = ".h5") -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts something else in the place of one rank's file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        path = run.file(rank).with_suffix(suffix)
        path.unlink(missing_ok=True)
        make(path, random)
        return of_rank(run, rank, f"rank-{rank:05d}")

    return damage


def write(content: bytes) -> Callable[[Path, Random], None]:
    """Return the maker of a file with this content."""
    return lambda path, _: path.write_bytes(content) and None


def link(target: str) -> Callable[[Path, Random], None]:
    """Return the maker of a symbolic link."""
    return lambda path, _: path.symlink_to(target)


def fifo(path: Path, random: Random) -> None:
    """Make a FIFO: whoever opens it to read waits for a writer that never comes."""
    os.mkfifo(path)


def folder(path: Path, random: Random) -> None:
    """Make a folder with a file in it."""
    path.mkdir()
    (path / "file").write_text("content")


def sparse(path: Path, random: Random) -> None:
    """Make a file of a terabyte without content."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def bound_socket(path: Path, random: Random) -> None:
    """Make a socket."""
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as made:
        try:
            os.chdir(path.parent)  # a socket's path is short
            made.bind(path.name)
        finally:
            os.chdir(here)


def _program(path: Path, random: Random) -> None:
    with open(sys.executable, "rb") as file:
        path.write_bytes(file.read(100_000))


def _noise(path: Path, random: Random) -> None:
    path.write_bytes(random.bytes(int(random.integers(1, 200_000))))


def _signed_noise(path: Path, random: Random) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes([int(random.integers(5))]) + random.bytes(20_000))


def _other_hdf5(path: Path, random: Random) -> None:
    with h5py.File(path, "w") as file:
        file["data/values"] = random.normal(size=1000)


def _odd_format(path: Path, random: Random) -> None:
    """Make HDF5 whose attributes have types that no writer of traces uses."""
    odd = (np.arange(3), 1.5, np.array([b"hpcpace-trace"]), h5py.Empty("f"), "hpcpace\ud800".encode("utf-8", "replace"))
    with h5py.File(path, "w") as file:
        file.attrs["format"] = odd[int(random.integers(len(odd)))]
        file.attrs["format_version"] = odd[int(random.integers(len(odd)))]


def _circular(path: Path, random: Random) -> None:
    """Make HDF5 that has the right attributes and tables that are links: to itself, to nothing, to other files."""
    with h5py.File(path, "w", libver="v110") as file:
        file.attrs.update(_attributes())
        file["steps"] = h5py.SoftLink("/steps")
        file["collectives"] = file["/"]
        file["groups"] = h5py.ExternalLink("/etc/passwd", "/")
        file["account"] = h5py.ExternalLink(path.name, "/account")
        file["phases"] = h5py.SoftLink("/nowhere")


def _attributes() -> dict[str, object]:
    from hpcpace.trace.schema import TraceHeader

    header = TraceHeader(
        run_id="synthetic", attempt=0, rank=0, world_size=4, local_rank=0, local_size=4, node=0, host="n0"
    )
    values = header_values(header)
    return {name: value for name, value in values.items() if name not in ("samples_unit", "interfaces")}


def _unreadable(run: RunCopy, random: Random) -> Damaged:
    rank = some_rank(run, random)
    run.path.chmod(0o777)
    run.file(rank).chmod(0)
    return Damaged(
        hurt=frozenset({rank}), places=(f"rank-{rank:05d}",), says=(f"rank-{rank:05d}",), without_rights=True
    )


def _unreadable_folder(run: RunCopy, random: Random) -> Damaged:
    run.path.chmod(0o777)
    run.attempt.trace_dir.chmod((0, 0o444, 0o111)[int(random.integers(3))])
    return Damaged(hurt=run.ranks, places=(str(run.path),), without_rights=True)


def _copied_over(run: RunCopy, random: Random) -> Damaged:
    """Copy one rank's file over another one's; the one that was copied stays sound."""
    source, target = random.permutation(run.num_ranks)[:2].tolist()
    shutil.copyfile(run.file(source), run.file(target))
    return of_rank(run, target, f"rank-{target:05d}")


def _copied_beside(run: RunCopy, random: Random) -> Damaged:
    source = some_rank(run, random)
    new = run.num_ranks + int(random.integers(3))
    shutil.copyfile(run.file(source), run.file(new))
    return Damaged(places=(f"rank-{new:05d}",), says=(f"rank-{new:05d}",))


def _exchanged(run: RunCopy, random: Random) -> Damaged:
    one, other = random.permutation(run.num_ranks)[:2].tolist()
    kept = run.file(one).read_bytes()
    shutil.copyfile(run.file(other), run.file(one))
    run.file(other).write_bytes(kept)
    return of_ranks(run, frozenset({one, other}))


def _missing(run: RunCopy, random: Random) -> Damaged:
    num_missing = int(random.integers(1, run.num_ranks))
    ranks = frozenset(random.permutation(run.num_ranks)[:num_missing].tolist())
    for rank in sorted(ranks):
        run.file(rank).unlink()
    first = min(ranks)
    return of_ranks(run, ranks, f"{len(ranks)} of {run.num_ranks} ranks have no readable trace", f"{first}")


def _png() -> bytes:
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde"
    return head + b"\0\0\0\x0cIDAT" + zlib.compress(b"\0\0\0\0") + b"\0\0\0\0IEND\xaeB`\x82"


_CUT, _FLIPPED, _OVERWRITTEN, _FOREIGN = "cut short", "bits flipped", "zeroed, overwritten, shifted", "foreign files"
_RANKS = "ranks missing, copied, exchanged"
_SEVERAL = ("plain", "hosts", "pipeline")

KINDS = (
    Kind(name="truncate", group=_CUT, damage=in_container(truncate), specimens=_ANY, weight=6),
    Kind(name="truncate-all", group=_CUT, damage=_all, specimens=ALL_WITH_FILES),
    *(
        Kind(
            name=f"flip-{bits}-{name}", group=_FLIPPED, damage=in_container(flips(bits, size)), specimens=_ANY, weight=3
        )
        for bits in (1, 8, 64)
        for name, size in (("superblock", SUPERBLOCK_BYTES), ("header", HEADER_BYTES), ("anywhere", None))
    ),
    Kind(name="zero", group=_OVERWRITTEN, damage=in_container(zero), specimens=_ANY, weight=4),
    Kind(name="overwrite", group=_OVERWRITTEN, damage=in_container(overwrite), specimens=_ANY, weight=4),
    Kind(name="append", group=_OVERWRITTEN, damage=in_container(append), specimens=_ANY),
    Kind(name="insert", group=_OVERWRITTEN, damage=in_container(insert), specimens=_ANY, weight=2),
    Kind(name="exchange", group=_OVERWRITTEN, damage=in_container(exchange), specimens=_ANY, weight=2),
    Kind(name="several", group=_OVERWRITTEN, damage=_several, specimens=_ANY, weight=4),
    *(
        Kind(name=f"foreign-{name}", group=_FOREIGN, damage=instead(make), specimens=("plain", "single"), weight=0.4)
        for name, make in (
            ("empty", write(b"")),
            ("text", write(b"slurmstepd: error: *** JOB 42 CANCELLED ***\n" * 50)),
            ("png", write(_png())),
            ("program", _program),
            ("noise", _noise),
            ("signed-noise", _signed_noise),
            ("hdf5", _other_hdf5),
            ("odd-format", _odd_format),
            ("circular", _circular),
            ("folder", folder),
            ("fifo", fifo),
            ("socket", bound_socket),
            ("sparse", sparse),
            ("dangling-link", link("nowhere")),
            ("circular-link", link("rank-00000.h5")),
            ("link-to-zero", link("/dev/zero")),
            ("link-to-null", link("/dev/null")),
            ("link-to-folder", link("/")),
        )
    ),
    Kind(name="unreadable", group=_FOREIGN, damage=_unreadable, specimens=("plain",), weight=0.4),
    Kind(name="unreadable-folder", group=_FOREIGN, damage=_unreadable_folder, specimens=("plain",), weight=0.4),
    Kind(name="copied-over", group=_RANKS, damage=_copied_over, specimens=_SEVERAL),
    Kind(name="copied-beside", group=_RANKS, damage=_copied_beside),
    Kind(name="exchanged", group=_RANKS, damage=_exchanged, specimens=_SEVERAL),
    Kind(name="missing", group=_RANKS, damage=_missing, specimens=_SEVERAL),
)
