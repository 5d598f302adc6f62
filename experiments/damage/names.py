"""Headers with sizes that cannot be, and names that would steer a terminal or run as HTML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.damage.kind import ALL_WITH_FILES, Damaged, Kind, Random, of_rank, of_ranks, some_rank
from experiments.damage.specimen import RunCopy
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
