"""Whether MPI or torch connects the ranks of a job, and why; and which release of torch a command needs."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from hpcpace.core.environment import RankInfo, mark_rank
from hpcpace.core.errors import WorldError
from hpcpace.core.hostlist import expand
from hpcpace.core.records import dataclass
from hpcpace.world.deadline import Deadline, in_time
from hpcpace.world.mpi import LoadedMpi, ended_after, load_mpi, mpi_world

# Below the ports that kernels give to connections (32768 and up), so that none of those is in the way.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
# Steps of one job, and then jobs with near numbers, which may share a host, get different ports.
_STEPS_APART = 16
_MIN_PORT, _MAX_PORT = 1, 65_535
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PROBE_S = 5.0
_PLACES = (r"\[([^\[\]]+)\](?::(\d+))?", r"([^:\[\]\s]*):(\d+)", r"([^:\[\]\s]+)()")
_SETTING = "world.rendezvous (HPCPACE_WORLD_RENDEZVOUS=HOST:PORT)"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place where ranks meet.

    Attributes:
        host: name or address of the host, as the others reach it; IPv6 without brackets.
        port: where torch's store listens.
        is_here: whether this rank opens the store.
        named_by: the settings or variables that name another place.
    """

    host: str
    port: int
    is_here: bool
    named_by: str = _SETTING

    def __str__(self) -> str:
        """Return `n1:29512`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def refusal(self, error: BaseException) -> str:
        """Return why the store could not be opened here, or connected to."""
        here, reason = socket.gethostname(), str(error).partition("\n")[0].strip().rstrip(".")[:200]
        if not self.is_here:
            return (
                f"{here}: what answers at {self} is no store of torch ({reason}): {self.named_by} names another place"
            )
        return (
            f"{here} cannot listen on port {self.port}, where the ranks meet: {reason}. Another process has it, or "
            f"this rank was started twice (`ss -ltnp 'sport = {self.port}'` there shows who): end it, or name another "
            f"port with {self.named_by}"
        )


def rendezvous_of(info: RankInfo, environ: Mapping[str, str], setting: str | None, reason: str) -> Rendezvous:
    """Return where the ranks meet.

    Args:
        info: this rank's place.
        environ: its environment.
        setting: HOST:PORT, HOST or :PORT of the user, with brackets around an IPv6 address.
        reason: why MPI does not connect the ranks, for the error.

    Raises:
        WorldError: the setting is malformed, or the environment names no host.
    """
    host, port = parse_place(setting) if setting else ("", None)
    if info.launcher != "slurm":
        if not host or port is None:
            raise WorldError(
                f"{info.world_size} ranks started by mpiexec cannot meet: MPI is not used ({reason}). Install it (pip "
                f"install mpi4py mpich), start the ranks with srun or torchrun, or set {_SETTING}"
            )
        return Rendezvous(host=host, port=port, is_here=info.rank == 0)
    if not host:
        host = _first_host(environ)
    # The first rank of the first host: with --distribution=arbitrary rank 0 may be on another.
    is_here = info.node == 0 and info.local_rank == 0
    return Rendezvous(host=host, port=_port(environ) if port is None else port, is_here=is_here)


def rendezvous_of_torchrun(info: RankInfo, environ: Mapping[str, str]) -> Rendezvous:
    """Return where ranks meet according to torchrun's variables; its agent may have opened the store already.

    Raises:
        WorldError: a variable is missing or malformed.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise WorldError(
            f"RANK={info.rank} and WORLD_SIZE={info.world_size} are set, {' and '.join(missing)} not: start the ranks "
            "by torchrun, or set all four"
        )
    port = environ["MASTER_PORT"]
    if not port.isdecimal() or not _MIN_PORT <= int(port) <= _MAX_PORT:
        raise WorldError(f"MASTER_PORT is {port!r}: expected a port from {_MIN_PORT} to {_MAX_PORT}")
    is_here = info.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Rendezvous(
        host=environ["MASTER_ADDR"], port=int(port), is_here=is_here, named_by="MASTER_ADDR with MASTER_PORT"
    )


