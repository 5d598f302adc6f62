"""The start of MPI: its library loaded without starting it, and started in a thread where only that works.

mpi4py starts MPI when it is imported. Here both are apart, because the library's name tells whether it understands
the launcher, and a start under one that it does not understand may abort.
"""

from __future__ import annotations

import atexit
import faulthandler
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcpace.core.errors import WorldError

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
        environ: environment, which tells who started this process.

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
    """Return whether Slurm's pmi2 may misread what this library tells it in its start.

    MPICH over UCX tells it 4,096 bytes from the place of its address on, in lines that are longer than pmi2 reads
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
    if isinstance(comm, _Handed):
        return True
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE or MPI.Is_thread_main())


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
