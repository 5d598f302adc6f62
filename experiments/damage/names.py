"""Headers with impossible sizes, and names that would steer a terminal or run as HTML."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.damage.content import fifo, flips, folder, in_container, link, sparse, truncate, write
from experiments.damage.specimen import ALL_WITH_FILES, Damaged, Kind, Random, RunCopy, of_rank, of_ranks, some_rank
from experiments.damage.tables import opened

SCRIPT = "<script>alert(1)</script>"
_RAW_HTML = (SCRIPT, "<img src=x onerror", "</script><b>")
_NAMES = (
    SCRIPT,
    "<img src=x onerror=alert(1)>",
    "</script><b>",
    '"><svg/onload=alert(1)>',
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x00\x01\x02\x7f",
    "\x9b31m",
    "a\nb\r\nc\td",
    "n" * 10_000,
    "\u202egnp.exe",
    "\u200b\u2066\ufeff",
    "[bold red]n1[/bold red]",
    "[/]",
    "{0} %s ${HOME}",
    "",
    " ",
    "../../etc/passwd",
    "n1,n2",
    "日本語\U0001f600",
    "e" + "\u0301" * 500,
)
_TEXTS = ("host", "host_key", "run_id", "mesh", "topology_addr", "job_id", "boot_id", "hpcpace_version", "clock")
_SIZES = (-1, 0, 3, 10_000, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))


def _named(attribute: str) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that gives odd names to all ranks: all of them must be reported, with the names escaped."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        # Ranks with different run ids are of different runs; see the kind "mixed-runs".
        same = random.random() < 0.5 or attribute == "run_id"
        name = _NAMES[int(random.integers(len(_NAMES)))]
        for rank in sorted(run.ranks):
            with opened(run.file(rank)) as file:
                if not same:
                    name = _NAMES[int(random.integers(len(_NAMES)))]
                file.attrs[attribute] = name.replace("\x00", "\x01")
        return Damaged(hurt=frozenset(), places=(str(run.path),), never=_RAW_HTML)

    return damage


def _not_utf8(run: RunCopy, random: Random) -> Damaged:
    rank = some_rank(run, random)
    with opened(run.file(rank)) as file:
        for name in ("host", "mesh", "run_id"):
            file.attrs[name] = np.bytes_(b"n\xff\xfe\x80" + random.bytes(8).replace(b"\0", b"\1"))
    return of_rank(run, rank)


def _group_names(run: RunCopy, random: Random) -> Damaged:
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            groups = file["groups"]
            name = _NAMES[int(random.integers(len(_NAMES)))].encode()[:64]
            groups["name"][...] = np.full(len(groups["name"]), name, "S64")
    return Damaged(places=(str(run.path),), never=_RAW_HTML)


def _units(run: RunCopy, random: Random) -> Damaged:
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            file["steps"].attrs["samples_unit"] = _NAMES[int(random.integers(len(_NAMES)))].replace("\x00", "\x01")
            del file["network"].attrs["interfaces"]
            file["network"].attrs.create("interfaces", ["<b>", "\x1b[2J"], dtype=h5py.string_dtype())
    return Damaged(places=(str(run.path),), never=_RAW_HTML)


def _run_folder(run: RunCopy, random: Random) -> Damaged:
    """Give the run's own folder a name that would steer a terminal; the caller finds it by the only entry there."""
    name = "run \x1b[31m" + SCRIPT.replace("/", "") + "\n\u202e[bold]"
    for path in sorted(run.path.iterdir()):
        (run.path / name).mkdir(exist_ok=True)
        path.rename(run.path / name / path.name)
    return Damaged(places=("run ",), never=(SCRIPT.replace("/", ""),))


def _size(attribute: str, values: tuple[Any, ...] = _SIZES) -> Callable[[RunCopy, Random], Damaged]:
    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = some_rank(run, random)
        with opened(run.file(rank)) as file:
            file.attrs[attribute] = values[int(random.integers(len(values)))]
        return of_rank(run, rank)

    return damage


def _size_all(attribute: str) -> Callable[[RunCopy, Random], Damaged]:
    def damage(run: RunCopy, random: Random) -> Damaged:
        value = _SIZES[int(random.integers(len(_SIZES)))]
        for rank in sorted(run.ranks):
            with opened(run.file(rank)) as file:
                file.attrs[attribute] = value
        return of_ranks(run, run.ranks)

    return damage


