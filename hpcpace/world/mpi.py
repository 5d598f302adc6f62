"""MPI: its start, its world checked against the launcher, and an orderly end for all ranks when one of them fails.

mpi4py is imported only where MPI started the ranks: MPI_Init under torchrun may hang or abort. Loading the library is
separate from starting MPI, because its name shows whether it understands the launcher, and a start under one that it
does not understand may abort. MPI starts in a thread where only that works.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from hpcpace.core.environment import HostIdentity, RankInfo, locate, mark_rank, process_environ, process_redaction
from hpcpace.core.errors import EXIT_FAILED, HpcpaceError, ImpossibleWorld, TrainingFailed, UsageError, WorldError
from hpcpace.core.records import dataclass

_LONGEST_TIMEOUT_S = 1e6  # faulthandler takes no end of seconds
_DUMP_S = 0.3


@dataclass(frozen=True)
class LoadedMpi:
    """MPI's library, loaded.

    Attributes:
        module: mpi4py's `MPI`.
        thread: what loaded it, where Slurm's pmi2 may misread its start; None for this thread.
    """

    module: Any
    thread: _OneThread | None

    @property
    def library(self) -> str:
        """The name and version of the MPI library, and more, on several lines."""
        return str(self.module.Get_library_version())


def load_mpi(environ: Mapping[str, str]) -> LoadedMpi:
    """Return mpi4py's module with its MPI library loaded; MPI starts with `start_mpi`.

    Args:
        environ: environment, which shows who started this process.

    Raises:
        WorldError: mpi4py is missing, or finds no MPI library.
    """
    # Once loaded in the main thread, the library has memory from there, whatever thread starts it later.
    thread = _OneThread() if _is_under_pmi2(environ) and "mpi4py.MPI" not in sys.modules else None
    return LoadedMpi(module=_import() if thread is None else thread.run(_import), thread=thread)


def _import() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise WorldError("mpi4py is not installed") from error
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise WorldError(f"mpi4py cannot load an MPI library ({error})") from error
    return MPI


def start_mpi(mpi: LoadedMpi) -> Any:
    """Start MPI unless it runs already; return its world communicator."""
    MPI = mpi.module
    if MPI.Is_initialized():
        return MPI.COMM_WORLD
    from mpi4py import rc

    level = getattr(MPI, f"THREAD_{rc.thread_level.upper()}", MPI.THREAD_MULTIPLE) if rc.threads else MPI.THREAD_SINGLE
    if mpi.thread is not None and is_misread_by_pmi2(mpi.library):
        return start_in_a_thread(MPI, level, mpi.thread)
    MPI.Init_thread(level)
    return MPI.COMM_WORLD


def _is_under_pmi2(environ: Mapping[str, str]) -> bool:
    return "PMI_FD" in environ and "SLURM_STEP_ID" in environ and environ.get("SLURM_MPI_TYPE") != "pmix"


def is_misread_by_pmi2(library: str) -> bool:
    """Return whether Slurm's pmi2 may misread what this library sends it at its start.

    MPICH over UCX sends it 4,096 bytes from the place of its address on, in lines that are longer than pmi2 reads
    unless zeros lie there (docs/slurm.md). In the heap of a program that has run for a while may be anything.
    """
    return library.startswith("MPICH") and "ucx" in library


def start_in_a_thread(MPI: Any, level: int, thread: _OneThread) -> Any:
    """Start MPI in a thread, whose memory is empty; return the world communicator.

    Only with THREAD_MULTIPLE may other threads call MPI. Below it, the communicator and all that it returns hand each
    call to the thread that started MPI.
    """
    provided = thread.run(MPI.Init_thread, level)
    if provided >= MPI.THREAD_MULTIPLE:
        return MPI.COMM_WORLD
    comm = _Handed(MPI.COMM_WORLD, thread, (MPI.Comm, MPI.Request))
    atexit.register(end_mpi, comm)
    return comm


def may_call_mpi(comm: Any) -> bool:
    """Return whether this thread may use a communicator, of which somebody else may have started MPI."""
    from mpi4py import MPI

    return calls_from_any_thread(comm) or bool(MPI.Is_thread_main())


def calls_from_any_thread(comm: Any) -> bool:
    """Return whether every thread may use a communicator while others do."""
    if isinstance(comm, _Handed):
        return True
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def end_mpi(comm: Any) -> None:
    """End MPI, in the thread that started it if the communicator hands its calls to one."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        (comm.finalize if isinstance(comm, _Handed) else MPI.Finalize)()


