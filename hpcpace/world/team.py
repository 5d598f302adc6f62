"""Processes that an MPI launcher started to do one command's work together, as `srun -n 8 hpcpace report RUN`."""

from __future__ import annotations

import atexit
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hpcpace.core.environment import RankInfo, is_started_by_rank, process_environ, rank_info
from hpcpace.core.errors import HpcpaceError, NotEnoughMemory, ReportError, WorldError
from hpcpace.core.records import dataclass

_Part = TypeVar("_Part")
_Whole = TypeVar("_Whole")
_PROGRESS = "a piece is done"
_POLL_S = 0.002
_OTHERS_END_S = 0.5


@dataclass(frozen=True)
class _Failure:
    """Why a process could not do its part."""

    error: HpcpaceError


class Team:
    """The processes of one command. All of them call the same methods in the same order.

    Args:
        comm: MPI's communicator of all of them.
        info: this process's place.
    """

    def __init__(self, comm: Any, info: RankInfo) -> None:
        self._comm, self._info = comm, info
        self._num_told = 0
        self.has_failed = False
        """Whether all processes know of a failure of one of them."""

    @property
    def rank(self) -> int:
        """The number of this process; the first one is 0."""
        return self._info.rank

    @property
    def size(self) -> int:
        """How many processes there are, at least two."""
        return self._info.world_size

    def agree(self, work: Callable[[], _Part], sign: Callable[[_Part], object]) -> _Part:
        """Do the same work in every process, and return this one's result.

        Args:
            work: what every process does.
            sign: what of the result must be the same in all processes.

        Raises:
            HpcpaceError: the work failed in some process, or came out differently; the same in every process.
        """
        result, outcome = None, None
        try:
            result = work()
            outcome = sign(result)
        except Exception as error:
            outcome = self._failure(error)
        outcomes = self._comm.allgather(outcome)
        for number, other in enumerate(outcomes):
            if isinstance(other, _Failure):
                self.has_failed = True
                raise other.error
            if other != outcomes[0]:
                raise WorldError(
                    f"process {number} reads {other} where process 0 reads {outcomes[0]}: is the run on a file system "
                    "that all nodes share?"
                )
        assert result is not None
        return result

    def together(
        self,
        work: Callable[[Callable[[], None]], _Part],
        finish: Callable[[Sequence[_Part]], tuple[_Whole, _Whole]],
        watch: Callable[[int], None],
    ) -> _Whole:
        """Do each process's part of some work, and return what the parts are together.

        Args:
            work: does this process's part; calls its argument after each piece.
            finish: called in process 0 with all parts in order; returns the result for process 0, and for the others.
            watch: called in process 0 with the number of pieces that all processes have done.

        Raises:
            HpcpaceError: some process could not do its part; the same in every process.
        """
        self._num_told = 0
        outcomes: dict[int, Any] = {}

        def tell() -> None:
            self._num_told += 1
            if self.rank:
                self._comm.send(_PROGRESS, dest=0)
            else:
                self._receive(outcomes, watch)

        outcome: _Part | _Failure
        try:
            outcome = work(tell)
        except Exception as error:
            outcome = self._failure(error)
        if self.rank:
            self._comm.send(outcome, dest=0)
            own = reply = self._comm.bcast(None, root=0)
        else:
            own, reply = self._finished(self._gathered({**outcomes, 0: outcome}, watch), finish)
            self._comm.bcast(reply, root=0)
        if isinstance(reply, _Failure):
            self.has_failed = True
            raise reply.error
        whole: _Whole = own
        return whole

    def _gathered(self, outcomes: dict[int, Any], watch: Callable[[int], None]) -> list[Any]:
        while len(outcomes) < self.size:
            if not self._receive(outcomes, watch):
                time.sleep(_POLL_S)
        return [outcomes[number] for number in range(self.size)]

    def _finished(
        self, outcomes: Sequence[_Part | _Failure], finish: Callable[[Sequence[_Part]], tuple[_Whole, _Whole]]
    ) -> tuple[Any, Any]:
        parts = []
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                return None, outcome
            parts.append(outcome)
        try:
            return finish(parts)
        except Exception as error:
            return None, self._failure(error)

    def _receive(self, outcomes: dict[int, Any], watch: Callable[[int], None]) -> bool:
        """Take the messages that have come, results into `outcomes`; return whether there were any."""
        from mpi4py import MPI

        status, has_come = MPI.Status(), False
        # A process sends its result last, so that no message is on its way when MPI ends.
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
            message = self._comm.recv(source=status.Get_source())
            if isinstance(message, str) and message == _PROGRESS:
                self._num_told += 1
            else:
                outcomes[status.Get_source()] = message
            has_come = True
        watch(self._num_told)
        return has_come

    def _failure(self, error: Exception) -> _Failure:
        has_no_memory = isinstance(error, (MemoryError, NotEnoughMemory))
        if isinstance(error, HpcpaceError) and not has_no_memory and _is_picklable(error):
            return _Failure(error)
        host = f" on {self._info.host}" if self._info.host else ""
        who = f"process {self.rank} of {self.size}{host} failed"
        if has_no_memory:
            return _Failure(NotEnoughMemory(f"{who}: not enough memory{f' ({error})' if str(error) else ''}"))
        return _Failure(ReportError(f"{who}: {type(error).__name__}: {error}"))


@contextmanager
def team() -> Iterator[Team | None]:
    """Yield the processes that a launcher started to do this command's work together; None for one process.

    Behind it, only the first process goes on; the others exit well. What all of them raise alike, the first one raises.
    A bug in one process ends all of them, with its number.

    Raises:
        WorldError: launcher and MPI contradict each other, or mpi4py is missing.
    """
    if not _is_launched():
        yield None
        return
    from hpcpace.world.mpi import abort_guard, end_mpi, mpi_world

    info = rank_info(process_environ())
    comm = mpi_world(info)
    if comm is None:
        yield None
        return
    failed: HpcpaceError | None = None
    with abort_guard(comm, info):
        members = Team(comm, info)
        try:
            yield members
        except HpcpaceError as error:
            if isinstance(error, NotEnoughMemory) and not members.has_failed:
                raise  # the others may not meet it, and wait for this process
            failed = error
    end_mpi(comm)
    if info.rank:
        raise SystemExit(0)
    # A launcher that sees this process exit with another code than 0 kills those that are still ending.
    atexit.register(time.sleep, _OTHERS_END_S)
    if failed is not None:
        raise failed


def _is_launched() -> bool:
    """Return whether a launcher started several of this process.

    A shell in a step, as by `srun --pty`, is alone, and so is what a rank starts.
    """
    environ = process_environ()
    if (sys.stdin is not None and sys.stdin.isatty()) or is_started_by_rank(environ):
        return False
    sizes = (environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return any(size.isdecimal() and int(size) > 1 for size in sizes)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error of another library does when it is copied
        return False
    return True
