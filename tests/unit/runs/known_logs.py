"""Lines of torch's watchdog as its releases write them, made to order."""

from __future__ import annotations

from collections.abc import Sequence

AT = "E1128 21:11:49.041194513"
LATER = "E1128 22:41:49.041194513"
DEFAULT = "[PG ID 0 PG GUID 0(default_pg) Rank {}]"


def timed_out(
    rank: int, number: int, op: str = "ALLREDUCE", *, size: int = 1024, member: int | None = None, at: str = AT
) -> str:
    """Return the report of an operation that ran out of time, as torch 2.2 and newer print it."""
    return (
        f"[rank{rank}]:[{at} ProcessGroupNCCL.cpp:632] [Rank {rank if member is None else member}] Watchdog caught"
        f" collective operation timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={size}, NumelOut={size},"
        " Timeout(ms)=600000) ran for 600011 milliseconds before timing out."
    )


def status(rank: int, enqueued: int, completed: int, group: str = DEFAULT, *, at: str = AT) -> str:
    """Return what torch 2.6 and newer print after that; `group` has a place for the rank within it."""
    return (
        f"[rank{rank}]:[{at} ProcessGroupNCCL.cpp:2271] {group.format(rank)}  failure detected by watchdog at work"
        f" sequence id: {completed + 1} PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )


def signal(rank: int, enqueued: int, completed: int, *, at: str = AT) -> str:
    """Return what a rank prints that others told of their timeout."""
    return (
        f"[rank{rank}]:[{at} ProcessGroupNCCL.cpp:1870] {DEFAULT.format(rank)} Received a dump signal due to a"
        f" collective timeout from  rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work:"
        f" {enqueued}, last completed NCCL work: {completed}.This is most likely caused by incorrect usages"
    )


def waiting(ranks: Sequence[int], number: int = 22, *, at: str = AT) -> list[str]:
    """Return the lines of ranks that wait in an all_reduce of the default group."""
    return [
        line for rank in ranks for line in (timed_out(rank, number, at=at), status(rank, number, number - 1, at=at))
    ]


def old(rank: int, number: int | None, op: str = "ALLREDUCE", *, label: str = "") -> str:
    """Return the report of torch 1.8, without a number, or of 1.9 to 2.1."""
    place = "" if number is None else f"SeqNum={number}, "
    return (
        f"{label}[E ProcessGroupNCCL.cpp:587] [Rank {rank}] Watchdog caught collective operation timeout:"
        f" WorkNCCL({place}OpType={op}, Timeout(ms)=1800000) ran for 1806986 milliseconds before timing out."
    )


def gloo(rank: int, *, label: str = "[rank{}]: ", is_closed: bool = False) -> list[str]:
    """Return the end of a traceback of a rank that waited for a message of gloo."""
    why = "Connection closed by peer [10.0.0.1]:1234"
    what = why if is_closed else "Timed out waiting 1800000ms for recv operation to complete"
    front = label.format(rank)
    return [
        f'{front}  File "/opt/torch/distributed/distributed_c10d.py", line 2806, in all_reduce',
        f"{front}RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] {what}",
    ]


DESYNC = """\
[rank0]:[E515 18:36:47.343377708 ProcessGroupNCCL.cpp:1937] Rank 0
\t - [0] Timeout at collective: ALLREDUCE, #315
\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
\t     [7] finished collective #182, but didn't join collective #183 (count from 1)
\t - Snapshot of ranks' latest states:
\t   #182 finished ranks:
\t     [7] finished ALLREDUCE
\t   #315 started ranks:
\t     [0, 1, 2] started ALLREDUCE
\t   #317 started ranks:
\t     [3, 4, 5, 6] started _ALLGATHER_BASE"""
NEVER_JOINED = """\
\t - [0] Timeout at collective: ALLREDUCE, #5
\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any \
collectives"""
