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

from experiments.damage import specimen
from experiments.damage.chance import Random
from experiments.damage.content import NO_FILES
from experiments.damage.tables import hdf5, some_column

_TABLES = ("steps", "phases", "collectives", "groups", "clock", "account", "host", "network")
_READ = ("steps", "phases", "collectives", "groups", "clock")
_NUM_ROWS = 40
Attack = Callable[[h5py.File, specimen.RunCopy, Random], None]


Lead = Callable[[specimen.RunCopy, Path, Random], object]
"""Puts what leads elsewhere at a path, or into the file there."""


def _led(lead: Lead, *says: str, suffix: str = ".h5") -> specimen.Damage:
    """Return the damage to a rank's file, which all programs are led to read."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        run.shelf.secret.make()
        damaged = specimen.to_file(lambda path, random: lead(run, path, random), *says, suffix=suffix)(run, random)
        return specimen.seen_by_all(run, random, damaged)

    return damage


def _hostile(attack: Attack) -> specimen.Damage:
    return _led(lambda run, path, random: hdf5(lambda file, random: attack(file, run, random))(path, random))


def _instead(lead: Lead, suffix: str) -> specimen.Damage:
    """Return the damage that puts what leads elsewhere in the place of one rank's file."""

    def replace(run: specimen.RunCopy, path: Path, random: Random) -> None:
        path.unlink(missing_ok=True)
        lead(run, path, random)

    return _led(replace, "{path.name}", suffix=suffix)


def _some(file: h5py.File, random: Random) -> tuple[h5py.Group, str]:
    """Return a table and the name of one of its columns, most often of those that a report reads."""
    return some_column(file, random, _READ if random.maybe(0.8) else _TABLES)


def _taken(file: h5py.File, random: Random) -> tuple[h5py.Group, str, h5py.Datatype]:
    """Remove a column, and return its table, its name and the type that it had."""
    table, column = _some(file, random)
    dtype = table[column].dtype
    del table[column]
    return table, column, dtype


def _put(file: h5py.File, random: Random, made: h5py.SoftLink | h5py.ExternalLink | h5py.Group) -> None:
    """Put a link in the place of a table or a column."""
    table, column = _some(file, random)
    place, name = random.one((table, column), (file, table.name))
    del place[name]
    place[name] = made


