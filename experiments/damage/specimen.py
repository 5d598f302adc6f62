"""The sound runs to be damaged, what a kind of damage is, and what one damaged input expects of the report."""

from __future__ import annotations

import json
import secrets
import shutil
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.damage.chance import Random
from experiments.synthetic_run import SyntheticRun, header_of
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.journal import encode_header
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import row_dtypes

_TOKEN_LETTERS, _NUM_TOKENS = 8, 4000
_NUM_RANKS = 8
_ENVIRON = Path("/proc/self/environ")
_NUM_WORDS = 8


class Secret:
    """Files that only their owner may read.

    Their content is one random word of eight letters again and again, so that any eight bytes of it give it away, as
    text or as numbers.

    Attributes:
        path: the folder of the files; `make` makes it.
        token: what they hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = "".join(secrets.choice(string.ascii_uppercase) for _ in range(_TOKEN_LETTERS))
        self._words = _words_of(self.token.encode()) | _words_of_environ()

    @property
    def text(self) -> Path:
        """A file of text, as a private key is one."""
        return self.path / "text"

    @property
    def run(self) -> Path:
        """A whole run, of as many ranks as any specimen has."""
        return self.path / "run"

    @property
    def attempt(self) -> Path:
        """Its attempt."""
        return self.run / "attempt-0"

    def trace(self, rank: int = 0) -> Path:
        """Return a trace file; its journal is next to it."""
        return self.attempt / "trace" / f"rank-{rank:05d}.h5"

    def make(self) -> Secret:
        """Write the files, unless they are there, and return this."""
        if self.path.exists():
            return self
        made = self.path.with_name(f"{self.path.name}-new")
        shutil.rmtree(made, ignore_errors=True)
        (made / "run" / "attempt-0" / "trace").mkdir(parents=True)
        (made / "text").write_text(self.token * _NUM_TOKENS)
        self._write_traces(made / "run" / "attempt-0" / "trace")
        self._write_records(made / "run" / "attempt-0")
        for file in made.rglob("*"):
            if file.is_file():
                file.chmod(0o600)
        made.rename(self.path)
        return self

    def leaks(self, content: bytes) -> list[str]:
        """Return what of the secret is in a text, one entry for each form."""
        found = [f"the secret as {form}" for form, word in self._words.items() if word in content]
        return found[:3]

    def _write_traces(self, folder: Path) -> None:
        numbers = np.frombuffer(self.token.encode() * _NUM_TOKENS, "<i8")
        for rank in range(_NUM_RANKS):
            header = header_of(rank, _NUM_RANKS, host=self.token, mesh=self.token, samples_unit=self.token)
            path = folder / f"rank-{rank:05d}.h5"
            with Recorder(path, header, warn=_fail) as recorder:
                recorder.add_group(0, rank, self.token.encode(), b"gloo")
                for step in range(40):
                    recorder.add_step(step, step * 10**9, (step + 1) * 10**9, 1, 0)
            with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
                for table in file.values():
                    for column in table.values():
                        if column.dtype == np.dtype("<i8"):
                            column[...] = numbers[: len(column)]
            path.with_suffix(".journal").write_bytes(encode_header(header, row_dtypes()))

    def _write_records(self, folder: Path) -> None:
        token = self.token
        ranks = [{"rank": rank, "host": token} for rank in range(_NUM_RANKS)]
        said = dict.fromkeys(("policy", "tried", "sentence"), token)
        trial = {**said, "is_on": True, "mechanisms": [token], "points": [{"name": token}], "trial": None}
        run = {"ranks": ranks, "environment": {"HPCPACE_LAB_EMULATION": token}, "versions": {token: token}}
        result = {"outcome": token, "cause": token, "peak_memory": []}
        records = {"run.json": run, "result.json": result, "trial.json": trial}
        for name, content in records.items():
            (folder / name).write_text(json.dumps(content))
        (folder / "snapshot").mkdir()
        (folder / "snapshot" / "n0.json").write_text(snapshot_of(token))


def _words_of(token: bytes) -> dict[str, bytes]:
    """Return the forms of a word that comes again and again: as text, and as the numbers that its bytes make."""
    found = {}
    for shift in range(len(token)):
        turned = token[shift:] + token[:shift]
        found[f"text from letter {shift}"] = turned
        for size_bytes in (8, 4):
            number = int.from_bytes(turned[:size_bytes], "little")
            found[f"a number of {size_bytes} bytes from letter {shift}"] = str(number).encode()
    return found


def _words_of_environ() -> dict[str, bytes]:
    """Return the forms of what this process' children have as their environment, which no file may lead to either."""
    environ = _ENVIRON.read_bytes()
    numbers = np.frombuffer(environ[: min(len(environ) // 8, _NUM_WORDS) * 8], "<u8").tolist()
    found = {f"number {place} of the environment": str(number).encode() for place, number in enumerate(numbers)}
    found["the environment"] = environ.split(b"\0")[0][:40]
    return {form: word for form, word in found.items() if len(word) >= _TOKEN_LETTERS}


def snapshot_of(host: str) -> str:
    """Return a snapshot of an audit of this machine, under the name of a host."""
    return snapshot_text(take_host(Tree(), host=host))


def _fail(message: str) -> None:
    raise AssertionError(message)


_HOSTS = ("n1", "n2", "n3", "n4")
SPECIMENS: Mapping[str, tuple[SyntheticRun, ...]] = {
    "plain": (SyntheticRun(noise=0.02),),
    "hosts": (SyntheticRun(hosts=_HOSTS, noise=0.05, offsets_ns={1: 10**9, 2: -(10**9), 3: 7 * 10**12}),),
    "pipeline": (SyntheticRun(num_ranks=8, pipeline=2, slow={2: 1.3}, noise=0.02, hosts=_HOSTS[:2]),),
    "killed": (SyntheticRun(noise=0.02, hosts=_HOSTS[:2], lost_steps={2: 5, 3: 1}),),
    "hang": (SyntheticRun(noise=0.02, hangs=True),),
    "no-clock": (SyntheticRun(noise=0.02, hosts=_HOSTS[:2], has_clock=False),),
    "single": (SyntheticRun(num_ranks=1, noise=0.02),),
    "attempts": (SyntheticRun(lost_steps={1: 3}), SyntheticRun(noise=0.02)),
}
"""By name, the attempts of each run; the last one is what a report shows."""


@dataclass(frozen=True)
class RunCopy:
    """A copy of a specimen, to be damaged.

    Attributes:
        path: the run folder.
        num_ranks: of its last attempt; all have a trace.
        shelf: where other specimens and the secret are.
    """

    path: Path
    num_ranks: int
    shelf: Shelf

    @property
    def attempt(self) -> Attempt:
        """The last attempt."""
        return RunDirectory(self.path).attempts()[-1]

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks."""
        return frozenset(range(self.num_ranks))

    def file(self, rank: int) -> Path:
        """Return the HDF5 file of a rank."""
        return self.attempt.trace_file(rank)

    def journal(self, rank: int) -> Path:
        """Return the journal of a rank, whether it is there or not."""
        return self.file(rank).with_suffix(".journal")


class Shelf:
    """Writes each specimen once into a folder, and hands out copies.

    Attributes:
        secret: what no report may give away; it is made where an attack leads to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self.secret = Secret(folder / "secret")

    def copy(self, name: str, path: Path) -> RunCopy:
        """Copy a specimen to a path that does not exist yet."""
        shutil.copytree(self.kept(name), path)
        return RunCopy(path, SPECIMENS[name][-1].num_ranks, self)

    def kept(self, name: str) -> Path:
        """Return the specimen itself, to be read only."""
        kept = self._folder / name
        if not kept.exists():
            for attempt in SPECIMENS[name]:
                attempt.write(kept)
        return kept


ALL_WITH_FILES = ("plain", "hosts", "pipeline", "single")
"""Specimens whose files are all closed."""
FIGURES = "figures"
"""The folder in a run for the files of scripts."""
FURTHER = "further"
"""How the files begin that commands are told to write beside the run."""
SCRIPT = Path(__file__).parents[2] / "analysis" / "bottleneck_timeline.py"
"""One of the scripts that write figures."""


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """What was done to a run.

    Attributes:
        hurt: ranks that the report may leave out.
        places: what an error has to name, one of them at least.
        says: what the report or the error has to say, all of it, whatever its line breaks.
        never: what must not occur in any output or file of the report.
        without_rights: whether the report runs without root's rights to pass by the modes of files.
        blamed: ranks that the verdict may blame; whom it likes where it is None.
        memory: value of `--memory` for the report, which it must respect; empty: its default.
        views: further commands that are run on the input, each as arguments of `hpcpace`, or a script and its own.
    """

    hurt: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    without_rights: bool = False
    blamed: frozenset[int] | None = None
    memory: str = ""
    views: tuple[tuple[str, ...], ...] = ()


Damage = Callable[[RunCopy, Random], Damaged]
Make = Callable[[Path, Random], object]
"""Makes something at a path, or changes what is there."""


def some_rank(run: RunCopy, random: Random) -> int:
    """Return a rank of the run by chance."""
    return int(random.integers(run.num_ranks))


def to_file(
    make: Make, *says: str, suffix: str = ".h5", pick: Callable[[RunCopy, Random], int] = some_rank, **expected: Any
) -> Damage:
    """Return the damage to the file of one rank.

    Args:
        make: does it.
        says: what has to be said, in which `{path}` stands for the file.
        suffix: of the file.
        pick: returns the rank.
        expected: further fields of `Damaged`.
    """

    def damage(run: RunCopy, random: Random) -> Damaged:
        rank = pick(run, random)
        path = run.file(rank).with_suffix(suffix)
        make(path, random)
        return of_rank(run, rank, *(text.format(path=path) for text in says), **expected)

    return damage


def to_all(make: Make, **expected: Any) -> Damage:
    """Return the damage to the HDF5 files of all ranks; with `expected`, all of them stay sound."""

    def damage(run: RunCopy, random: Random) -> Damaged:
        for rank in sorted(run.ranks):
            make(run.file(rank), random)
        return of_run(run, **expected) if expected else of_ranks(run, run.ranks)

    return damage


def some_ranks(run: RunCopy, random: Random, count: int) -> list[int]:
    """Return so many ranks of the run by chance, in any order."""
    found: list[int] = random.permutation(run.num_ranks)[:count].tolist()
    return found


def of_rank(run: RunCopy, rank: int, *says: str, **more: Any) -> Damaged:
    """Return the expectation where one rank's files are damaged."""
    return of_ranks(run, {rank}, *says, **more)


def of_ranks(run: RunCopy, ranks: Iterable[int], *says: str, **more: Any) -> Damaged:
    """Return the expectation where several ranks' files are damaged."""
    places = [name for rank in sorted(ranks) for name in (f"rank-{rank:05d}", f"rank {rank}")]
    return Damaged(**{"hurt": frozenset(ranks), "places": (*places, str(run.attempt.path)), "says": says, **more})


def of_run(run: RunCopy, *says: str, **more: Any) -> Damaged:
    """Return the expectation where no rank is hurt."""
    return Damaged(places=(str(run.path),), says=says, **more)


def seen_by_all(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    """Return the expectation where every program that reads a run is led to read the damage as well.

    Besides the report these are `dump` of a rank that was hurt, `audit`, and for one input in four a script of figures.
    """
    memory = ("--memory", damaged.memory) if damaged.memory else ()
    dump = ("dump", str(run.file(min(damaged.hurt or run.ranks))), "--limit", "50", *memory)
    audit = ("audit", "--from", str(run.path))
    script = (str(SCRIPT), str(run.path), "--out", str(run.path / FIGURES))
    views = (dump, (*dump, "--json"), audit, (*audit, "--json"), *([script] if random.maybe(0.25) else []))
    return replace(damaged, views=views)


def further_views(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    """Return the expectation where some of the other commands that open runs see the damage as well, by chance.

    These are four for damage that all programs are led to read, and one for other damage. `pack` and `switch` write
    into the run, and come last.
    """
    memory = ("--memory", damaged.memory) if damaged.memory else ()
    path, folder = str(run.path), str(run.path.parent)
    out = run.path.with_name(FURTHER)
    sound = str(run.shelf.kept("plain"))
    views = (
        ("list", folder),
        ("list", folder, "--json"),
        ("history", folder, *memory),
        ("history", folder, "--html", f"{out}.html", *memory),
        ("compare", sound, path, *memory),
        ("compare", path, sound, "--html", f"{out}.html", *memory),
        ("scale", sound, path),
        ("scale", sound, path, "--csv", f"{out}.csv"),
        ("watch", path, "--once"),
        ("hang", path),
        ("hang", path, "--json"),
        ("timeline", path, *memory),
        ("timeline", path, "-o", f"{out}.pftrace", *memory),
        ("import", "kineto", path, "--run-dir", f"{out}-kineto"),
        ("import", "flight-recorder", path),
        ("collect", path, "--trace-dir", str(run.path / "attempt-0")),
        ("switch", path, "on"),
        ("pack", path, "--ended", *memory),
    )
    chosen = sorted(random.choice(len(views), 4 if damaged.views else 1, replace=False))
    return replace(damaged, views=(*damaged.views, *(views[number] for number in chosen)))
