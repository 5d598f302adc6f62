"""Whether MPI or torch connects the ranks of a job, and why, in one line for the log.

MPI connects them where its library understands whoever started the ranks. Elsewhere each rank would be a world of one,
or abort; then torch connects them, at a place that follows from Slurm's environment (`rendezvous`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcpace.core.environment import RankInfo, mark_rank
from hpcpace.core.errors import WorldError
from hpcpace.world.mpi import mpi_world
from hpcpace.world.mpi_start import LoadedMpi, ended_after, load_mpi
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
    if info.launcher == "torchrun":
        if coordination == "mpi":
            raise WorldError("world.coordination is mpi, but torchrun started the ranks: use srun or mpiexec, or auto")
        return Connection(comm=None, rendezvous=None, line=f"{_ranks_from(info, environ)}, clocks over gloo")
    mpi, reason = None, "world.coordination is torch"
    if coordination != "torch":
        # Loading the library may hang as well as starting it.
        with ended_after(timeout_s):
            mpi, reason = usable_mpi(info, environ, is_forced=coordination == "mpi")
    if mpi is not None:
        library = _name(mpi)
        try:
            comm = mpi_world(info, timeout_s=timeout_s, loaded=mpi)
        except WorldError:
            if coordination == "mpi" or not _is_world_of_one(mpi):
                raise
            reason = f"{library} sees a world of one rank"
        else:
            line = f"{_ranks_from(info, environ)}, clocks over MPI ({library})"
            return Connection(comm=comm, rendezvous=None, line=line)
    mark_rank()
    place = rendezvous_of(info, environ, rendezvous, reason)
    line = f"{_ranks_from(info, environ)}, rendezvous {place}, clocks over gloo; MPI not used: {reason}"
    return Connection(comm=None, rendezvous=place, line=line)


def usable_mpi(info: RankInfo, environ: Mapping[str, str], *, is_forced: bool) -> tuple[LoadedMpi | None, str]:
    """Return MPI if it can connect the ranks of this launcher, as far as the environment tells, or else why it cannot.

    Args:
        info: this rank's place.
        environ: its environment.
        is_forced: whether MPI is used whatever the environment tells.

    Raises:
        WorldError: MPI is forced, and cannot be loaded.
    """
    try:
        mpi = load_mpi(environ)
    except WorldError as error:
        if is_forced:
            raise
        return None, str(error)
    for name, needed in _NEEDS:
        if _name(mpi).startswith(name) and not is_forced and not any(variable in environ for variable in needed):
            return None, f"{_name(mpi)} does not understand {_launcher(info, environ)}"
    return mpi, ""


def _is_world_of_one(mpi: LoadedMpi) -> bool:
    return bool(mpi.module.Is_initialized() and mpi.module.COMM_WORLD.Get_size() == 1)


def _name(mpi: LoadedMpi) -> str:
    """Return the name and version of the MPI library, like `MPICH 5.0.2` or `Open MPI v4.1.4`."""
    line = mpi.library.partition("\n")[0].partition(",")[0].strip("\0 ")
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
