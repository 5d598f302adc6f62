"""Headers with impossible sizes, names that would steer a terminal or run as HTML, and what surrounds the traces."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.damage import specimen
from experiments.damage.chance import Random
from experiments.damage.content import NO_FILES, edited, flips, instead, link, truncate, write
from experiments.damage.reports import kinds_of
from experiments.damage.tables import hdf5, opened, resize

SCRIPT = "<script>alert(1)</script>"
_RAW_HTML = (SCRIPT, "<img src=x onerror", "</script><b>")
_NAMES = (
    SCRIPT, "<img src=x onerror=alert(1)>", "</script><b>", '"><svg/onload=alert(1)>', "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "\x01\x02\x7f", "\x9b31m", "a\nb\r\nc\td", "n" * 10_000, "\u202egnp.exe", "\u200b\u2066\ufeff",
    "[bold red]n1[/bold red]", "[/]", "{0} %s ${HOME}", "", " ", "../../etc/passwd", "n1,n2", "日本語\U0001f600",
    "e" + "\u0301" * 500,
)  # fmt: skip
_TEXTS = ("host", "host_key", "run_id", "mesh", "topology_addr", "job_id", "boot_id", "hpcpace_version", "clock")
_SIZES = (-1, 0, 3, 10_000, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))


def _sound(run: specimen.RunCopy, *says: str) -> specimen.Damaged:
    return specimen.of_run(run, *says, never=(SCRIPT,))


def _in_all(attack: Callable[[h5py.File, Random], object]) -> specimen.Damage:
    """Return the damage to the headers of all ranks, which must be reported, with the names escaped."""
    return specimen.to_all(hdf5(attack), never=_RAW_HTML)


def _in_one(attack: Callable[[h5py.File, Random], object]) -> specimen.Damage:
    return specimen.to_file(hdf5(attack))


def _named(attribute: str) -> specimen.Damage:
    """Return the damage that gives odd names to all ranks, different ones or the same."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        # Ranks with different run ids are of different runs; see the kind "mixed-runs".
        names = [random.of(_NAMES)] if random.maybe() or attribute == "run_id" else _NAMES
        return _in_all(lambda file, random: _set(file, attribute, random.of(names)))(run, random)

    return damage


def _set(file: h5py.File, name: str, value: Any) -> None:
    file.attrs[name] = value


def _not_utf8(file: h5py.File, random: Random) -> None:
    for name in ("host", "mesh", "run_id"):
        file.attrs[name] = np.bytes_(b"n\xff\xfe\x80" + random.bytes(8).replace(b"\0", b"\1"))


def _group_names(file: h5py.File, random: Random) -> None:
    names = file["groups"]["name"]
    names[...] = np.full(len(names), random.of(_NAMES).encode()[:64], "S64")


def _units(file: h5py.File, random: Random) -> None:
    file["steps"].attrs["samples_unit"] = random.of(_NAMES)
    del file["network"].attrs["interfaces"]
    file["network"].attrs.create("interfaces", ["<b>", "\x1b[2J"], dtype=h5py.string_dtype())


