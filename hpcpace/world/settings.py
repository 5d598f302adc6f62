"""How ranks find and reach each other: the settings of `[world]`."""

from __future__ import annotations

from hpcpace.core.config import Section, choice, number
from hpcpace.core.records import dataclass

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
COORDINATIONS = ("auto", "mpi", "torch")


@dataclass(frozen=True, kw_only=True)
class WorldConfig(Section, section="world"):
    """How ranks find and reach each other."""

    device: str = choice("auto", DEVICES)
    """auto, cpu or cuda; auto takes the GPU of the local rank if torch sees one, else the CPU."""
    backend: str = choice("auto", BACKENDS)
    """auto, gloo or nccl; auto takes nccl on GPUs and gloo on CPUs."""
    interface: str | None = None
    """Network interfaces of the collectives, separated by commas; by default those that all hosts share and that are
    fastest."""
    start_timeout_s: float = number(120.0, 1)
    """Seconds that ranks have to find and reach each other; those that hang in the start of MPI end by SIGALRM."""
    coordination: str = choice("auto", COORDINATIONS)
    """auto, mpi or torch: what connects the ranks at first and compares clocks; auto takes MPI where its library
    understands the launcher, and torch elsewhere."""
    rendezvous: str | None = None
    """HOST:PORT, HOST or :PORT where ranks without MPI meet; by default the first host of the Slurm step, and a port
    that follows from the ids of job and step."""
    timeout_s: float = number(600.0, 1)
    """Seconds after which a collective that has not completed ends the job."""
