"""Files that lead elsewhere: through HDF5 links, external storage and virtual layouts, and through file system links.

Each leads to the secret, or to something that never ends: a FIFO, a device, itself. What they lead to is never read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py

from experiments.damage.content import bound_socket, fifo, folder
from experiments.damage.content import link as link_to
from experiments.damage.specimen import Damaged, Kind, Random, RunCopy, of_rank, of_ranks, seen_by_all, some_rank
from experiments.damage.tables import opened

_TABLES = ("steps", "phases", "collectives", "groups", "clock", "account", "host", "network")
_READ = ("steps", "phases", "collectives", "groups", "clock")
_NUM_ROWS = 40
Attack = Callable[[h5py.File, RunCopy, Random], None]


def _hostile(attack: Attack) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that one attack does to a rank's file, as `tables.changed` does others."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        run.shelf.secret.make()
        rank = some_rank(run, random)
        with opened(run.file(rank)) as file:
            attack(file, run, random)
        return seen_by_all(run, random, of_rank(run, rank))

    return damage


def _of(file: h5py.File, random: Random) -> tuple[h5py.Group, str]:
    """Return a table and the name of one of its columns, most often of those that a report reads."""
    names = _READ if random.random() < 0.8 else _TABLES
    table = file[names[int(random.integers(len(names)))]]
    return table, list(table)[int(random.integers(len(table)))]


def _put(file: h5py.File, random: Random, made: h5py.SoftLink | h5py.ExternalLink | h5py.Group) -> None:
    """Put a link in the place of a table or a column."""
    table, column = _of(file, random)
    if random.random() < 0.5:
        del table[column]
        table[column] = made
    else:
        name = table.name
        del file[name]
        file[name] = made


def _soft_link(file: h5py.File, run: RunCopy, random: Random) -> None:
    places = ("/steps", "/steps/end_ns", "/collectives", "/nowhere", "/", ".", "..", "/steps/" * 500)
    _put(file, random, h5py.SoftLink(places[int(random.integers(len(places)))]))


def _circle_of_soft_links(file: h5py.File, run: RunCopy, random: Random) -> None:
    file["one"], file["other"] = h5py.SoftLink("/other"), h5py.SoftLink("/one")
    _put(file, random, h5py.SoftLink("/one"))


def _external_link(file: h5py.File, run: RunCopy, random: Random) -> None:
    place = ("/steps", "/steps/begin_ns", "/groups/name", "/")[int(random.integers(4))]
    _put(file, random, h5py.ExternalLink(_leading(run, random), place))


def _hard_loop(file: h5py.File, run: RunCopy, random: Random) -> None:
    """Let a group hold itself, or the root that holds it."""
    table, column = _of(file, random)
    if random.random() < 0.5:
        del table[column]
        table[column] = file["/"] if random.random() < 0.5 else table
    else:
        name = table.name
        del file[name]
        file[name] = file["/"]


def _table_of_another_name(file: h5py.File, run: RunCopy, random: Random) -> None:
    one, other = (names := random.permutation(_READ))[0], names[1]
    del file[one]
    file[one] = file[other]


def _external_storage(file: h5py.File, run: RunCopy, random: Random) -> None:
    table, column = _of(file, random)
    dtype = table[column].dtype
    del table[column]
    offset = (0, 8, 1 << 40)[int(random.integers(3))]
    size = h5py.h5f.UNLIMITED if random.random() < 0.5 else _NUM_ROWS * dtype.itemsize
    storage = [(_leading(run, random), offset, size)]
    table.create_dataset(column, shape=(_NUM_ROWS,), dtype=dtype, external=storage)


def _virtual_layout(file: h5py.File, run: RunCopy, random: Random) -> None:
    table, column = _of(file, random)
    dtype = table[column].dtype
    layout = h5py.VirtualLayout(shape=(_NUM_ROWS,), dtype=dtype)
    layout[:] = h5py.VirtualSource(_leading(run, random), table.name + "/" + column, shape=(_NUM_ROWS,))
    del table[column]
    table.create_virtual_dataset(column, layout)


def _endless_virtual_layout(file: h5py.File, run: RunCopy, random: Random) -> None:
    """Take an extent that HDF5 learns from the files that the layout names; %b numbers these without end."""
    table, column = _of(file, random)
    dtype = h5py.h5t.py_create(table[column].dtype)
    unlimited = h5py.h5s.UNLIMITED
    virtual, source = h5py.h5s.create_simple((_NUM_ROWS,), (unlimited,)), h5py.h5s.create_simple((10,), (unlimited,))
    path = _leading(run, random)
    if random.random() < 0.5:
        path = str(run.path / "part-%b.h5")
        virtual.select_hyperslab((0,), (unlimited,), (10,), (10,))
    else:
        virtual.select_hyperslab((0,), (1,), (1,), (unlimited,))
        source.select_hyperslab((0,), (1,), (1,), (unlimited,))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_virtual(virtual, path.encode(), column.encode(), source)
    del table[column]
    h5py.h5d.create(table.id, column.encode(), dtype, virtual, properties)


def _unknown_filter(file: h5py.File, run: RunCopy, random: Random) -> None:
    """Ask for a filter that HDF5 would load from a plugin, or that it has and a trace does not."""
    table, column = _of(file, random)
    dtype = table[column].dtype
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((8,))
    number = (h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, 32001, 32015, 307, 65535)
    properties.set_filter(number[int(random.integers(len(number)))], h5py.h5z.FLAG_OPTIONAL, (1, 2, 3, 4))
    if random.random() < 0.5:
        properties.set_deflate(6)
    space = h5py.h5s.create_simple((_NUM_ROWS,), (h5py.h5s.UNLIMITED,))
    del table[column]
    h5py.h5d.create(table.id, column.encode(), h5py.h5t.py_create(dtype), space, properties)


def _leading(run: RunCopy, random: Random) -> str:
    """Return a path to a secret, or to something that never ends."""
    secret = run.shelf.secret
    pipe = run.path / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    relative = os.path.relpath(secret.trace(), run.attempt.trace_dir)
    paths = (secret.trace(), secret.trace(), secret.text, relative, pipe, "/proc/self/environ", "/dev/zero", ".")
    return str(paths[int(random.integers(len(paths)))])


def _instead(make: Callable[[RunCopy, Path, Random], None], suffix: str) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts what leads elsewhere in the place of one rank's file."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        run.shelf.secret.make()
        rank = some_rank(run, random)
        path = run.file(rank).with_suffix(suffix)
        path.unlink(missing_ok=True)
        make(run, path, random)
        return seen_by_all(run, random, of_rank(run, rank, path.name))

    return damage


def _link_to_secret(run: RunCopy, path: Path, random: Random) -> None:
    """Link to the secret file of the same kind, or to its text; relative or absolute, directly or by another link."""
    secret = run.shelf.secret
    target = secret.trace().with_suffix(path.suffix) if random.random() < 0.7 else secret.text
    name: Path | str = target
    if random.random() < 0.5:
        name = os.path.relpath(target, path.parent)
    if random.random() < 0.3:
        (path.parent / "between").symlink_to(name)
        name = "between"
    path.symlink_to(name)


def _link_to_environment(run: RunCopy, path: Path, random: Random) -> None:
    names = ("/proc/self/environ", "/proc/self/mem", "/proc/self/fd/0", "/proc/kmsg", "/dev/zero", "/dev/tty")
    path.symlink_to(names[int(random.integers(len(names)))])


def _linked_folder(name: str) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts a link to the secret's folder in the place of one of the run's."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        secret = run.shelf.secret.make()
        place, target = {
            "attempt": (run.attempt.path, secret.attempt),
            "trace": (run.attempt.trace_dir, secret.trace().parent),
        }[name]
        said = of_ranks(run, run.ranks)
        shutil.rmtree(place)
        place.symlink_to(target)
        return Damaged(
            hurt=said.hurt,
            places=(*said.places, str(run.path)),
            views=(("audit", "--from", str(run.path)), ("audit", "--from", str(run.path), "--json")),
        )

    return damage


RECORDS = ("run.json", "result.json", "trial.json", "snapshot/n0.json")
"""The JSON files of an attempt, with the folder of the snapshots."""


def _record_instead(make: Callable[[RunCopy, Path, Random], None], *says: str) -> Callable[[RunCopy, Random], Damaged]:
    """Return the damage that puts what leads elsewhere in the place of a JSON file; all ranks stay sound."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        run.shelf.secret.make()
        name = RECORDS[int(random.integers(len(RECORDS)))]
        path = run.attempt.path / name
        path.parent.mkdir(exist_ok=True)
        make(run, path, random)
        return seen_by_all(run, random, Damaged(places=(str(run.path),), says=says))

    return damage


