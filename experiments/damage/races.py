"""Races: each program of hpcpace reads or writes a folder while its owner swaps the content.

The owner is an unprivileged user and the program runs as root; where there is no root, both are one user, and the
files elsewhere that must neither be read nor changed are that user's own.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.damage.child import Child, Result, wait_for_one
from experiments.damage.specimen import FIGURES, SCRIPT, Secret, Shelf
from experiments.damage.swappers import NOBODY, SWAPPERS, TEMPORARY, Field, swapping
from experiments.synthetic_run import header_of
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import save_snapshots
from hpcpace.audit.tree import Tree
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import NUM_OURS_OF_TRACES, RunDirectory
from hpcpace.trace.recorder import Recorder

_NUM_FILES, _NUM_LOOKS, _NUM_CHECKPOINTS = 20, 1000, 3
_NAIVE_BYTES, _MAX_PRINTED = 1 << 22, 100


def save(folder: Path) -> int:
    """Save snapshots of two hosts as `hpcpace audit --save` does, again and again."""
    snapshots = [take_host(Tree(), host=host) for host in ("n0", "n1")]
    try:
        for _ in range(_NUM_FILES):
            save_snapshots(folder, snapshots)
    except HpcpaceError as error:
        print(error)
        return error.exit_code
    return 0


def record_start(path: Path) -> int:
    """Begin an attempt in somebody else's run and record into it, as a session does."""
    run = RunDirectory(path)
    warnings: list[str] = []
    try:
        attempt = run.new_attempt()
        header = header_of(0, 1, run_id="run", attempt=attempt.number)
        open_folder = partial(Folder.open, attempt.trace_dir, make=True, num_ours=NUM_OURS_OF_TRACES)
        with Recorder(
            attempt.trace_file(0), header, warn=warnings.append, flush_interval_s=0.001, open_folder=open_folder
        ) as recorder:
            attempt.write_json(attempt.run_json, {"ranks": []})
            for step in range(200):
                recorder.add_step(step, step * 10**6, (step + 1) * 10**6, 1, 0)
            recorder.flush()
        attempt.write_json(attempt.result_json, {"outcome": "finished"})
    except (OSError, HpcpaceError) as error:
        print(error, *warnings)
        return 2
    return int(bool(warnings))


def save_checkpoints(run: Path) -> int:
    """Write checkpoints into somebody else's run, as a training does."""
    # Only here: torch takes long to load, and much memory.
    import torch
    import torch.distributed.checkpoint as dcp

    from hpcpace.train.checkpoint import reason_of
    from hpcpace.train.checkpoint_folder import NewCheckpoint, clear_checkpoints

    torch.set_num_threads(1)
    folder = run / "checkpoints"
    try:
        clear_checkpoints(folder)
        for step in range(_NUM_CHECKPOINTS):
            with NewCheckpoint(folder, f"step-{step:08d}") as checkpoint:
                with checkpoint.writer() as writer:
                    dcp.save({"weight": torch.ones(8)}, storage_writer=writer, no_dist=True)
                checkpoint.publish(num_kept=2)
    except (dcp.CheckpointException, OSError, HpcpaceError) as error:
        print(reason_of(error))
        return 2
    return 0


