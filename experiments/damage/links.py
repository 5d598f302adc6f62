"""Files that lead elsewhere: through HDF5 links, external storage and virtual layouts, and through file system links.

Each leads to the secret, or to something that never ends: a FIFO, a device, itself. What they lead to is never read.
What each feature of HDF5 does alone is a unit test with a known answer.
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
from experiments.damage.reports import kinds_of
from experiments.damage.tables import opened, some_column

_NUM_ROWS = 40
RECORDS = ("run.json", "result.json", "trial.json", "snapshot/n0.json")
"""The JSON files of an attempt, with the folder of the snapshots."""

Lead = Callable[[specimen.RunCopy, Path, Random], object]
"""Puts what leads elsewhere at a path, or into the file there."""


def _led(lead: Lead, *says: str, suffix: str = ".h5") -> specimen.Damage:
    """Return the damage to a rank's file, which all programs are led to read."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        run.shelf.secret.make()
        damaged = specimen.to_file(lambda path, random: lead(run, path, random), *says, suffix=suffix)(run, random)
        return specimen.seen_by_all(run, random, damaged)

    return damage


def _instead(lead: Lead, suffix: str) -> specimen.Damage:
    """Return the damage that puts what leads elsewhere in the place of one rank's file."""

    def replace(run: specimen.RunCopy, path: Path, random: Random) -> None:
        path.unlink(missing_ok=True)
        lead(run, path, random)

    return _led(replace, "{path.name}", suffix=suffix)


def _column_elsewhere(run: specimen.RunCopy, path: Path, random: Random) -> None:
    """Let a column be in another file: by an external link, external storage or a virtual layout."""
    secret, pipe = run.shelf.secret, run.path / "pipe"
    os.mkfifo(pipe)
    other = str(random.one(secret.trace(), secret.text, os.path.relpath(secret.trace(), path.parent), pipe))
    with opened(path) as file:
        table, column = some_column(file, random)
        dtype, place = table[column].dtype, f"{table.name}/{column}"
        del table[column]
        match random.count(0, 3):
            case 0:
                table[column] = h5py.ExternalLink(other, random.one(place, table.name, "/"))
            case 1:
                storage = [(other, 0, random.one(h5py.h5f.UNLIMITED, _NUM_ROWS * dtype.itemsize))]
                table.create_dataset(column, shape=(_NUM_ROWS,), dtype=dtype, external=storage)
            case _:
                layout = h5py.VirtualLayout(shape=(_NUM_ROWS,), dtype=dtype)
                layout[:] = h5py.VirtualSource(other, place, shape=(_NUM_ROWS,))
                table.create_virtual_dataset(column, layout)


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


def _sound(trap: Callable[[specimen.RunCopy, Random], object]) -> specimen.Damage:
    """Return the damage that may lead a reader or a writer elsewhere, and leaves all ranks sound."""

    def damage(run: specimen.RunCopy, random: Random) -> specimen.Damaged:
        run.shelf.secret.make()
        trap(run, random)
        return specimen.seen_by_all(run, random, specimen.of_run(run))

    return damage


def _record_instead(lead: Lead) -> specimen.Damage:
    """Return the damage that puts something that leads elsewhere in the place of a JSON file."""

    def trap(run: specimen.RunCopy, random: Random) -> None:
        path = run.attempt.path / random.of(RECORDS)
        path.parent.mkdir(exist_ok=True)
        lead(run, path, random)

    return _sound(trap)


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


_LINKED, _IN_RECORDS = "links, pipes and devices", "JSON files that lead elsewhere"
_LEADS: dict[str, Lead] = {"to-secret": _link_to_secret, "to-environment": _link_to_environment}
_OF_RECORDS: dict[str, Lead] = {
    **{"to-secret": _record_to_secret, "to-environment": _link_to_environment},
    **{"that-waits": _made(NO_FILES["fifo"]), "socket": _made(NO_FILES["socket"])},
    **{"that-is-a-folder": _made(NO_FILES["folder"]), "to-nothing": _made(NO_FILES["dangling-link"])},
    "to-itself": lambda run, path, random: path.symlink_to(path.name),
}
_TRACES, _JOURNALS = ({name: _instead(lead, suffix) for name, lead in _LEADS.items()} for suffix in (".h5", ".journal"))
_FOLDERS = {name: _linked_folder(folder) for name, folder in (("attempt", "attempt"), ("traces", "trace"))}
_TO_SECRET = {**_FOLDERS, "outputs": _sound(_linked_outputs)}
_SPECIMENS = "plain hosts single"
KINDS = (
    *kinds_of("HDF5 that leads elsewhere", {"column-elsewhere": _led(_column_elsewhere)}, on=_SPECIMENS, weight=6),
    *kinds_of(_LINKED, _TRACES, "trace-", on=_SPECIMENS),
    *kinds_of(_LINKED, _JOURNALS, "journal-", on="killed hang"),
    *kinds_of(_LINKED, {"journal-to-secret-of-closed": _instead(_link_to_secret, ".journal")}, on=_SPECIMENS),
    *kinds_of(_LINKED, {"journal-socket": _instead(_made(NO_FILES["socket"]), ".journal")}, on="killed"),
    *kinds_of(_LINKED, _TO_SECRET, end="-to-secret", on="plain", weight=0.3),
    *kinds_of(_IN_RECORDS, {name: _record_instead(lead) for name, lead in _OF_RECORDS.items()}, "record-", on="plain"),
    *kinds_of(_IN_RECORDS, {"record-of-paths": _sound(_lying_record)}, on="plain"),
    *kinds_of(_IN_RECORDS, {"snapshots-to-secret": _sound(_linked_snapshots)}, on="plain", weight=0.4),
)