def _record_to_secret(run: RunCopy, path: Path, random: Random) -> None:
    secret = run.shelf.secret
    path.symlink_to(secret.attempt / path.relative_to(run.attempt.path) if random.random() < 0.8 else secret.text)


def _made(make: Callable[[Path, Random], None]) -> Callable[[RunCopy, Path, Random], None]:
    return lambda run, path, random: make(path, random)


def _linked_snapshots(run: RunCopy, random: Random) -> Damaged:
    (run.attempt.path / "snapshot").symlink_to(run.shelf.secret.make().attempt / "snapshot")
    return seen_by_all(run, random, Damaged(places=(str(run.path),)))


def _linked_outputs(run: RunCopy, random: Random) -> Damaged:
    """Let the names of what is written lead to the secret: it must neither be changed nor read."""
    secret = run.shelf.secret.make()
    for name in ("summary.json", "report.html"):
        (run.path / name).symlink_to(secret.text)
    return seen_by_all(run, random, Damaged(places=(str(run.path),)))


def _lying_record(run: RunCopy, random: Random) -> Damaged:
    """Name the secret in a JSON file where a reader might take a text for the path of a file."""
    path = str(run.shelf.secret.make().text)
    run.attempt.run_json.write_text(
        json.dumps(
            {"ranks": [{"rank": 0, "host": path}], "config": {"file": path}, "environment": {}, "versions": {"a": path}}
        )
    )
    return seen_by_all(run, random, Damaged(places=(str(run.path),)))


