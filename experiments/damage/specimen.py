"""The sound runs to be damaged, each written once and copied for every input."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.damage.secret import Secret
from experiments.synthetic_run import SyntheticRun
from hpcpace.core.rundir import Attempt, RunDirectory

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