def _attribute_type(run: RunCopy, random: Random) -> Damaged:
    rank = some_rank(run, random)
    odd = (
        1.5,
        np.nan,
        np.arange(3),
        np.array(["a", "b"], h5py.string_dtype()),
        h5py.Empty("i8"),
        "text",
        b"\xff",
        True,
    )
    names = (*_TEXTS, "rank", "world_size", "node", "pp", "attempt", "format", "format_version", "created_unix_ns")
    with opened(run.file(rank)) as file:
        file.attrs[names[int(random.integers(len(names)))]] = odd[int(random.integers(len(odd)))]
    return of_rank(run, rank)


def _no_attribute(run: RunCopy, random: Random) -> Damaged:
    rank = some_rank(run, random)
    with opened(run.file(rank)) as file:
        names = sorted(file.attrs)
        del file.attrs[names[int(random.integers(len(names)))]]
    return of_rank(run, rank)


def _addresses(run: RunCopy, random: Random) -> Damaged:
    """Give hosts addresses in Slurm's tree that contradict each other, are endless, or are none."""
    odd = ("", ".", "...", "a." * 500 + "n", "spine.leaf1.n1", "leaf1.spine.n1", "n1", "spine..n", SCRIPT, "\x1b.\n.x")
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            file.attrs["topology_addr"] = odd[int(random.integers(len(odd)))]
    return Damaged(places=(str(run.path),), never=_RAW_HTML)


def _nodes(run: RunCopy, random: Random) -> Damaged:
    """Number the hosts so that host names and numbers contradict each other."""
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            file.attrs["node"] = int(random.integers(-2, 3))
            file.attrs["host"] = f"n{int(random.integers(3))}"
            file.attrs["host_key"] = f"k{int(random.integers(3))}"
    return Damaged(places=(str(run.path),))


_NAMED, _SIZED = "names with HTML and control characters", "headers"
KINDS = (
    Kind(name="name-host", group=_NAMED, damage=_named("host"), specimens=(*ALL_WITH_FILES, "no-clock"), weight=4),
    *(
        Kind(name=f"name-{attribute}", group=_NAMED, damage=_named(attribute), weight=0.5)
        for attribute in _TEXTS
        if attribute != "host"
    ),
    Kind(name="name-group", group=_NAMED, damage=_group_names),
    Kind(name="name-unit", group=_NAMED, damage=_units),
    Kind(name="name-run-folder", group=_NAMED, damage=_run_folder, specimens=("plain",), weight=0.4),
    Kind(name="name-not-utf8", group=_NAMED, damage=_not_utf8),
    Kind(name="addresses", group=_SIZED, damage=_addresses, specimens=("hosts", "pipeline")),
    Kind(name="nodes", group=_SIZED, damage=_nodes, specimens=("hosts", "pipeline")),
    *(
        Kind(name=f"size-{name}", group=_SIZED, damage=_size(name))
        for name in ("world_size", "rank", "node", "attempt", "pp", "tp", "local_size")
    ),
    *(
        Kind(name=f"size-{name}-all", group=_SIZED, damage=_size_all(name), weight=0.6)
        for name in ("world_size", "node", "attempt", "pp", "dp")
    ),
    Kind(name="attribute-type", group=_SIZED, damage=_attribute_type, weight=4),
    Kind(name="no-attribute", group=_SIZED, damage=_no_attribute, weight=2),
)


def run_folder(run: RunCopy) -> Path:
    """Return the folder to report: the run's, or where it was moved to."""
    inside = [path for path in run.path.iterdir() if path.name.startswith("run ")]
    return inside[0] if inside else run.path


_ODD_RECORDS: tuple[Any, ...] = (
    None,
    [],
    "text",
    5,
    {"ranks": None},
    {"ranks": {}},
    {"ranks": [{"rank": "one", "host": 5}]},
    {"ranks": [{"rank": 10**30, "host": "n"}, {"rank": -1, "host": None}, {"rank": 3, "host": SCRIPT}]},
    {"ranks": [{"rank": 3, "host": "\x1b[2J" * 100}], "environment": {"HPCPACE_LAB_EMULATION": "\x1b[31m" + SCRIPT}},
    {"environment": []},
    {"environment": {"HPCPACE_LAB_EMULATION": [1, 2, {"a": "b" * 10_000}]}},
    {"ranks": [[]] * 1000},
)