def _run_folder(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Give the run's own folder a name that would steer a terminal; the caller finds it by the only entry there."""
    name = "run \x1b[31m" + SCRIPT.replace("/", "") + "\n\u202e[bold]"
    for path in sorted(run.path.iterdir()):
        (run.path / name).mkdir(exist_ok=True)
        path.rename(run.path / name / path.name)
    return specimen.Damaged(places=("run ",), never=(SCRIPT.replace("/", ""),))


def _size(attribute: str) -> specimen.Damage:
    return _in_one(lambda file, random: _set(file, attribute, random.of(_SIZES)))


def _size_all(attribute: str) -> specimen.Damage:
    """Return the damage that gives all ranks the same size."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        value = random.of(_SIZES)
        return specimen.to_all(hdf5(lambda file, _: _set(file, attribute, value)))(run, random)

    return damage


_ODD_TYPES = (
    *(1.5, np.nan, np.arange(3), h5py.Empty("i8"), "text", b"\xff", True),
    np.array(["a", "b"], h5py.string_dtype()),
)
_ATTRIBUTES = (*_TEXTS, "rank", "world_size", "node", "pp", "attempt", "format", "format_version", "created_unix_ns")
_ADDRESSES = (
    *("", ".", "...", "a." * 500 + "n", "spine.leaf1.n1", "leaf1.spine.n1", "n1", "spine..n", SCRIPT, "\x1b.\n.x"),
)
"""Addresses in Slurm's tree that contradict each other, are endless, or are none."""


def _nodes(file: h5py.File, random: Random) -> None:
    """Number the hosts so that host names and numbers contradict each other."""
    file.attrs["node"] = random.count(-2, 3)
    file.attrs["host"], file.attrs["host_key"] = f"n{random.count(0, 3)}", f"k{random.count(0, 3)}"


_HEADERS: dict[str, specimen.Damage] = {
    **{f"size-{name}": _size(name) for name in ("world_size", "rank", "node", "attempt", "pp", "tp", "local_size")},
    "attribute-type": _in_one(lambda file, random: _set(file, random.of(_ATTRIBUTES), random.of(_ODD_TYPES))),
    "no-attribute": _in_one(lambda file, random: file.attrs.pop(random.of(sorted(file.attrs)))),
}
_CONTRADICTING: dict[str, specimen.Damage] = {
    "addresses": _in_all(lambda file, random: _set(file, "topology_addr", random.of(_ADDRESSES))),
    "nodes": _in_all(_nodes),
}

# run.json, attempts, folders, and what is written

_ODD_RECORDS: tuple[Any, ...] = (
    *(None, [], "text", 5, {"ranks": None}, {"ranks": {}}),
    *({"ranks": [{"rank": "one", "host": 5}]}, {"ranks": [[]] * 999}),
    {"ranks": [{"rank": 10**30, "host": "n"}, {"rank": -1, "host": None}, {"rank": 3, "host": SCRIPT}]},
    {"ranks": [{"rank": 3, "host": "\x1b[2J" * 100}], "environment": {"HPCPACE_LAB_EMULATION": "\x1b[31m" + SCRIPT}},
    {"environment": []},
    {"environment": {"HPCPACE_LAB_EMULATION": [1, 2, {"a": "b" * 10_000}]}},
)
_RECORD_BYTES = (
    *(b"", b"{", b"\xff\xfe" * 50, b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000, b"[NaN, Infinity, -Infinity]"),
    b'{"ranks": [' + b'{"rank": 1, "host": "n"},' * 300_000 + b'{"rank": 2, "host": "n"}]}',
)


def _record(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    run.attempt.run_json.write_text(json.dumps(random.of(_ODD_RECORDS)))
    run.file(run.num_ranks - 1).unlink()
    return specimen.of_ranks(run, {run.num_ranks - 1})


def _record_bytes(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    run.attempt.run_json.write_bytes(random.one(*_RECORD_BYTES, random.bytes(1000)))
    return _sound(run)


def _placed(make: specimen.Make, *choices: tuple[str, ...]) -> specimen.Damage:
    """Return the damage that puts something in the place of files of the run, which are one of some choices."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        for name in random.of(choices):
            instead(make)(run.path / name, random)
        return _sound(run)

    return damage


def _read_only(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    run.path.chmod(0o555)
    return specimen.Damaged(says=("cannot write", "summary.json"), without_rights=True)


def _extra(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Put files of other programs, and unfinished files, next to the traces."""
    names = ("core.1234", ".nfs0001", "rank-00000.h5-new", "rank-00001.journal-new", "rank-x.h5", "rank-1.txt", "a b\n")
    for name in names:
        (run.attempt.trace_dir / name).write_bytes(random.bytes(100))
    os.mkfifo(run.attempt.trace_dir / "pipe")
    return _sound(run)


def _many_digits(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave a file whose name has a rank of tens or hundreds of digits."""
    shutil.copyfile(run.file(0), run.attempt.trace_dir / f"rank-{'9' * random.one(20, 200)}.h5")
    return specimen.Damaged(places=("rank-9999",), says=("rank-9999",))


def _first_attempt(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Damage an attempt that is not the one that is shown: nothing of it matters."""
    for path in sorted((run.path / "attempt-0" / "trace").iterdir()):
        path.write_bytes(random.bytes(500))
    return _sound(run)


def _empty_attempt(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    made = run.path / f"attempt-{random.count(2, 7)}"
    random.one(made, made / "trace").mkdir(parents=True)
    return specimen.Damaged(hurt=run.ranks, places=(made.name,))


def _odd_attempts(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave things that look like attempts and are none."""
    (run.path / "attempt-7").write_text("a file")
    for name in ("attempt-", "attempt-x"):
        (run.path / name).mkdir()
    for name, target in (("attempt-8", "nowhere"), ("attempt-9", "attempt-9")):
        (run.path / name).symlink_to(target)
    return _sound(run)


def _attempt_of_digits(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    shutil.copytree(run.attempt.path, run.path / ("attempt-" + "9" * 100))
    return _sound(run)


def _gone(place: Callable[[specimen.RunCopy], Path], *, is_made: bool) -> specimen.Damage:
    """Return the damage that removes a folder, or puts a file, or an empty folder, in its place."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        path = place(run)
        shutil.rmtree(path)
        if random.maybe():
            path.write_text("a file")
        elif is_made:
            path.mkdir()
        return specimen.Damaged(hurt=run.ranks, places=(str(path),))

    return damage


def _hang(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Leave a hang as it is, or with a rank that has no trace: the operation and who is inside of it are named."""
    if random.maybe():
        return specimen.Damaged(says=("never completed", "ranks 1-3 inside", "no record of it from rank 0"))
    for path in (run.file(3), run.journal(3)):
        path.unlink()
    return specimen.Damaged(hurt=frozenset({3}), says=("never completed", "ranks 1-2 inside"))


def _hang_closed(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
    """Let all ranks but one close their traces with an operation that never completed."""
    absent = specimen.some_rank(run, random)
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            table = file["collectives"]
            if rank == absent:
                resize(table, len(table["step"]) - 1)
            else:
                table["exit_kind"][-1], table["exit_ns"][-1] = 2, 0
    return specimen.Damaged(says=("never completed", f"{absent}"))


_NAMED, _SIZED = "names with HTML and control characters", "headers"
_RECORD, _ATTEMPTS, _PLACES, _HANGS = "run.json", "attempts and folders", "places to write to", "hangs"
_PLACED = {name: NO_FILES[name] for name in ("folder", "fifo", "dangling-link")}
_PLACED |= {"circular-link": link("summary.json"), "old": write(b"{}")}
_OUTPUTS = (("summary.json",), ("report.html",), ("summary.json", "report.html"))
_TAKEN = {name: _placed(make, *_OUTPUTS) for name, make in _PLACED.items()}
_NO_RECORDS = ("fifo", "folder", "sparse", "link-to-zero")
_NO_RECORD = {name: _placed(NO_FILES[name], ("attempt-0/run.json",)) for name in _NO_RECORDS}
_OTHERS = {"group": _in_all(_group_names), "unit": _in_all(_units), "not-utf8": _in_one(_not_utf8)}
_SIZES_OF_ALL = {name: _size_all(name) for name in ("world_size", "node", "attempt", "pp", "dp")}
_LAST = {"flip": specimen.to_file(edited(flips(64))), "truncate": specimen.to_file(edited(truncate))}
_GONE = {
    "trace": _gone(lambda run: run.attempt.trace_dir, is_made=False),
    "run": _gone(lambda run: run.path, is_made=True),
}
KINDS = (
    *kinds_of(_NAMED, {"name-host": _named("host")}, on="plain hosts pipeline single no-clock", weight=4),
    *kinds_of(_NAMED, {name: _named(name) for name in _TEXTS[1:]}, "name-", weight=0.5),
    *kinds_of(_NAMED, _OTHERS, "name-"),
    *kinds_of(_NAMED, {"name-run-folder": _run_folder}, on="plain", weight=0.4),
    *kinds_of(_SIZED, _CONTRADICTING, on="hosts pipeline"),
    *kinds_of(_SIZED, _HEADERS, weight=1.5),
    *kinds_of(_SIZED, _SIZES_OF_ALL, "size-", "-all", weight=0.6),
    *kinds_of(_RECORD, {"record": _record, "record-bytes": _record_bytes}, on="plain", weight=1.5),
    *kinds_of(_RECORD, _NO_RECORD, "record-", on="plain", weight=0.3),
    *kinds_of(_PLACES, _TAKEN, "taken-", on="plain single", weight=0.4),
    *kinds_of(_PLACES, {"read-only": _read_only}, on="plain", weight=0.4),
    *kinds_of(_ATTEMPTS, {"extra-files": _extra, "many-digits": _many_digits}, weight=0.5),
    *kinds_of(_ATTEMPTS, _LAST, "last-attempt-", on="attempts", weight=2),
    *kinds_of(_ATTEMPTS, {"first-attempt": _first_attempt, "empty-attempt": _empty_attempt}, on="attempts"),
    *kinds_of(_ATTEMPTS, {"odd-attempts": _odd_attempts}, on="attempts plain", weight=0.4),
    *kinds_of(_ATTEMPTS, {"attempt-of-digits": _attempt_of_digits}, on="plain", weight=0.3),
    *kinds_of(_ATTEMPTS, _GONE, end="-is-file", on="plain", weight=0.3),
    *kinds_of(_HANGS, {"hang": _hang}, on="hang", weight=0.5),
    *kinds_of(_HANGS, {"hang-closed": _hang_closed}, on="plain hosts pipeline", weight=0.7),
)
