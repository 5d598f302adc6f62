"""How the ranks of a session agree on shared facts: over MPI, else over torch.

First a roll call: whether all ranks take part, before any of them waits for another. A rank with wrong settings says so
at once, and if a rank does not come, the others wait no longer than the timeout. In both cases no rank records, and the
job runs as if there were no session. Over torch the ranks meet at the store of the default group, over MPI at rank 0 by
messages: neither is a collective, which would leave the others out of step if a rank never comes. Every exchange after
that has a timeout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hpcpace.core.environment import RankInfo
from hpcpace.core.errors import WorldError
from hpcpace.core.records import dataclass
from hpcpace.world.deadline import Deadline, in_time
from hpcpace.world.messages import GlooMessages, Messages, MpiMessages, NoMessages, own_store
from hpcpace.world.mpi import may_call_mpi

_POLL_INTERVAL_S = 0.001
# How much longer the other ranks wait for the decision than the rank that decides.
_GRACE_S = 2.0
_MAX_NAMED = 8
_MAX_ASKED = 4096
# Of an MPI communicator that is the job's: below the least upper bound of tags, and no number that a person takes.
_TAG = 32_611
_MESSAGE_BYTES = 8192
_MAX_REASON = 600


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """The answer of a rank at the roll call.

    Attributes:
        problem: why it cannot take part; empty if it can.
        settings: those that must be the same on all ranks, by name.
    """

    problem: str
    settings: dict[str, Any]

    @property
    def settings_text(self) -> str:
        """The settings as one text; equal settings give equal texts."""
        return json.dumps(self.settings, sort_keys=True)


class NotEveryRank(WorldError):
    """A rank does not take part, so no rank does.

    Attributes:
        is_told: whether another rank warns the user.
    """

    def __init__(self, message: str, *, is_told: bool) -> None:
        super().__init__(message)
        self.is_told = is_told


def call_over_store(rank: int, num_ranks: int, attendance: Attendance, timeout_s: float) -> Any:
    """Meet at the store of torch's default group; return a connection of our own to it, or None.

    Every rank calls this; if one does not, the others wait no longer than the timeout.

    Args:
        rank: this rank.
        num_ranks: number of ranks of the job.
        attendance: its answer.
        timeout_s: how long a rank waits for the others.

    Raises:
        NotEveryRank: a rank cannot take part, or did not come; all ranks that came raise alike.
    """
    try:
        decision, store = in_time(
            lambda: _decided_at_store(rank, num_ranks, attendance, timeout_s),
            timeout_s + _GRACE_S,
            "the store of torch's process group",
        )
    except (RuntimeError, OSError) as error:  # its host has died, or was stopped
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotEveryRank(f"torch's store does not answer ({reason})", is_told=rank > 1) from error
    _check(decision, rank)
    return store


def _decided_at_store(
    rank: int, num_ranks: int, attendance: Attendance, timeout_s: float
) -> tuple[dict[str, Any], Any]:
    import torch.distributed as dist

    store, is_ours = own_store(timeout_s + _GRACE_S)
    call = dist.PrefixStore(f"roll-call/{store.add(f'roll-call/{rank}', 1)}", store)
    problem = attendance.problem
    if not problem:
        problem = _differing(attendance, call.compare_set("settings", "", attendance.settings_text).decode())
    if problem:
        call.compare_set("decision", "", _decision(rank, problem))
    else:
        call.set(f"here/{rank}", "1")
        if call.add("num-here", 1) == num_ranks:
            call.compare_set("decision", "", _decision(rank, ""))
        try:
            call.wait(["decision"], timedelta(seconds=timeout_s))
        except RuntimeError:
            absent = [other for other in range(min(num_ranks, _MAX_ASKED)) if not call.check([f"here/{other}"])]
            call.compare_set("decision", "", _decision(rank, _absent(absent, timeout_s)))
    return json.loads(call.get("decision")), store if is_ours else None


def call_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> None:
    """Meet at rank 0 of a communicator; else as `call_over_store`."""
    from mpi4py import MPI

    try:
        if comm.Get_rank() == 0:
            decision = _decide_over_mpi(comm, attendance, timeout_s)
        else:
            decision = _ask_over_mpi(comm, attendance, timeout_s + _GRACE_S)
    except MPI.Exception as error:
        raise NotEveryRank(f"MPI cannot reach the other ranks ({error})", is_told=False) from error
    _check(json.loads(decision), comm.Get_rank())


def _decide_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> str:
    """Return the decision, and send it to every rank that has come: at once where one cannot take part.

    Whatever the decision, each message is received and each answered: one that stays where it is could be taken for a
    message of the job, which may receive from any rank and of any tag.
    """
    others = range(1, comm.Get_size())
    buffers = {other: bytearray(_MESSAGE_BYTES) for other in others}
    requests = {other: comm.Irecv(buffers[other], source=other, tag=_TAG) for other in others}
    waiting, unanswered, sent = set(others), list[int](), list[Any]()
    decision = _decision(0, attendance.problem) if attendance.problem else ""
    deadline = Deadline(timeout_s)
    while True:
        for other in [other for other in sorted(waiting) if requests[other].Test()]:
            waiting.discard(other)
            unanswered.append(other)
            said = json.loads(bytes(buffers[other]).rstrip(b"\0"))
            problem = said["problem"] or _differing(attendance, said["settings"])
            decision = decision or (_decision(other, problem) if problem else "")
        if not waiting:
            decision = decision or _decision(0, "")
        elif deadline.is_over:
            decision = decision or _decision(0, _absent(sorted(waiting), timeout_s))
        if decision:
            sent += [comm.Isend(_message(decision), dest=other, tag=_TAG) for other in unanswered]
            unanswered.clear()
            if not waiting or deadline.is_over:
                break
        time.sleep(_POLL_INTERVAL_S)
    for other in waiting:
        requests[other].Cancel()
        requests[other].Wait()
    grace = Deadline(_GRACE_S)
    while not all(request.Test() for request in sent) and not grace.is_over:
        time.sleep(_POLL_INTERVAL_S)
    return decision


def _ask_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> str:
    said = json.dumps({"problem": attendance.problem[:_MAX_REASON], "settings": attendance.settings_text})
    buffer = bytearray(_MESSAGE_BYTES)
    answer = comm.Irecv(buffer, source=0, tag=_TAG)
    sent = comm.Isend(_message(said), dest=0, tag=_TAG)
    deadline = Deadline(timeout_s)
    while not (answer.Test() and sent.Test()):
        if deadline.is_over:
            answer.Cancel()
            answer.Wait()
            return _decision(1, _absent([0], timeout_s))  # one of those that wait for rank 0 reports it
        time.sleep(_POLL_INTERVAL_S)
    return bytes(buffer).rstrip(b"\0").decode()


def _message(text: str) -> bytes:
    return text.encode().ljust(_MESSAGE_BYTES, b"\0")


def _decision(speaker: int, problem: str) -> str:
    return json.dumps({"speaker": speaker, "problem": problem[:_MAX_REASON]})


def _check(decision: dict[str, Any], rank: int) -> None:
    if decision["problem"]:
        raise NotEveryRank(decision["problem"], is_told=decision["speaker"] != rank)


def _differing(attendance: Attendance, others_text: str) -> str:
    """Return what differs between settings; empty where nothing does."""
    others = json.loads(others_text)
    names = [name for name, value in attendance.settings.items() if others.get(name) != value]
    if not names:
        return ""
    return f"settings differ between ranks: {', '.join(names)}; use the same on all ranks"


def _absent(ranks: Sequence[int], timeout_s: float) -> str:
    names = ", ".join(map(str, ranks[:_MAX_NAMED])) + (", ..." if len(ranks) > _MAX_NAMED else "")
    who = f"rank{'s' if len(ranks) > 1 else ''} {names}" if ranks else "a rank"
    return (
        f"{who} did not enter the session within {timeout_s:g} s "
        "(trace.start_timeout_s): every rank must enter it; check that none has died"
    )


def coordinate(world: RankInfo | None, comm: Any, attendance: Attendance, *, timeout_s: float) -> Messages | NoMessages:
    """Return messages between this job's ranks. Every rank calls this, even one that cannot take part.

    Args:
        world: this rank's place; None if its environment does not give it.
        comm: an MPI communicator of all ranks, or None.
        attendance: whether this rank can take part, and its settings.
        timeout_s: how long it waits for the others to come, and again to make the connection.

    Raises:
        NotEveryRank: a rank cannot take part, or did not come.
        WorldError: there are several ranks and neither MPI nor torch connects them yet.
    """
    if comm is not None and comm.Get_size() > 1:
        if not may_call_mpi(comm):
            told = "MPI was started below THREAD_MULTIPLE, and in another thread than this one"
            raise WorldError(f"{told}: enter the session in that thread, or leave comm out")
        call_over_mpi(comm, attendance, timeout_s)
        return MpiMessages(comm, timeout_s)
    if world is not None and world.world_size == 1:
        return NoMessages()
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        if world is not None and dist.get_world_size() != world.world_size:
            told = f"{world.launcher} started {world.world_size} ranks, and torch connects {dist.get_world_size()}"
            attendance = Attendance(problem=attendance.problem or told, settings=attendance.settings)
        store = call_over_store(dist.get_rank(), dist.get_world_size(), attendance, timeout_s)
        return GlooMessages("session", timeout_s, store)
    if world is None:
        raise WorldError("this rank's place in the job is unknown, and neither MPI nor torch connects it to others")
    raise WorldError(
        f"{world.world_size} ranks started by {world.launcher} are not connected yet: enter the session after "
        "torch.distributed.init_process_group, or pass an MPI communicator as comm"
    )
