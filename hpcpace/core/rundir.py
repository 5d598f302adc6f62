"""Every file name of a run, as properties of two classes, so that no other module spells one out.

RUN/attempt-0/trace/rank-00003.h5 and rank-00003.journal while it runs, pack-00000-1f0c93b7.h5 once it is packed
RUN/attempt-0/snapshot/HOST.json   RUN/attempt-0/run.json   RUN/attempt-0/trial.json
RUN/attempt-0/hang/rank-00003.json   RUN/attempt-0/probe.json
RUN/report.html   RUN/summary.json   RUN/timeline.pftrace   RUN/switch   RUN/checkpoints/step-00000100
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import field
from os.path import samefile
from pathlib import Path
from typing import Any

from hpcpace.core.environment import process_redaction
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.files import Folder, write_file
from hpcpace.core.records import dataclass
from hpcpace.core.text import first_few, listed, plural, printable, shell_word

_MAX_ATTEMPT = 999_999_999
_ATTEMPT = re.compile(r"attempt-([0-9]{1,9})$")
_TRACE = re.compile(r"rank-(\d+)\.(h5|journal)$")
# What is no id, as that of a made environment, names no folder.
_JOB_ID = re.compile(r"[\w.+-]{1,64}")
_PACK = re.compile(r"pack-\d{5,7}-[0-9a-f]{8}\.h5")

RUNS = Path("runs")
"""The folder of runs that are not given another place."""

HISTORY_INDEX = "hpcpace-history.json"
"""The file beside runs in which `hpcpace history` keeps what it has read of them."""

NUM_OURS_OF_TRACES = 2
"""Number of names that hpcpace chose at the end of the path of an attempt's traces, for `Folder.open`."""


def is_recorded(path: Path) -> bool:
    """Return whether a file is one that an attempt has recorded: in a folder of it, or one of its JSON files."""
    is_of_attempt = _ATTEMPT.match(path.parent.name) and path.suffix == ".json"
    return bool(is_of_attempt) or any(_ATTEMPT.match(folder.name) for folder in path.parent.parents)


@dataclass(frozen=True)
class Attempt:
    """One start of a run: the first, or one after a requeue or an elastic restart.

    Attributes:
        path: its folder.
        run_folder: the run's folder if that is held open; otherwise `open` looks the path up.
    """

    path: Path
    run_folder: Folder | None = field(default=None, compare=False, repr=False)

    def open(self, *, make: bool = False) -> Folder:
        """Open its folder, in a run that somebody else may have written.

        Raises:
            OSError: it does not exist and was not, or could not be, made; a link does not count as a folder.
        """
        if self.run_folder is None:
            return Folder.open(self.path, make=make, num_ours=1)
        name = self.path.name
        return self.run_folder.make_folder(name) if make else self.run_folder.folder(name)

    def write_json(self, path: Path, content: Mapping[str, Any], *, make: bool = False) -> None:
        """Write one of its JSON files atomically; see `hpcpace.core.files.Folder.write`.

        Args:
            path: `run_json`, `result_json`, `trial_json` or `probe_json`.
            content: content of the file.
            make: whether to make the attempt's folder if it does not exist.

        Raises:
            OSError: it cannot be written.
        """
        with self.open(make=make) as folder:
            folder.write(path.name, json_text(content))

    @property
    def number(self) -> int:
        """The attempt's number, counted from 0."""
        match = _ATTEMPT.search(self.path.name)
        return int(match.group(1)) if match else 0

    @property
    def trace_dir(self) -> Path:
        """The folder of the trace files."""
        return self.path / "trace"

    @property
    def run_json(self) -> Path:
        """Resolved configuration, versions, hosts and commit."""
        return self.path / "run.json"

    @property
    def result_json(self) -> Path:
        """The result of a reference workload: losses, throughput and memory, or that memory was too small."""
        return self.path / "result.json"

    @property
    def trial_json(self) -> Path:
        """The outcome of pacing, if the run was paced."""
        return self.path / "trial.json"

    @property
    def probe_json(self) -> Path:
        """What the hosts could do, if they were probed with the run."""
        return self.path / "probe.json"

    @property
    def snapshot_dir(self) -> Path:
        """The folder of the audit's snapshots, one file per host."""
        return self.path / "snapshot"

    @property
    def hang_dir(self) -> Path:
        """The folder of what ranks wrote that saw a step last too long, one file per rank."""
        return self.path / "hang"

    def hang_file(self, rank: int) -> Path:
        """Return the file of a rank that saw a step last too long."""
        return self.hang_dir / f"rank-{rank:05d}.json"

    def trace_file(self, rank: int) -> Path:
        """Return the trace file of a rank."""
        return self.trace_dir / f"rank-{rank:05d}.h5"

    def trace_files(self) -> dict[int, Path]:
        """Return the trace file of every rank that left one, or at least its journal, by rank; not those in packs."""
        found = {int(match.group(1)): name for name in self._trace_names() if (match := _TRACE.fullmatch(name))}
        return {rank: (self.trace_dir / name).with_suffix(".h5") for rank, name in sorted(found.items())}

    def packs(self) -> list[Path]:
        """Return the files that hold the traces of several ranks; see `hpcpace.trace.pack_reader`."""
        return [self.trace_dir / name for name in self._trace_names() if is_pack(name)]

    def trace_bytes(self) -> int:
        """Return the size of all its traces on disk; 0 if they were removed."""
        return sum(self.trace_sizes().values())

    def trace_sizes(self) -> dict[str, int]:
        """Return the size of each of its trace files, journals and packs by name, in order; empty if removed."""
        try:
            with self.open() as folder, folder.folder(self.trace_dir.name) as traces:
                names = [name for name in traces.names() if _TRACE.fullmatch(name) or is_pack(name)]
                return {name: traces.size_bytes(name) for name in names}
        except OSError:
            return {}

    def trace_digest(self) -> str:
        """Return a digest of the names and sizes of its trace files; empty if they were removed.

        A trace grows while its rank records, and its journal disappears at the end, so this changes when it does. Times
        of files would not do: a copy of a run has new ones.
        """
        sizes = self.trace_sizes()
        lines = "".join(f"{name} {size}\n" for name, size in sizes.items())
        return hashlib.sha256(lines.encode()).hexdigest()[:16] if sizes else ""

    def _trace_names(self) -> list[str]:
        try:
            with self.open() as folder, folder.folder(self.trace_dir.name) as traces:
                return traces.names()
        except OSError:
            return []


