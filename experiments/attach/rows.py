"""The rows of the matrix, which are in rows.toml: what each runs, from where, and with which options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from experiments.pages import cases_of, read_toml

Fault = Literal["compute", "loader", "host"]
FAULTS: tuple[Fault, ...] = ("compute", "loader", "host")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public repository at a commit: its clone is `folder` of the option --sources."""

    repository: str
    commit: str

    @property
    def folder(self) -> str:
        """The name of its clone."""
        return self.repository.partition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        name: for --only; of a public script also the key in edits.toml.
        title: in the document.
        program: file in programs/, or in the source's folder; a module of it where it has no `.py`.
        arguments: of the program.
        num_ranks: how many ranks it runs on.
        launches_itself: whether it starts its ranks; torchrun does otherwise.
        is_mpi: whether mpiexec starts them.
        shares_batches: whether ranks compute on the same samples, of which hpcpace then makes no guess.
        source, folder: the public script; None for a program of this experiment.
        parts: what of the repository is laid out, where that is not its folder.
        packages: distributions whose version counts.
        faults: those that the script has a place for.
        compute_stage, loader_stage: words one of which the report must say of a fault there.
        note: what a reader must know.
        is_profiled: whether torch's profiler can see six steps without too many events.
        is_repeatable: whether the script has the same losses each time it runs.
        refused: why it cannot run without a GPU; it is not run then.
    """

    name: str
    title: str
    program: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 4
    launches_itself: bool = False
    is_mpi: bool = False
    shares_batches: bool = False
    source: Source | None = None
    folder: str = ""
    parts: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = FAULTS
    compute_stage: tuple[str, ...] = ("comput", "forward")
    loader_stage: tuple[str, ...] = ("data", "loading")
    note: str = ""
    is_profiled: bool = True
    is_repeatable: bool = True
    refused: str = ""

    @property
    def is_module(self) -> bool:
        """Whether the program is started as a module."""
        return not self.program.endswith(".py")

    @property
    def has_callback(self) -> bool:
        """Whether the program opens the session by a callback of ours."""
        return "--callback" in self.arguments


def _rows(content: dict[str, Any]) -> tuple[Row, ...]:
    sources = {name: Source(**source) for name, source in content["sources"].items()}
    for row in content["row"]:
        row["arguments"] = row.get("arguments", "").split()
        row["source"] = sources.get(row.get("source"))
    return cases_of(Row, content["row"])


ROWS = _rows(read_toml(__file__))
