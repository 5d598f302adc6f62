"""The sound runs to be damaged, each written once and copied for every input."""

from __future__ import annotations

import json
import secrets
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.journal import encode_header
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = "".join(secrets.choice(string.ascii_uppercase) for _ in range(_TOKEN_LETTERS))
        self._words = _words_of(self._token.encode()) | _words_of_environ()

    @property
    def token(self) -> str:
        """What the files hold."""
        return self._token

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
        (made / "text").write_text(self._token * _NUM_TOKENS)
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
        numbers = np.frombuffer(self._token.encode() * _NUM_TOKENS, "<i8")
        for rank in range(_NUM_RANKS):
            header = TraceHeader(
                run_id="synthetic",
                attempt=0,
                rank=rank,
                world_size=_NUM_RANKS,
                local_rank=rank,
                local_size=_NUM_RANKS,
                node=0,
                host=self._token,
                mesh=self._token,
                samples_unit=self._token,
            )
            path = folder / f"rank-{rank:05d}.h5"
            with Recorder(path, header, warn=_fail) as recorder:
                recorder.add_group(0, rank, self._token.encode(), b"gloo")
                for step in range(40):
                    recorder.add_step(step, step * 10**9, (step + 1) * 10**9, 1, 0)
            with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
                for table in file.values():
                    for column in table.values():
                        if column.dtype == np.dtype("<i8"):
                            column[...] = numbers[: len(column)]
            path.with_suffix(".journal").write_bytes(encode_header(header, row_dtypes()))

    def _write_records(self, folder: Path) -> None:
        token = self._token
        records = {
            "run.json": {
                "ranks": [{"rank": rank, "host": token} for rank in range(_NUM_RANKS)],
                "environment": {"HPCPACE_LAB_EMULATION": token},
                "versions": {token: token},
            },
            "result.json": {"outcome": token, "cause": token, "peak_memory": []},
            "trial.json": {
                **dict.fromkeys(("policy", "tried", "sentence"), token),
                "is_on": True,
                "mechanisms": [token],
                "points": [{"name": token}],
                "trial": None,
            },
        }
        for name, content in records.items():
            (folder / name).write_text(json.dumps(content))
        (folder / "snapshot").mkdir()
        (folder / "snapshot" / "n0.json").write_text(snapshot_text(take_host(Tree(), host=token)))


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
    found = {"the environment": environ.split(b"\0")[0][:40]} if environ else {}
    for start in range(0, min(len(environ), 8 * _NUM_WORDS) - 7, 8):
        found[f"number {start // 8} of the environment"] = str(
            int.from_bytes(environ[start : start + 8], "little")
        ).encode()
    return {form: word for form, word in found.items() if len(word) >= _TOKEN_LETTERS}


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