_HDF5, _LINKED, _RECORDS = "HDF5 that leads elsewhere", "links, pipes and devices", "JSON files that lead elsewhere"
_SPECIMENS, _PLAIN = ("plain", "hosts", "single"), ("plain",)
KINDS = (
    *(
        Kind(name=name, group=_HDF5, damage=_hostile(attack), specimens=_SPECIMENS, weight=weight)
        for name, attack, weight in (
            ("soft-link", _soft_link, 1.5),
            ("circle-of-soft-links", _circle_of_soft_links, 0.5),
            ("external-link", _external_link, 2.5),
            ("hard-loop", _hard_loop, 1.0),
            ("table-of-another-name", _table_of_another_name, 0.5),
            ("external-storage", _external_storage, 2.5),
            ("virtual-layout", _virtual_layout, 2.0),
            ("endless-virtual-layout", _endless_virtual_layout, 1.5),
            ("unknown-filter", _unknown_filter, 1.5),
        )
    ),
    *(
        Kind(name=f"trace-{name}", group=_LINKED, damage=_instead(make, ".h5"), specimens=_SPECIMENS, weight=weight)
        for name, make, weight in (
            ("to-secret", _link_to_secret, 1.5),
            ("to-environment", _link_to_environment, 1.0),
        )
    ),
    *(
        Kind(name=f"journal-{name}", group=_LINKED, damage=_instead(make, ".journal"), specimens=specimens, weight=1)
        for name, make, specimens in (
            ("to-secret", _link_to_secret, ("killed", "hang")),
            ("to-environment", _link_to_environment, ("killed", "hang")),
            ("to-secret-of-closed", _link_to_secret, _SPECIMENS),
            ("socket", _made(bound_socket), ("killed",)),
        )
    ),
    Kind(name="attempt-to-secret", group=_LINKED, damage=_linked_folder("attempt"), specimens=("plain",), weight=0.3),
    Kind(name="traces-to-secret", group=_LINKED, damage=_linked_folder("trace"), specimens=("plain",), weight=0.3),
    Kind(name="outputs-to-secret", group=_LINKED, damage=_linked_outputs, specimens=("plain",), weight=0.3),
    Kind(
        name="record-to-secret",
        group=_RECORDS,
        damage=_record_instead(_record_to_secret),
        specimens=("plain",),
        weight=2,
    ),
    *(
        Kind(name=f"record-{name}", group=_RECORDS, damage=_record_instead(make), specimens=("plain",))
        for name, make in (
            ("to-environment", _link_to_environment),
            ("that-waits", _made(fifo)),
            ("socket", _made(bound_socket)),
            ("that-is-a-folder", _made(folder)),
            ("to-itself", lambda run, path, random: path.symlink_to(path.name)),
            ("to-nothing", _made(link_to("nowhere"))),
        )
    ),
    Kind(name="snapshots-to-secret", group=_RECORDS, damage=_linked_snapshots, specimens=("plain",), weight=0.4),
    Kind(name="record-of-paths", group=_RECORDS, damage=_lying_record, specimens=("plain",), weight=0.4),
)