def _sound(run: RunCopy, *says: str) -> Damaged:
    return Damaged(places=(str(run.path),), says=says, never=(SCRIPT,))


def _record(run: RunCopy, random: Random) -> Damaged:
    run.attempt.run_json.write_text(json.dumps(_ODD_RECORDS[int(random.integers(len(_ODD_RECORDS)))]))
    run.file(run.num_ranks - 1).unlink()
    return of_ranks(run, frozenset({run.num_ranks - 1}))


def _record_bytes(run: RunCopy, random: Random) -> Damaged:
    content = (
        b"",
        b"{",
        b"\xff\xfe" * 50,
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"[NaN, Infinity, -Infinity]",
        b'{"ranks": [' + b'{"rank": 1, "host": "n"},' * 300_000 + b'{"rank": 2, "host": "n"}]}',
        random.bytes(1000),
    )
    run.attempt.run_json.write_bytes(content[int(random.integers(len(content)))])
    return _sound(run)


def _record_instead(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    def damage(run: RunCopy, random: Random) -> Damaged:
        run.attempt.run_json.unlink(missing_ok=True)
        make(run.attempt.run_json, random)
        return _sound(run)

    return damage


def _taken(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts something where the report is written to."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        for name in (("summary.json",), ("report.html",), ("summary.json", "report.html"))[int(random.integers(3))]:
            make(run.path / name, random)
        return _sound(run)

    return damage


def _read_only(run: RunCopy, random: Random) -> Damaged:
    run.path.chmod(0o555)
    return Damaged(says=("cannot write", "summary.json"), without_rights=True)


def _extra(run: RunCopy, random: Random) -> Damaged:
    """Put files of other programs, and unfinished files, next to the traces."""
    names = ("core.1234", ".nfs0001", "rank-00000.h5-new", "rank-00001.journal-new", "rank-x.h5", "rank-1.txt", "a b\n")
    for name in names:
        (run.attempt.trace_dir / name).write_bytes(random.bytes(100))
    os.mkfifo(run.attempt.trace_dir / "pipe")
    return _sound(run)


def _many_digits(run: RunCopy, random: Random) -> Damaged:
    """Leave a file whose name has a rank of tens or hundreds of digits."""
    digits = "9" * (20, 200)[int(random.integers(2))]
    shutil.copyfile(run.file(0), run.attempt.trace_dir / f"rank-{digits}.h5")
    return Damaged(places=("rank-9999",), says=("rank-9999",))


def _first_attempt(run: RunCopy, random: Random) -> Damaged:
    """Damage an attempt that is not the one that is shown: nothing of it matters."""
    traces = run.path / "attempt-0" / "trace"
    for path in sorted(traces.iterdir()):
        path.write_bytes(random.bytes(500))
    return _sound(run)


def _empty_attempt(run: RunCopy, random: Random) -> Damaged:
    number = 2 + int(random.integers(5))
    made = run.path / f"attempt-{number}"
    made.mkdir()
    if random.random() < 0.5:
        (made / "trace").mkdir()
    return Damaged(hurt=run.ranks, places=(f"attempt-{number}",))


def _odd_attempts(run: RunCopy, random: Random) -> Damaged:
    """Leave things that look like attempts and are none."""
    (run.path / "attempt-7").write_text("a file")
    (run.path / "attempt-").mkdir()
    (run.path / "attempt-x").mkdir()
    (run.path / "attempt-8").symlink_to("nowhere")
    (run.path / "attempt-9").symlink_to("attempt-9")
    return _sound(run)


def _attempt_of_digits(run: RunCopy, random: Random) -> Damaged:
    shutil.copytree(run.attempt.path, run.path / ("attempt-" + "9" * 100))
    return _sound(run)


def _trace_is_file(run: RunCopy, random: Random) -> Damaged:
    traces = run.attempt.trace_dir
    shutil.rmtree(traces)
    if random.random() < 0.5:
        traces.write_text("a file")
    return Damaged(hurt=run.ranks, places=(str(traces),))


def _run_is_file(run: RunCopy, random: Random) -> Damaged:
    shutil.rmtree(run.path)
    if random.random() < 0.5:
        run.path.write_text("a file")
    else:
        run.path.mkdir()
    return Damaged(hurt=frozenset(range(run.num_ranks)), places=(str(run.path),))


def _hang(run: RunCopy, random: Random) -> Damaged:
    """Leave a hang as it is, or with a rank that has no trace: the operation and who is inside of it are named."""
    says = ("never completed", "ranks 1-3 inside", "no record of it from rank 0")
    if random.random() < 0.5:
        return Damaged(says=says)
    for path in (run.file(3), run.journal(3)):
        path.unlink()
    return Damaged(hurt=frozenset({3}), says=("never completed", "ranks 1-2 inside"))


def _hang_closed(run: RunCopy, random: Random) -> Damaged:
    """Let all ranks but one close their traces with an operation that never completed."""
    absent = some_rank(run, random)
    for rank in sorted(run.ranks):
        with opened(run.file(rank)) as file:
            table = file["collectives"]
            if rank == absent:
                for column in table.values():
                    column.resize((len(column) - 1,))
            else:
                table["exit_kind"][-1] = 2
                table["exit_ns"][-1] = 0
    return Damaged(says=("never completed", f"{absent}"))


_RECORD, _ATTEMPTS, _PLACES, _HANGS = "run.json", "attempts and folders", "places to write to", "hangs"
SURROUNDINGS = (
    Kind(name="record", group=_RECORD, damage=_record, specimens=("plain",), weight=2),
    Kind(name="record-bytes", group=_RECORD, damage=_record_bytes, specimens=("plain",)),
    *(
        Kind(name=f"record-{name}", group=_RECORD, damage=_record_instead(make), specimens=("plain",), weight=0.3)
        for name, make in (("fifo", fifo), ("folder", folder), ("sparse", sparse), ("link-to-zero", link("/dev/zero")))
    ),
    *(
        Kind(name=f"taken-{name}", group=_PLACES, damage=_taken(make), specimens=("plain", "single"), weight=0.4)
        for name, make in (
            ("folder", folder),
            ("fifo", fifo),
            ("dangling-link", link("nowhere/file")),
            ("circular-link", link("summary.json")),
            ("old", write(b"{}")),
        )
    ),
    Kind(name="read-only", group=_PLACES, damage=_read_only, specimens=("plain",), weight=0.4),
    Kind(name="extra-files", group=_ATTEMPTS, damage=_extra, specimens=ALL_WITH_FILES, weight=0.5),
    Kind(name="many-digits", group=_ATTEMPTS, damage=_many_digits, specimens=ALL_WITH_FILES, weight=0.5),
    Kind(name="last-attempt-flip", group=_ATTEMPTS, damage=in_container(flips(64)), specimens=("attempts",), weight=2),
    Kind(
        name="last-attempt-truncate", group=_ATTEMPTS, damage=in_container(truncate), specimens=("attempts",), weight=2
    ),
    Kind(name="first-attempt", group=_ATTEMPTS, damage=_first_attempt, specimens=("attempts",)),
    Kind(name="empty-attempt", group=_ATTEMPTS, damage=_empty_attempt, specimens=("attempts",), weight=0.5),
    Kind(name="odd-attempts", group=_ATTEMPTS, damage=_odd_attempts, specimens=("attempts", "plain"), weight=0.4),
    Kind(name="attempt-of-digits", group=_ATTEMPTS, damage=_attempt_of_digits, specimens=("plain",), weight=0.3),
    Kind(name="trace-is-file", group=_ATTEMPTS, damage=_trace_is_file, specimens=("plain",), weight=0.3),
    Kind(name="run-is-file", group=_ATTEMPTS, damage=_run_is_file, specimens=("plain",), weight=0.3),
    Kind(name="hang", group=_HANGS, damage=_hang, specimens=("hang",), weight=0.5),
    Kind(name="hang-closed", group=_HANGS, damage=_hang_closed, specimens=ALL_WITH_FILES[:3], weight=0.7),
)