def save_naively(folder: Path) -> int:
    """Write a file under a temporary name, change its mode by that name, and rename it: all by paths."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".n0.json.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(b" " * _NAIVE_BYTES)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / "n0.json")
    except OSError as error:
        print(error)
        return 2
    return 0


def read_naively(path: Path) -> int:
    """Look whether a path is a regular file, and only then open it: what is read may be another file."""
    for _ in range(_NUM_LOOKS):
        try:
            if path.is_file() and not path.is_symlink():
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                print(os.read(descriptor, _MAX_PRINTED))
                os.close(descriptor)
        except OSError as error:
            print(error)
    return 0


_CODES = (0, 1, 2, 3, 4)


class Ground:
    """A home that belongs to the swapper, with a run in it, and folders elsewhere that do not.

    Attributes:
        secret: files elsewhere that the swapper may not read.
        home: the swapper's folder.
    """

    def __init__(self, folder: Path, uid: int | None) -> None:
        self._uid = uid
        self._elsewhere = folder / "elsewhere"
        self.home = folder / "home"
        self._make_elsewhere()

    def _make_elsewhere(self) -> None:
        shutil.rmtree(self._elsewhere, ignore_errors=True)
        self._elsewhere.mkdir()
        self._shelf = Shelf(self._elsewhere / "specimens")
        self._shelf.kept("plain")
        self.secret = Secret(self._elsewhere / "secret").make()
        own = self._elsewhere / "own"
        own.mkdir()
        (own / "file").write_text("content")
        (own / "private").write_text(self.secret.token)
        (own / "private").chmod(0o600)
        self._before = self._state()

    @property
    def run(self) -> Path:
        """The run in the home."""
        return self.home / "run"

    @property
    def attempt(self) -> Path:
        """Its only attempt."""
        return self.run / "attempt-0"

    @property
    def targets(self) -> tuple[Path, ...]:
        """What links may lead to."""
        secret, own = self.secret, self._elsewhere / "own"
        return (secret.text, secret.trace(), secret.attempt, secret.trace().parent, own, own / "private", own / "file")

    def restore(self) -> None:
        """Make the home anew."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self._shelf.kept("plain"), self.run)
        shutil.copytree(self.secret.attempt / "snapshot", self.attempt / "snapshot")
        snapshot = self.attempt / "snapshot" / "n0.json"
        snapshot.write_text(snapshot.read_text().replace(self.secret.token, "n0"))
        (self.attempt / "run.json").write_text('{"ranks": [], "environment": {}, "versions": {}}')
        for name in (FIGURES, "saved", "baits"):
            (self.home / name).mkdir()
        if self._uid is not None:
            for folder, names, files in os.walk(self.home):
                for path in (folder, *(os.path.join(folder, name) for name in (*names, *files))):
                    os.chown(path, self._uid, self._uid)

    def changes(self) -> list[str]:
        """Return what is not as it was elsewhere, and make that anew."""
        before, now = self._before, self._state()
        changed = [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
        if changed:
            self._make_elsewhere()
        return [f"{path} elsewhere is changed: {before.get(path)} to {now.get(path)}" for path in changed]

    def leaks(self, result: Result) -> list[str]:
        """Return where the secret is, of what was printed and of what the swapper may read."""
        found = [f"{leak} in its output" for leak in self.secret.leaks(result.stdout + result.stderr)]
        for folder, _, names in os.walk(self.home):
            for path in (Path(folder, name) for name in names):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    found += [f"{leak} in {path.name}" for leak in self.secret.leaks(path.read_bytes())]
        return found

    def _state(self) -> dict[str, tuple[object, ...]]:
        """Return owner, mode, times and content of everything elsewhere; a change back and forth shows in ctime."""
        found: dict[str, tuple[object, ...]] = {}
        for folder, names, files in os.walk(self._elsewhere):
            for name in (".", *names, *files):
                path = Path(folder, name)
                facts = path.lstat()
                content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(facts.st_mode) else ""
                numbers = (facts.st_uid, facts.st_gid, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
                found[str(path.relative_to(self._elsewhere))] = (oct(facts.st_mode), *numbers, content)
        return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """What reads or writes in a home that somebody else has.

    Attributes:
        name: of the row in the document.
        command: arguments of `hpcpace`, a script and its own, or a call.
        folders: where it makes temporary files, below the home.
        names: what it reads and writes, below the home.
        is_naive: whether it is here to be caught.
    """

    name: str
    command: Callable[[Ground], Sequence[str] | Callable[[], int]]
    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    is_naive: bool = False


def _program(name: str, command: Callable[[Ground], Any], names: str, folders: str = "", **more: bool) -> Program:
    return Program(name=name, command=command, names=tuple(names.split()), folders=tuple(folders.split()), **more)


def _called(function: Callable[[Path], int], place: str) -> Callable[[Ground], Callable[[], int]]:
    """Return the call of a function on a place in the home."""
    return lambda ground: partial(function, ground.home / place)


_TRACE = "run/attempt-0/trace"
_RANK_0, _FIGURES = (
    f"{_TRACE}/rank-00000.h5",
    " ".join(f"{FIGURES}/{SCRIPT.stem}.{end}" for end in ("csv", "png", "svg")),
)
_SNAPSHOTS = "run/attempt-0/snapshot run/attempt-0/snapshot/n0.json"
_OF_REPORT = f"run/attempt-0 {_TRACE} {_RANK_0} {_TRACE}/rank-00001.h5 run/attempt-0/run.json {_SNAPSHOTS}"
_NEW = "run/attempt-0 run/attempt-1 run/attempt-1/trace run/attempt-1/trace/rank-00000.h5"
PROGRAMS = (
    _program(
        *("report", lambda ground: ("report", str(ground.run)), f"{_OF_REPORT} run/summary.json run/report.html", "run")
    ),
    _program(
        "dump", lambda ground: ("dump", str(ground.home / _RANK_0)), f"{_RANK_0} {_RANK_0.replace('.h5', '.journal')}"
    ),
    _program(*("audit --from", lambda ground: ("audit", "--from", str(ground.run)), f"run/attempt-0 {_SNAPSHOTS}")),
    _program("audit --save", _called(save, "saved"), "saved/n0.json saved/n1.json", "saved"),
    _program(
        "script of figures",
        lambda ground: (str(SCRIPT), str(ground.run), "--out", str(ground.home / FIGURES)),
        f"{_FIGURES} run/attempt-0 {_TRACE} {_RANK_0}",
        FIGURES,
    ),
    _program("session", _called(record_start, "run"), _NEW, "run run/attempt-0"),
)
OF_TRAINING = (_program("checkpoints", _called(save_checkpoints, "run"), "run/checkpoints", "run"),)
"""They load torch, so they race in a separate process: what a process has loaded counts for its children, too."""
_READ = "run/attempt-0/run.json"
NAIVE = (
    _program("naive writer", _called(save_naively, "saved"), "", "saved", is_naive=True),
    _program("naive reader", _called(read_naively, _READ), _READ, is_naive=True),
)
"""What hpcpace's writers and readers once were; the races have to catch them."""


@dataclass(frozen=True, kw_only=True)
class RaceOutcome:
    """The result of the rounds of one program with one swapper.

    Attributes:
        program: its name.
        swapper: its name.
        num_rounds: how often the program ran.
        num_hit: rounds in which something was exchanged while the program ran: a temporary file that was there, or a
            name that it uses.
        num_exchanged: how often that was, in all rounds.
        codes: how often it ended with each exit code.
        problems: what did not hold, with the number of the round.
        longest_s: of the rounds.
        is_naive: whether the program is there to be caught.
    """

    program: str
    swapper: str
    num_rounds: int
    num_hit: int
    num_exchanged: int
    codes: Mapping[int, int]
    problems: tuple[str, ...]
    longest_s: float
    is_naive: bool


def races_of(programs: Sequence[Program]) -> list[tuple[Program, str]]:
    """Return each program with each swapper that has something to exchange there."""
    return [
        (program, swapper)
        for program in programs
        for swapper in SWAPPERS
        if (program.folders if swapper == TEMPORARY else program.names)
    ]


def race(
    program: Program, swapper: str, ground: Ground, *, num_rounds: int, uid: int | None, stop_at_first: bool = False
) -> RaceOutcome:
    """Let a program and a swapper run against each other, each round from the beginning.

    Args:
        program: what runs.
        swapper: name of who exchanges.
        ground: where.
        num_rounds: how often.
        uid: whose rights the swapper has; those of this process where it is None.
        stop_at_first: whether the first problem ends it.
    """
    problems: list[str] = []
    codes: Counter[int] = Counter()
    hits, longest_s, number = [], 0.0, -1
    for number in range(num_rounds):
        ground.restore()
        field = Field(
            home=ground.home / "baits",
            folders=tuple(ground.home / name for name in program.folders),
            names=tuple(ground.home / name for name in program.names),
            targets=ground.targets,
        )
        with swapping(SWAPPERS[swapper], field, seed=number, uid=uid) as signals:
            num_before = signals.num_exchanged
            child = Child(program.command(ground), ground.home.with_name("output"))
            _, result = wait_for_one([child])
            hits.append(signals.num_exchanged - num_before)
        codes[result.code] += 1
        longest_s = max(longest_s, result.wall_s)
        found = [*_ends(result), *ground.leaks(result), *ground.changes()]
        problems += [f"round {number}: {problem}" for problem in found]
        if found and stop_at_first:
            break
    return RaceOutcome(
        program=program.name,
        swapper=swapper,
        num_rounds=number + 1,
        num_hit=sum(hit > 0 for hit in hits),
        num_exchanged=sum(hits),
        codes=dict(sorted(codes.items())),
        problems=tuple(problems),
        longest_s=longest_s,
        is_naive=program.is_naive,
    )


def _ends(result: Result) -> list[str]:
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if result.is_late:
        return [f"took {result.wall_s:.1f} s"]
    if result.signal:
        return [f"was killed by signal {result.signal}"]
    if "Traceback (most recent call last)" in text:
        return [f"ended with a traceback: {text.strip().splitlines()[-1][:300]}"]
    return [] if result.code in _CODES else [f"ended with {result.code}"]


@contextmanager
def ground_in(folder: Path, uid: int | None) -> Iterator[Ground]:
    """Make the ground of races in a folder that everybody may enter, and remove it."""
    folder.chmod(0o755)
    ground = Ground(folder, uid)
    try:
        yield ground
    finally:
        shutil.rmtree(ground.home, ignore_errors=True)


def all_races(num_rounds: int, folder: Path) -> Iterator[RaceOutcome]:
    """Yield the result of each program with each swapper that concerns it, as root against an unprivileged user.

    The naive ones come first: races that do not catch them show nothing.

    Raises:
        RuntimeError: one was not caught.
    """
    uid = NOBODY if os.geteuid() == 0 else None
    with ground_in(folder, uid) as ground:
        for program, swapper in races_of(NAIVE):
            found = race(program, swapper, ground, num_rounds=num_rounds, uid=uid, stop_at_first=True)
            if not found.problems:
                raise RuntimeError(f"{num_rounds} rounds did not catch the {program.name} ({found.num_hit} hit it)")
            yield found
        for program, swapper in races_of(PROGRAMS):
            yield race(program, swapper, ground, num_rounds=num_rounds, uid=uid)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        yield from pool.submit(races_of_training, num_rounds, folder, uid).result()


def races_of_training(num_rounds: int, folder: Path, uid: int | None) -> list[RaceOutcome]:
    """Return the results of the programs that load torch, with each swapper."""
    importlib.import_module("torch.distributed.checkpoint")
    with ground_in(folder, uid) as ground:
        return [
            race(program, swapper, ground, num_rounds=num_rounds, uid=uid) for program, swapper in races_of(OF_TRAINING)
        ]
