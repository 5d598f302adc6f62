"""Whether MPI or torch connects the ranks of a job, and why, in one line for the log.

MPI connects them where its library understands whoever started the ranks. Elsewhere each rank would be a world of one,
or abort; then torch connects them, at a place that follows from Slurm's environment (`rendezvous`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcpace.errors import WorldError
from hpcpace.world.environment import RankInfo, mark_rank
from hpcpace.world.mpi import mpi_world
from hpcpace.world.mpi_start import load_mpi
from hpcpace.world.rendezvous import Rendezvous, rendezvous_of

_STARTED_BY = {"slurm": "Slurm", "pmi": "mpiexec", "torchrun": "torchrun"}
# What a launcher tells the ranks of an MPI library, by the beginning of the library's name. mpi/cray_shasta and
# mpi/pmi2 are plugins of Slurm; a PMI_FD or PMI_PORT comes from mpiexec, too.
_TOLD_BY_PMI = ("PMI_FD", "PMI_PORT")
_TOLD_BY_CRAY = ("PMI_CONTROL_PORT", "PMI_SHARED_SECRET", "PALS_APID")
_TOLD_BY_PMIX = ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE")
_NEEDS = (
    ("CRAY MPICH", _TOLD_BY_CRAY + _TOLD_BY_PMI),
    ("MPICH", _TOLD_BY_PMI),
    ("Intel(R) MPI", _TOLD_BY_PMI),
    ("MVAPICH", _TOLD_BY_PMI),
    ("Open MPI", _TOLD_BY_PMIX),
)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How the ranks of a job reach each other before torch connects them.

    Attributes:
        comm: MPI's communicator of all ranks; None where torch connects them, and for a single process.
        rendezvous: where they meet; None where MPI or torchrun says so, and for a single process.
        line: what was chosen, and why not MPI; empty for a single process.
    """

    comm: Any | None
    rendezvous: Rendezvous | None
    line: str


def connect(
    info: RankInfo, environ: Mapping[str, str], *, coordination: str, rendezvous: str | None, timeout_s: float
) -> Connection:
    """Decide how the ranks find each other, and start MPI if it connects them.

    Collective: every rank of the job calls this.

    Args:
        info: this rank's place.
        environ: its environment.
        coordination: `auto`, `mpi` or `torch`.
        rendezvous: HOST:PORT, HOST or :PORT where the ranks meet without MPI, of the user.
        timeout_s: seconds that MPI has to start.

    Raises:
        WorldError: MPI was requested and cannot connect the ranks, or they have no place to meet.
    """
    if info.world_size == 1:
        return Connection(comm=None, rendezvous=None, line="")
    reason = "" if coordination == "mpi" else "world.coordination is torch"
    if coordination == "auto":
        reason = why_not_mpi(info, environ)
    if info.launcher == "torchrun":
        if coordination == "mpi":
            raise WorldError("world.coordination is mpi, but torchrun started the ranks: use srun or mpiexec, or auto")
        return Connection(comm=None, rendezvous=None, line=f"{_ranks_from(info, environ)}, clocks over gloo")
    if not reason:
        try:
            comm = mpi_world(info, timeout_s=timeout_s)
        except WorldError:
            if coordination == "mpi" or not _is_world_of_one():
                raise
            reason = f"{_library()} sees a world of one rank"
        else:
            return Connection(
                comm=comm, rendezvous=None, line=f"{_ranks_from(info, environ)}, clocks over MPI ({_library()})"
            )
    mark_rank()
    place = rendezvous_of(info, environ, rendezvous, reason)
    line = f"{_ranks_from(info, environ)}, rendezvous {place}, clocks over gloo; MPI not used: {reason}"
    return Connection(comm=None, rendezvous=place, line=line)


def why_not_mpi(info: RankInfo, environ: Mapping[str, str]) -> str:
    """Return why MPI cannot connect the ranks of this launcher; empty if it can, as far as the environment tells."""
    if info.launcher == "torchrun":
        return "torchrun started the ranks"
    try:
        library = _library()
    except WorldError as error:
        return str(error)
    for name, needed in _NEEDS:
        if library.startswith(name):
            if any(variable in environ for variable in needed):
                return ""
            return f"{library} does not understand {_launcher(info, environ)}"
    return ""


def _is_world_of_one() -> bool:
    MPI = load_mpi()
    return bool(MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() == 1)


def _library() -> str:
    """Return the name and version of the MPI library, like `MPICH 5.0.2` or `Open MPI v4.1.4`."""
    line = load_mpi().Get_library_version().partition("\n")[0].partition(",")[0].strip("\0 ")
    # Cray's begins with `MPI VERSION    : CRAY MPICH`.
    words = line.replace("MPI VERSION", " ").replace("Version:", " ").replace(" : ", " ").split()
    return " ".join(words[:4])


def _ranks_from(info: RankInfo, environ: Mapping[str, str]) -> str:
    name = _STARTED_BY[info.launcher]
    return f"ranks from {name} ({_launcher(info, environ)})" if info.launcher == "slurm" else f"ranks from {name}"


def _launcher(info: RankInfo, environ: Mapping[str, str]) -> str:
    """Return how the ranks were started, like `srun --mpi=pmix`."""
    if info.launcher != "slurm":
        return "this mpiexec"
    kind = environ.get("SLURM_MPI_TYPE", "")
    for names, plugin in ((_TOLD_BY_PMIX, "pmix"), (_TOLD_BY_CRAY, "cray_shasta"), (_TOLD_BY_PMI, "pmi2")):
        if not kind and any(name in environ for name in names):
            kind = plugin
    return f"srun --mpi={kind or 'none'}"