@dataclass(frozen=True)
class RunDirectory:
    """A run: its attempts, and what was computed from all of them.

    Attributes:
        path: its folder.
        folder: its folder held open by `open_run`, because the run may belong to somebody else.
    """

    path: Path
    folder: Folder | None = field(default=None, compare=False, repr=False)

    def open(self) -> Folder:
        """Open its folder, to be closed by the caller.

        Raises:
            OSError: it cannot be read, or does not exist.
        """
        return Folder.open(self.path) if self.folder is None else self.folder.again()

    @property
    def report_html(self) -> Path:
        """The report as one page."""
        return self.path / "report.html"

    @property
    def summary_json(self) -> Path:
        """The report for programs."""
        return self.path / "summary.json"

    @property
    def timeline_pftrace(self) -> Path:
        """Some steps for Perfetto; `hpcpace timeline` writes it."""
        return self.path / "timeline.pftrace"

    @property
    def switch_file(self) -> Path:
        """The order that switches the level of detail while the job runs; `hpcpace switch` writes it."""
        return self.path / "switch"

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the checkpoints of all attempts, written by hpcpace.train.checkpoint."""
        return self.path / "checkpoints"

    @property
    def next_attempt_number(self) -> int:
        """The number that the next attempt will have: above those of all that is called so, be it a file or a link."""
        try:
            with self.open() as folder:
                found = [_ATTEMPT.fullmatch(name) for name in folder.names()]
        except OSError:
            return 0
        return max((int(match[1]) + 1 for match in found if match), default=0)

    def attempt(self, number: int) -> Attempt:
        """Return an attempt, whether it exists or not."""
        return Attempt(self.path / f"attempt-{number}", self.folder)

    def attempts(self) -> list[Attempt]:
        """Return the attempts that exist, in order of their number."""
        try:
            with self.open() as folder:
                names = [name for name in folder.names() if _ATTEMPT.fullmatch(name) and folder.has_folder(name)]
        except OSError:
            return []
        return sorted((Attempt(self.path / name, self.folder) for name in names), key=lambda attempt: attempt.number)

    def write(self, name: str, content: str) -> None:
        """Write a file into its folder atomically; see `hpcpace.core.files.Folder.write`.

        Raises:
            OSError: it cannot be written.
        """
        with self.open() as folder:
            folder.write(name, content)

    def last_attempt(self) -> Attempt:
        """Return the attempt with the highest number.

        Raises:
            TraceError: there is none, or it was removed.
        """
        attempts = self.attempts()
        if not attempts:
            raise TraceError(f"{self.path} holds no attempt-N folder: it is no run directory, or the job never started")
        return attempts[-1]

    def new_attempt(self) -> Attempt:
        """Create and return the next attempt; two processes that ask at the same time get different ones.

        Raises:
            OSError: the folder cannot be made, or somebody has used up all numbers.
        """
        with Folder.open(self.path, make=True) if self.folder is None else nullcontext(self.folder) as folder:
            while True:
                number = self.next_attempt_number
                if number > _MAX_ATTEMPT:
                    raise OSError(errno.ERANGE, f"attempt-{_MAX_ATTEMPT} is in it, so that no number is left")
                attempt = self.attempt(number)
                try:
                    made = folder.new_folder(attempt.path.name)
                except FileExistsError:
                    continue
                with made:
                    made.new_folder(attempt.trace_dir.name).close()
                return attempt


def open_run(path: str | os.PathLike[str]) -> RunDirectory:
    """Return an existing run directory, held open so that this one is read, whatever is swapped meanwhile.

    Raises:
        TraceError: the path does not exist or holds no attempt.
    """
    try:
        run = RunDirectory(Path(path), Folder.open(Path(path)))
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise TraceError(f"no run directory at {path}{reason}: name the folder that holds attempt-0") from error
    run.last_attempt()
    return run


def rank_of(name: str) -> int | None:
    """Return the rank whose own trace file or journal has a name, None if it is no such name."""
    found = _TRACE.fullmatch(name)
    return int(found.group(1)) if found else None


def is_pack(name: str) -> bool:
    """Return whether a file has the name of a pack, the traces of several ranks."""
    return _PACK.fullmatch(name) is not None


def default_run_path(
    name: str, environ: Mapping[str, str], *, base: Path = RUNS, launched_s: float | None = None
) -> Path:
    """Return `runs/JOB[.STEP]-NAME` in a Slurm job and `runs/TIMESTAMP-NAME` elsewhere.

    A requeued job keeps its path and so gets another attempt. A second run without Slurm within the same second gets a
    number after its name, unless the time is given: that of a launcher, whose restarts share a path.
    """
    name = process_redaction().text(name)
    job_id = environ.get("SLURM_JOB_ID", "")
    if _JOB_ID.fullmatch(job_id):
        step_id = environ.get("SLURM_STEP_ID", "")
        # In a batch script outside srun, SLURM_STEP_ID is unset; step 0 of each job is the usual one.
        step = f".{step_id}" if step_id.isdigit() else ""
        return base / f"{job_id}{step}-{name}"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(launched_s))
    path, number = base / f"{stamp}-{name}", 1
    while launched_s is None and path.exists():
        number += 1
        path = base / f"{stamp}-{name}-{number}"
    return path


def json_text(content: Mapping[str, Any]) -> str:
    """Return content formatted like every JSON file of a run, without secrets; see `hpcpace.core.redaction`."""
    return json.dumps(process_redaction().content(content), indent=2, sort_keys=True) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; see `hpcpace.core.files.Folder.write`.

    Raises:
        OSError: the file cannot be written.
    """
    write_file(path, json_text(content))


