"""The machine as it is drawn: packages, NUMA nodes, cores, devices, and which rank may run where.

Text, SVG and HTML draw the same `Picture`. Names come from snapshots, which may be anybody's: they are printable and
short here, and numbers of things are bounded; whoever writes HTML still has to escape them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcpace.audit import cpusets
from hpcpace.audit.hardware import sum_of


@dataclass(frozen=True, kw_only=True)
class DrawnCores:
    """Cores of one NUMA node, in order, that are alike and open to the same ranks.

    Attributes:
        cores: CPUs of each core.
        ranks: ranks that may run on all CPUs of each core.
        partly: ranks that may run on some hardware threads of each core only.
    """

    cores: tuple[int, ...]
    ranks: tuple[int, ...]
    partly: tuple[int, ...]

    @property
    def cpus(self) -> str:
        """Their CPUs as a list."""
        return cpusets.format_list(sum_of(self.cores))

    @property
    def ranks_text(self) -> str:
        """Who may run on them: `rank 3`, `ranks 0-7`, `rank 1 in part`; empty for nobody."""
        whole, some = ranks_text(self.ranks), ranks_text(self.partly)
        return ", ".join(filter(None, (whole, f"{some} in part" if some else "")))


@dataclass(frozen=True, kw_only=True)
class DrawnDevice:
    """A GPU or an adapter.

    Attributes:
        name: short name in the tables of links, like `GPU0` or `mlx5_0`.
        detail: what else is known of it in a few words.
        ranks: ranks that use it.
    """

    name: str
    address: str
    is_gpu: bool
    detail: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrawnNode:
    """A NUMA node, or the part of it that belongs to one package.

    Attributes:
        title: its name and memory.
        caches: its caches, like `L3 105 MiB`.
    """

    title: str
    caches: str
    groups: tuple[DrawnCores, ...]
    devices: tuple[DrawnDevice, ...]


@dataclass(frozen=True, kw_only=True)
class DrawnPackage:
    """A physical package."""

    title: str
    nodes: tuple[DrawnNode, ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One machine, or several that look the same.

    Attributes:
        title: its host or hosts.
        subtitle: what it is.
        elsewhere: NUMA nodes with memory only.
        unplaced: devices whose place is not known.
        gpus, nics: names in the order of the tables of links.
        links: link classes by two names.
        notes: what is not drawn, and why.
    """

    title: str
    subtitle: str
    packages: tuple[DrawnPackage, ...]
    elsewhere: tuple[str, ...]
    unplaced: tuple[DrawnDevice, ...]
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    links: dict[tuple[str, str], str]
    notes: tuple[str, ...]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-7`, or an empty text for none."""
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {cpusets.format_numbers(ranks)}"


def links_of(picture: Picture) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the tables of links: title, names of rows and columns; `Picture.links` has no link of a name to itself."""
    if len(picture.gpus) > 1:
        yield "GPU x GPU", picture.gpus, picture.gpus
    if picture.gpus and picture.nics:
        yield "adapter x GPU", picture.nics, picture.gpus
    elif len(picture.nics) > 1:
        yield "adapter x adapter", picture.nics, picture.nics
