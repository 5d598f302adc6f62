"""What torch's own checks print: who did not come to the start or to a monitored barrier, and whose calls differ.

These messages name other ranks than the one that prints them, so that one line may be enough. The words are those of
torch/distributed/distributed_c10d.py and, in torch/csrc/distributed/c10d, of ProcessGroupGloo.cpp, TCPStoreBackend.cpp
and ProcessGroupWrapper.cpp (TORCH_DISTRIBUTED_DEBUG=DETAIL), from torch 1.8 on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from hpcpace.runs.imports.log_facts import Desync, GroupName, Joined, Label, Line, TimedOut, WorldSize

WORDS = (b"to pass monitoredBarrier", b"ased barrier", b"CollectiveFingerPrint", b" clients joined")
"""One of these is in every line that is read here."""

START, BARRIER, COMPARED = "start", "monitored barrier", "compared"
IN_WORDS = {START: "all ranks", BARRIER: "all ranks", COMPARED: "(not named)"}
"""The groups in which torch checks something, taken for those of all ranks, and how words name them."""

_BARRIER = re.compile(r"\[Rank (\d{1,6})\]: Ranks? ([\d, ]{1,9999}) failed to pass monitoredBarrier in (\d{1,12}) ms")
_WAITING = re.compile(
    r"tore.based barrier .{0,160}?rank:? ?(\d{1,6}), (?:for )?key: [^\s:]{1,80}:(\S{1,80}) "
    r"\(world_size=(\d{1,7}), (?:worker_count|num_workers_joined)=(\d{1,7})"
)
_PASSED = re.compile(r"Completed store.based barrier for key:[^\s:]{1,80}:(\S{1,80})")
_CALLED = re.compile(
    r"Rank (\d{1,6}) is running (?:inconsistent )?collective: (?:CollectiveFingerPrint\()?"
    r"(?:SequenceNumber=\d{1,20}(?:, )?)?(?:OpType=)?([A-Z_]{2,40})(?:, TensorShape=\[([\d, ]{0,200})\])?"
)
_CLIENTS = re.compile(r"waiting for clients\. (\d{1,7})/(\d{1,7}) clients joined")


def checks(text: str, line_of: Callable[[str], Line]) -> Iterator[TimedOut | Desync | WorldSize | Joined]:
    """Yield what one line says.

    Args:
        text: the line.
        line_of: takes what precedes a message, and returns where it comes from.
    """
    if barrier := _BARRIER.search(text):
        yield from _barrier(barrier, line_of(text[: barrier.start()]))
    elif waiting := _WAITING.search(text):
        key, num_ranks = _key(waiting[2]), int(waiting[3])
        yield WorldSize(num_ranks)
        yield Joined(key=key, num_joined=int(waiting[4]), num_ranks=num_ranks)
        op = "INIT_PROCESS_GROUP" if key < 2 else "NEW_GROUP"
        yield _of_check(Line(label=Label(rank=int(waiting[1]))), START, op, number=key)
    elif passed := _PASSED.search(text):
        yield Joined(key=_key(passed[1]), num_joined=0, num_ranks=0)
    elif clients := _CLIENTS.search(text):
        yield WorldSize(int(clients[2]))
        yield Joined(key=0, num_joined=int(clients[1]), num_ranks=int(clients[2]))
    else:
        yield from _compared(list(_CALLED.finditer(text)), line_of, text)


def _key(name: str) -> int:
    """Return the number of a start, which torch counts from 1 on; 0 for a group with a name."""
    return int(name) if name.isdecimal() and len(name) < 10 else 0


def _barrier(found: re.Match[str], line: Line) -> Iterator[TimedOut | Desync]:
    """Yield who failed to come. Rank 0 asks the others in their order, so those before the last one have come."""
    reporter, failed = int(found[1]), [int(number) for number in re.findall(r"\d{1,6}", found[2])]
    if line.label.rank not in (None, reporter):  # of a smaller group, whose members are not known
        return
    line = replace(line, label=Label(rank=reporter), member=None, group=GroupName(name=BARRIER))
    come = tuple(rank for rank in range(max(failed, default=0)) if rank not in failed and rank != reporter)
    yield _of_check(line, BARRIER, "MONITORED_BARRIER", waited_ms=int(found[3]))
    yield Desync(line=line, members=tuple(failed), number=-1, has_finished=True)
    if come:
        yield Desync(line=line, members=come, number=0, has_finished=False, op="MONITORED_BARRIER")


def _compared(called: list[re.Match[str]], line_of: Callable[[str], Line], text: str) -> Iterator[TimedOut]:
    """Yield what a rank called, and what the first one did that called something else in the same place."""
    own = line_of(text[: called[0].start()]).label.rank if called else None
    if own is not None and own != int(called[0][1]):  # of a smaller group, whose members are not known
        return
    for one in called:
        numbers = re.findall(r"\d+", one[3] or "")
        size = math.prod(map(int, numbers)) if numbers else -1
        yield _of_check(Line(label=Label(rank=int(one[1]))), COMPARED, one[2], num_elements=size)


def _of_check(
    line: Line, group: str, op: str, *, number: int | None = None, num_elements: int = -1, waited_ms: int | None = None
) -> TimedOut:
    return TimedOut(
        line=replace(line, group=GroupName(name=group)),
        number=number,
        op=op,
        num_elements=num_elements,
        timeout_ms=waited_ms or 0,
        ran_ms=waited_ms,
    )