# A study keeps its runs in STUDY/runs, and a folder of runs may sort them by topic.
_MAX_NESTED = 3
_MAX_ENTRIES, _MAX_ENTRIES_TO_NAME = 200_000, 2_000
_MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """A run that a user has named, and the attempt of it if that was named, too."""

    directory: RunDirectory
    attempt: int | None

    def chosen_attempt(self, number: int | None) -> Attempt:
        """Return an attempt by its number; the one that was named, else the last one, if that is None.

        Raises:
            UsageError: another one was named.
            TraceError: the run has no such attempt.
        """
        if self.attempt is not None and number not in (None, self.attempt):
            place = self.directory.attempt(self.attempt).path
            raise UsageError(f"{place} is attempt {self.attempt}, and --attempt is {number}: give one of them")
        number = self.attempt if number is None else number
        if number is None:
            return self.directory.last_attempt()
        numbers = [attempt.number for attempt in self.directory.attempts()]
        if number not in numbers:
            raise TraceError(f"no attempt {number} in {self.directory.path}: it has {', '.join(map(str, numbers))}")
        return self.directory.attempt(number)


def open_named_run(path: Path) -> NamedRun:
    """Open the run that a path means: that of a run, of an attempt in it, of its traces, or of its report.

    Raises:
        TraceError: there is no run; the message names the runs below the path, or beside it.
    """
    place, attempt = _place(path)
    try:
        return NamedRun(directory=open_run(place), attempt=attempt)
    except TraceError as error:
        raise TraceError(f"{error}{_runs_there(place)}") from None