class _OneThread:
    """A thread that makes calls for others, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="hpcpace-mpi", daemon=True).start()

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the function returns in the thread, or raise what it raises."""
        result: Future[Any] = Future()
        self._calls.put((result, lambda: function(*args, **options)))
        return result.result()

    def _work(self) -> None:
        while True:
            result, function = self._calls.get()
            try:
                result.set_result(function())
            except BaseException as error:  # it is raised again in the thread that waits for it
                result.set_exception(error)


class _Handed:
    """An object of MPI whose attributes are read, and whose methods run, in one thread."""

    def __init__(self, target: Any, thread: _OneThread, kinds: tuple[type, ...]) -> None:
        self._target, self._thread, self._kinds = target, thread, kinds

    def finalize(self) -> None:
        """End MPI."""
        from mpi4py import MPI

        self._thread.run(MPI.Finalize)

    def __getattr__(self, name: str) -> Any:
        value = self._thread.run(getattr, self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            return self._hand(self._thread.run(value, *args, **options))

        return call

    def _hand(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._hand(each) for each in value)
        return _Handed(value, self._thread, self._kinds) if isinstance(value, self._kinds) else value


@contextmanager
def ended_after(timeout_s: float) -> Iterator[None]:
    """End this process by SIGALRM, after a traceback, if what is inside takes longer.

    MPI_Init holds Python's threads and handlers up, so both are C's: a thread that dumps, and a signal that ends. By
    the signal the batch scripts know that no training was lost, and that the ranks may be started once more.
    """
    timeout_s = min(timeout_s, _LONGEST_TIMEOUT_S)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__ or sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _DUMP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)


_AGREE_TIMEOUT_S = 1.0
_DIGEST_BYTES = 16
# How much later than another rank rank 0 may start on a busy host.
_SPEAK_TIMEOUT_S = 5.0


def mpi_world(info: RankInfo, *, timeout_s: float = 120.0, loaded: LoadedMpi | None = None) -> Any | None:
    """Return MPI's world communicator; None if there is one rank or torchrun started the ranks.

    Collective: every rank of the job calls this.

    Args:
        info: this rank's place.
        timeout_s: seconds after which a start of MPI that does not end, as where a message of its process management
            was lost, ends this process by SIGALRM, after a traceback.
        loaded: MPI's library, if it has been loaded already.

    Raises:
        WorldError: mpi4py is missing, or MPI sees different ranks than the launcher started.
    """
    if info.launcher == "torchrun" or info.world_size == 1:
        return None
    try:
        with ended_after(timeout_s):
            comm = start_mpi(loaded or load_mpi(process_environ()))
            # The first messages make the connections; an address that was misread shows here.
            comm.Barrier()
    except (WorldError, RuntimeError) as error:
        raise WorldError(
            f"{info.world_size} ranks started by {info.launcher} need mpi4py and an MPI library, which cannot be "
            f"loaded ({error}): pip install mpi4py mpich, load the site's MPI module, or start the ranks with torchrun"
        ) from error
    mark_rank()
    check_world(info, comm.Get_rank(), comm.Get_size())
    return comm


def check_world(info: RankInfo, mpi_rank: int, mpi_size: int) -> None:
    """Refuse an MPI world that differs from the one that the launcher started.

    Raises:
        WorldError: rank or size differ.
    """
    if mpi_size == 1 and info.world_size > 1:
        raise WorldError(f"{info.world_size} ranks each see an MPI world of 1: {_remedy(info)}")
    for what, variable, value, seen in (
        ("size", info.size_variable, info.world_size, mpi_size),
        ("rank", info.rank_variable, info.rank, mpi_rank),
    ):
        if value != seen:
            raise WorldError(
                f"{variable}={value}, but MPI_COMM_WORLD has {what} {seen}: start the ranks with one launcher only, "
                "srun or mpiexec"
            )


def locate_ranks(info: RankInfo, comm: Any | None, identity: HostIdentity) -> tuple[RankInfo, list[str]]:
    """Return this rank's place counted from the hosts that the ranks really run on, and the host_key of every rank.

    Collective: every rank of `comm` calls this. None means a world of one.
    """
    host_keys = [identity.host_key] if comm is None else comm.allgather(identity.host_key)
    return locate(info, host_keys), host_keys