def parse_place(text: str) -> tuple[str, int | None]:
    """Return host and port of HOST:PORT, HOST, :PORT, [ADDRESS]:PORT or an IPv6 address; port None if not given.

    Raises:
        WorldError: the text is something else.
    """
    if _is_ipv6(text):
        return text, None
    found = next(filter(None, (re.fullmatch(form, text) for form in _PLACES)), None)
    port = int(found[2]) if found and found[2] else None
    if found is None or (port is not None and not _MIN_PORT <= port <= _MAX_PORT):
        raise WorldError(f"world.rendezvous is {text!r}: expected HOST:PORT, HOST or :PORT, like n1:29500 or [fd00::1]")
    return found[1], port


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _first_host(environ: Mapping[str, str]) -> str:
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    try:
        hosts = expand(environ.get(name, ""))
    except ValueError as error:
        raise WorldError(f"{name}: {error}; set {_SETTING}") from error
    if not hosts:
        raise WorldError(
            f"{name} is not set, so the ranks have no host to meet at: start them with srun, or set {_SETTING}"
        )
    return hosts[0]


def _port(environ: Mapping[str, str]) -> int:
    numbers = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdecimal() else 0 for number in numbers)
    return _FIRST_PORT + (job * _STEPS_APART + step) % _NUM_PORTS


def open_store(place: Rendezvous, deadline: Deadline) -> Any:
    """Return torch's store at the place, opened here or connected to.

    Raises:
        WorldError: the port is taken, or the host is unknown or does not answer before the deadline.
    """
    import torch.distributed as dist

    host = "localhost" if place.is_here else place.host
    if not place.is_here:
        wait_until_listening(place, deadline)
    timeout = timedelta(seconds=deadline.left_s)

    def opened() -> Any:
        return dist.TCPStore(host, place.port, is_master=place.is_here, timeout=timeout, wait_for_workers=False)

    try:
        # torch waits without a limit for the first answer of something else that listens there.
        return in_time(opened, deadline.left_s, "the answer")
    except (RuntimeError, OSError) as error:
        raise WorldError(place.refusal(error)) from error


def wait_until_listening(place: Rendezvous, deadline: Deadline) -> None:
    """Wait until a process listens at the place.

    torch would wait, too, and print a warning for each attempt.

    Raises:
        WorldError: the host is unknown, or does not answer before the deadline.
    """
    here, pause_s, last = socket.gethostname(), _FIRST_PAUSE_S, ""
    while not (last and deadline.is_over):
        try:
            addresses = in_time(
                lambda: socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM), deadline.left_s, "DNS"
            )
        except OSError as error:  # of which a TimeoutError is one
            if last and deadline.is_over:  # of what was known before, too little time was left to ask again
                break
            raise WorldError(
                f"{here} cannot resolve {place.host}, where the ranks meet ({error.strerror or error}): fix DNS or "
                f"/etc/hosts on {here}, or name an address that all hosts reach with {place.named_by}"
            ) from error
        for family, kind, _, _, address in addresses:
            # Not create_connection: it drops the scope of a link-local address.
            with socket.socket(family, kind) as probe:
                probe.settimeout(min(_PROBE_S, deadline.left_s))
                try:
                    probe.connect(address)
                    return
                except OSError as error:
                    last = error.strerror or str(error)
        time.sleep(min(pause_s, deadline.left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise WorldError(
        f"{here}: nothing answers at {place} within {deadline.timeout_s:g} s ({last}), where the first rank of the "
        f"first host waits for the others: see whether that rank has failed, and whether a firewall or route keeps "
        f"{here} from {place.host}; {place.named_by} names another place"
    )


_STARTED_BY = {"slurm": "Slurm", "pmi": "mpiexec", "torchrun": "torchrun"}
# Variables by which a launcher reaches the ranks of an MPI library, by the beginning of the library's name.
# mpi/cray_shasta and mpi/pmi2 are plugins of Slurm; a PMI_FD or PMI_PORT comes from mpiexec, too.
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
    """Return MPI if it can connect the ranks of this launcher, as far as the environment shows, or else why it cannot.

    Args:
        info: this rank's place.
        environ: its environment.
        is_forced: whether MPI is used whatever the environment says.

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


def check_torch(command: str, least: tuple[int, int], *others: str) -> None:
    """Raise unless this Python has a torch that is new enough, and others; a torch without a known release passes.

    Args:
        command: what needs it, such as "hpcpace train".
        least: the first release that will do.
        others: further packages that it needs, by name.

    Raises:
        WorldError: it has none, or an older one.
    """
    needed = f"{command} needs torch {least[0]}.{least[1]} or newer"
    for package, need in (("torch", needed), *((other, f"{command} needs {other}") for other in others)):
        if find_spec(package) is None:
            raise WorldError(f"{need}, and this Python has none: pip install 'hpcpace[train]'")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < least:
        raise WorldError(
            f"{needed}, and this Python has {found}: pip install --upgrade 'torch>={least[0]}.{least[1]}' in an "
            "environment of its own; hpcpace trace records with torch 2.4 and newer"
        )