@dataclass
class PassedOver:
    """What a search for runs does not look into.

    Attributes:
        num_links: links to folders outside of the one that is searched.
        num_deep: folders in folders that are the last ones looked into.
    """

    num_links: int = 0
    num_deep: int = 0


@dataclass
class _Search:
    """How many more runs, folders and other files a search looks at before it gives up, and what it passed over."""

    folder: Path
    left: int
    passed_over: PassedOver

    def count(self) -> None:
        """Count one of them."""
        self.left -= 1
        if self.left < 0:
            raise TraceError(f"{self.folder} has too many runs, folders and other files to find all: name one in it")


def find_runs(
    folder: Path, *, most_entries: int = _MAX_ENTRIES, passed_over: PassedOver | None = None
) -> Iterator[Path]:
    """Yield the runs in a folder and in folders in it, or the folder itself if it is one; links are not followed.

    Hidden folders are left out. What cannot be read is skipped.

    Args:
        folder: the folder.
        most_entries: runs, other folders, and files outside of runs that are looked at.
        passed_over: takes what was not looked into.

    Raises:
        OSError: the folder itself cannot be read.
        TraceError: there are more entries, so that some runs would not be found.
    """
    with Folder.open(folder) as opened:
        yield from _runs_in(opened, _Search(folder, most_entries, passed_over or PassedOver()), _MAX_NESTED)


def _runs_in(folder: Folder, search: _Search, levels: int) -> Iterator[Path]:
    names = folder.names()
    if any(_ATTEMPT.fullmatch(name) and folder.has_folder(name) for name in names):
        yield folder.path
        return
    visible = [name for name in names if not name.startswith(".")]
    if not levels:
        search.passed_over.num_deep += sum(folder.has_folder(name) for name in visible)
        return
    for name in visible:
        search.count()
        try:
            with folder.folder(name) as inner:
                yield from _runs_in(inner, search, levels - 1)
        except OSError:  # a file, a link, or a folder of somebody else
            search.passed_over.num_links += _leads_out(folder.path / name, search.folder)


def _leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to a folder that is not below another one."""
    return path.is_symlink() and path.is_dir() and not path.resolve().is_relative_to(folder.resolve())


def _place(path: Path) -> tuple[Path, int | None]:
    """Return the folder of the run that a path means, and the number of the attempt that it names."""
    place = path.absolute()
    if place.suffix in (".html", ".json", ".h5", ".journal") and not place.is_dir():
        place = place.parent
    if place.name in ("trace", "snapshot") and _ATTEMPT.fullmatch(place.parent.name):
        place = place.parent
    if found := _ATTEMPT.fullmatch(place.name):
        return place.parent if path.is_absolute() else _relative(place.parent), int(found[1])
    return (path if place == path.absolute() else path.parent), None


def _relative(place: Path) -> Path:
    """Return a path as seen from the working folder where it is below that, as the user wrote it."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place


def _runs_there(place: Path) -> str:
    """Return which runs are in a folder or, if it does not exist, beside it; empty without any."""
    for folder in (place, place.parent):
        try:
            runs = sorted(find_runs(folder, most_entries=_MAX_ENTRIES_TO_NAME))
        except (OSError, TraceError):
            continue
        if runs:
            names = listed(first_few(runs, _MAX_NAMED, words=lambda run: printable(str(run))))
            what = f"{plural(len(runs), 'run')} in {printable(str(folder))}"
            return f"; {what}: {names}; see `hpcpace list {shell_word(str(folder))}`"
        if folder.is_dir():
            break
    return ""


def check_target(target: Path | None, read: Iterable[Path | None], option: str) -> None:
    """Refuse what cannot be written before anything is measured, and what would replace what is read or recorded.

    Args:
        target: the file; None where none is asked for.
        read: files and folders that are read; None counts for none.
        option: that names the target.

    Raises:
        UsageError: it is no file, lies in a folder that may not be written to, or would.
    """
    if target is None:
        return
    shown = printable(str(target))
    if target.parent.is_dir() and not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {shown} ({os.strerror(errno.EACCES)}): name another file with {option}")
    if not target.exists():
        return
    if not target.is_file():
        kind = "folder" if target.is_dir() else "device, pipe or socket"
        raise UsageError(f"cannot write {shown}: it is a {kind}; name a file with {option}")
    if any(path is not None and path.exists() and samefile(target, path) for path in read):
        raise UsageError(f"{shown} is read by this command and would be lost: name another file with {option}")
    if is_recorded(target.resolve()):
        raise UsageError(f"{shown} is what a run has recorded and would be lost: name another file with {option}")