def _soft_link(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    places = ("/steps", "/steps/end_ns", "/collectives", "/nowhere", "/", ".", "..", "/steps/" * 500)
    _put(file, random, h5py.SoftLink(random.of(places)))


def _circle_of_soft_links(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    file["one"], file["other"] = h5py.SoftLink("/other"), h5py.SoftLink("/one")
    _put(file, random, h5py.SoftLink("/one"))


def _external_link(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    place = random.one("/steps", "/steps/begin_ns", "/groups/name", "/")
    _put(file, random, h5py.ExternalLink(_leading(run, random), place))


def _hard_loop(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    """Let a group hold the root or a table that holds it."""
    _put(file, random, random.one(file["/"], file[random.of(_READ)]))


def _table_of_another_name(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    one, other = random.permutation(_READ)[:2]
    del file[one]
    file[one] = file[other]


def _external_storage(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    table, column, dtype = _taken(file, random)
    size = random.one(h5py.h5f.UNLIMITED, _NUM_ROWS * dtype.itemsize)
    storage = [(_leading(run, random), random.one(0, 8, 1 << 40), size)]
    table.create_dataset(column, shape=(_NUM_ROWS,), dtype=dtype, external=storage)


def _virtual_layout(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    table, column, dtype = _taken(file, random)
    layout = h5py.VirtualLayout(shape=(_NUM_ROWS,), dtype=dtype)
    layout[:] = h5py.VirtualSource(_leading(run, random), table.name + "/" + column, shape=(_NUM_ROWS,))
    table.create_virtual_dataset(column, layout)


def _create(table: h5py.Group, column: str, dtype: h5py.Datatype, space: h5py.h5s.SpaceID, properties: object) -> None:
    h5py.h5d.create(table.id, column.encode(), h5py.h5t.py_create(dtype), space, properties)


def _endless_virtual_layout(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    """Take an extent that HDF5 learns from the files that the layout names; %b numbers these without end."""
    table, column, dtype = _taken(file, random)
    unlimited = h5py.h5s.UNLIMITED
    virtual, source = h5py.h5s.create_simple((_NUM_ROWS,), (unlimited,)), h5py.h5s.create_simple((10,), (unlimited,))
    path = _leading(run, random)
    if random.maybe():
        path = str(run.path / "part-%b.h5")
        virtual.select_hyperslab((0,), (unlimited,), (10,), (10,))
    else:
        for space in (virtual, source):
            space.select_hyperslab((0,), (1,), (1,), (unlimited,))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_virtual(virtual, path.encode(), column.encode(), source)
    _create(table, column, dtype, virtual, properties)


def _unknown_filter(file: h5py.File, run: specimen.RunCopy, random: Random) -> None:
    """Ask for a filter that HDF5 would load from a plugin, or that it has and a trace does not."""
    table, column, dtype = _taken(file, random)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((8,))
    number = (h5py.h5z.FILTER_LZF, h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, 32001, 32015, 307, 65535)
    properties.set_filter(random.of(number), h5py.h5z.FLAG_OPTIONAL, (1, 2, 3, 4))
    if random.maybe():
        properties.set_deflate(6)
    _create(table, column, dtype, h5py.h5s.create_simple((_NUM_ROWS,), (h5py.h5s.UNLIMITED,)), properties)


def _leading(run: specimen.RunCopy, random: Random) -> str:
    """Return a path to a secret, or to something that never ends."""
    secret, pipe = run.shelf.secret, run.path / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    relative = os.path.relpath(secret.trace(), run.attempt.trace_dir)
    paths = (secret.trace(), secret.trace(), secret.text, relative, pipe, "/proc/self/environ", "/dev/zero", ".")
    return str(random.of(paths))


def _link_to_secret(run: specimen.RunCopy, path: Path, random: Random) -> None:
    """Link to the secret file of the same kind, or to its text; relative or absolute, directly or by another link."""
    secret = run.shelf.secret
    target = secret.trace().with_suffix(path.suffix) if random.maybe(0.7) else secret.text
    name: Path | str = random.one(target, os.path.relpath(target, path.parent))
    if random.maybe(0.3):
        (path.parent / "between").symlink_to(name)
        name = "between"
    path.symlink_to(name)


def _link_to_environment(run: specimen.RunCopy, path: Path, random: Random) -> None:
    names = ("/proc/self/environ", "/proc/self/mem", "/proc/self/fd/0", "/proc/kmsg", "/dev/zero", "/dev/tty")
    path.symlink_to(random.of(names))


def _linked_folder(name: str) -> specimen.Damage:
    """Return the damage that puts a link to the secret's folder in the place of one of the run's."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        secret = run.shelf.secret.make()
        place, target = (
            (run.attempt.path, secret.attempt) if name == "attempt" else (run.attempt.trace_dir, secret.trace().parent)
        )
        said = specimen.of_ranks(run, run.ranks)
        shutil.rmtree(place)
        place.symlink_to(target)
        audit = ("audit", "--from", str(run.path))
        return specimen.Damaged(hurt=said.hurt, places=(*said.places, str(run.path)), views=(audit, (*audit, "--json")))

    return damage


RECORDS = ("run.json", "result.json", "trial.json", "snapshot/n0.json")
"""The JSON files of an attempt, with the folder of the snapshots."""


Trap = Callable[[specimen.RunCopy, Random], object]
"""Changes a run so that a reader or a writer may be led elsewhere; all ranks stay sound."""


def _sound(trap: Trap) -> specimen.Damage:
    """Return the damage that leaves all ranks sound."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        run.shelf.secret.make()
        trap(run, random)
        return specimen.seen_by_all(run, random, specimen.of_run(run))

    return damage


def _record_instead(lead: Lead) -> Trap:
    """Return what puts something that leads elsewhere in the place of a JSON file."""

    def trap(run: specimen.RunCopy, random: Random) -> None:
        path = run.attempt.path / random.of(RECORDS)
        path.parent.mkdir(exist_ok=True)
        lead(run, path, random)

    return trap


def _record_to_secret(run: specimen.RunCopy, path: Path, random: Random) -> None:
    secret = run.shelf.secret
    path.symlink_to(secret.attempt / path.relative_to(run.attempt.path) if random.maybe(0.8) else secret.text)


def _made(make: specimen.Make) -> Lead:
    return lambda run, path, random: make(path, random)


def _linked_snapshots(run: specimen.RunCopy, random: Random) -> None:
    (run.attempt.path / "snapshot").symlink_to(run.shelf.secret.attempt / "snapshot")


def _linked_outputs(run: specimen.RunCopy, random: Random) -> None:
    """Let the names of what is written lead to the secret: it must neither be changed nor read."""
    for name in ("summary.json", "report.html"):
        (run.path / name).symlink_to(run.shelf.secret.text)


def _lying_record(run: specimen.RunCopy, random: Random) -> None:
    """Name the secret in a JSON file where a reader might take a text for the path of a file."""
    path = str(run.shelf.secret.text)
    ranks = [{"rank": 0, "host": path}]
    record = {"ranks": ranks, "config": {"file": path}, "environment": {}, "versions": {"a": path}}
    run.attempt.run_json.write_text(json.dumps(record))


_HDF5, _LINKED, _RECORDS = "HDF5 that leads elsewhere", "links, pipes and devices", "JSON files that lead elsewhere"
_ATTACKS: dict[str, Attack] = {
    **{"soft-link": _soft_link, "circle-of-soft-links": _circle_of_soft_links, "external-link": _external_link},
    **{"hard-loop": _hard_loop, "table-of-another-name": _table_of_another_name, "virtual-layout": _virtual_layout},
    **{"external-storage": _external_storage, "endless-virtual-layout": _endless_virtual_layout},
    "unknown-filter": _unknown_filter,
}
_LEADS: dict[str, Lead] = {"to-secret": _link_to_secret, "to-environment": _link_to_environment}
_OF_RECORDS: dict[str, Lead] = {
    **{"to-secret": _record_to_secret, "to-environment": _link_to_environment},
    **{"that-waits": _made(NO_FILES["fifo"]), "socket": _made(NO_FILES["socket"])},
    **{"that-is-a-folder": _made(NO_FILES["folder"]), "to-nothing": _made(NO_FILES["dangling-link"])},
    "to-itself": lambda run, path, random: path.symlink_to(path.name),
}
_SOCKET = _instead(_made(NO_FILES["socket"]), ".journal")
_TRACES, _JOURNALS = ({name: _instead(lead, suffix) for name, lead in _LEADS.items()} for suffix in (".h5", ".journal"))
_OF_CLOSED = {"journal-to-secret-of-closed": _instead(_link_to_secret, ".journal")}
_FOLDERS = {name: _linked_folder(folder) for name, folder in (("attempt", "attempt"), ("traces", "trace"))}
_TRAPS = {name: _sound(_record_instead(lead)) for name, lead in _OF_RECORDS.items()}
_TRAPS |= {"of-paths": _sound(_lying_record)}
_SPECIMENS = "plain hosts single"
KINDS: tuple[specimen.Kind, ...] = (
    *specimen.kinds_of(_HDF5, {name: _hostile(of) for name, of in _ATTACKS.items()}, on=_SPECIMENS, weight=1.5),
    *specimen.kinds_of(_LINKED, _TRACES, "trace-", on=_SPECIMENS),
    *specimen.kinds_of(_LINKED, _JOURNALS, "journal-", on="killed hang"),
    *specimen.kinds_of(_LINKED, _OF_CLOSED, on=_SPECIMENS),
    *specimen.kinds_of(_LINKED, {"journal-socket": _SOCKET}, on="killed"),
    *specimen.kinds_of(
        _LINKED, _FOLDERS | {"outputs": _sound(_linked_outputs)}, end="-to-secret", on="plain", weight=0.3
    ),
    *specimen.kinds_of(_RECORDS, _TRAPS, "record-", on="plain"),
    *specimen.kinds_of(_RECORDS, {"snapshots-to-secret": _sound(_linked_snapshots)}, on="plain", weight=0.4),
)