@contextmanager
def abort_guard(
    comm: Any | None, info: RankInfo, *, errors_alike: bool = False, stream: TextIO | None = None
) -> Iterator[None]:
    """End all ranks when one of them fails, with one message and the right exit code.

    A UsageError, or an exit with a code, that all ranks raise alike is printed once, as one line, by the first of
    them. Anything else, or one rank alone, prints its traceback with the rank in front of each line and aborts every
    rank. Without a communicator the launcher has to end the others.

    Collective: every rank of `comm` enters this.

    Args:
        comm: all ranks of the job, or None.
        info: this rank's place.
        errors_alike: without a communicator, whether a UsageError is the same on all ranks by its nature (options, a
            broken world), so that only rank 0 speaks.
        stream: where messages go; standard error when not given.

    Raises:
        SystemExit: with the exit code of the error.
    """
    ending = _Ending(comm, info, errors_alike=errors_alike, stream=stream or sys.stderr)
    try:
        yield
    except SystemExit as error:
        message, code = ("", error.code) if isinstance(error.code, int | None) else (str(error.code), 1)
        if not code:
            raise
        ending.leave(message, code)
    except UsageError as error:
        is_told = error.is_told if isinstance(error, ImpossibleWorld) else None
        ending.leave(f"error: {error}", error.exit_code, is_told=is_told)
    except TrainingFailed as error:
        ending.abort(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        ending.abort("interrupted", 128 + signal.SIGINT)
    except BaseException as error:
        code = error.exit_code if isinstance(error, HpcpaceError) else EXIT_FAILED
        ending.abort(_traceback(error), code)
    finally:
        ending.close()


def let_rank_zero_speak(info: RankInfo) -> None:
    """Wait, on another rank than 0, before an exit whose reason rank 0 alone prints.

    `srun --kill-on-bad-exit` ends all ranks with the first one, which must not be one that does not speak.
    """
    if info.rank > 0 and info.launcher == "slurm":
        time.sleep(_SPEAK_TIMEOUT_S)


class _Ending:
    """The ways in which a rank ends before its time."""

    def __init__(self, comm: Any | None, info: RankInfo, *, errors_alike: bool, stream: TextIO) -> None:
        self._comm = None if comm is None else comm.Dup()
        self._info = info
        self._errors_alike = errors_alike
        self._stream = stream

    def close(self) -> None:
        if self._comm is not None:
            self._comm.Free()

    def leave(self, message: str, code: int, *, is_told: bool | None = None) -> NoReturn:
        """End with a message that the other ranks probably have as well; `is_told`: whether another one prints it."""
        if self._comm is None:
            self._leave_alone(message, is_told)
            raise SystemExit(code)
        first = self._first_alike(f"{code} {message}")
        if first is None:
            self.abort(message or f"exit {code}, on this rank alone", code)
        if first == self._info.rank:
            self._print(message)
        raise SystemExit(code)

    def abort(self, message: str, code: int) -> NoReturn:
        """Print a message of this rank and end every rank."""
        self._print(message, label=f"[rank {self._info.rank}] " if self._info.world_size > 1 else "")
        if self._comm is not None:
            sys.stdout.flush()
            # The traceback has to be the last thing that is read, and MPI_Abort prints a line of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            self._comm.Abort(code)
        raise SystemExit(code)

    def _first_alike(self, text: str) -> int | None:
        """Return the first rank that ends with the same text, or None where not every rank ends now."""
        assert self._comm is not None
        digest = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
        digests = bytearray(_DIGEST_BYTES * self._info.world_size)
        request = self._comm.Iallgather(digest, digests)
        deadline_s = time.monotonic() + _AGREE_TIMEOUT_S
        while not request.Test():
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.001)
        return digests.index(digest) // _DIGEST_BYTES

    def _leave_alone(self, message: str, is_told: bool | None) -> None:
        label = f"[rank {self._info.rank}] " if self._info.rank else ""
        if is_told:
            # A launcher that sees this rank exit would end the one that speaks.
            time.sleep(_SPEAK_TIMEOUT_S if self._info.launcher == "slurm" else 1.0)
        elif self._info.rank == 0 or is_told is False:
            self._print(message, label=label)
        elif self._errors_alike:
            let_rank_zero_speak(self._info)
        else:
            # Where rank 0 fails alike, the launcher ends this process within the second.
            time.sleep(1.0)
            self._print(message, label=label)

    def _print(self, message: str, label: str = "") -> None:
        if message:
            message = process_redaction().text(message)
            text = "".join(f"{label}{line}\n" for line in message.splitlines())
            self._stream.write(text)
            self._stream.flush()


def _traceback(error: BaseException) -> str:
    # The first frame is the guard's own.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _remedy(info: RankInfo) -> str:
    if info.launcher == "slurm":
        return (
            "the MPI library of mpi4py does not understand the process management of this srun. Try `srun --mpi=pmi2` "
            "or `srun --mpi=pmix` (`srun --mpi=list` shows what the site has; HPCPACE_MPI sets it in our sbatch "
            "scripts), or an mpi4py built with the site's MPI"
        )
    return (
        "the mpiexec that started them belongs to another MPI library than mpi4py's. Use the mpiexec next to this "
        "Python (`python -m mpi4py --mpi-lib-version` names the library)"
    )
