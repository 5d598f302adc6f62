"""Stacks of py-spy: who waits in a collective, who does not, and who differs.

`py-spy dump --pid PID` prints them, also with --native, --locals, --subprocesses and --json. A file may have several
processes, one after the other, or interleaved behind the labels of `srun -l`. The main thread decides what a process
does; helpers of a process, such as workers of a data loader, are left out.

A stack is what a rank does, not what it has called: two ranks in an all_reduce may be in different ones. A line that
waits for a GPU looks like one that computes, unless the stack has frames of C, and operations of NCCL run on the GPU
after the call has returned. So a rank outside of a collective is named for sure only where its stack is in a wait, a
read or a write of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcpace.core.codec import convert
from hpcpace.core.log_text import front_of, plain_text
from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, plural, rank_list
from hpcpace.hang.verdict import is_or_are
from hpcpace.hang.views import Call, Channel, Doing, GroupView, Hang, HangKind, JobView, RankView, undecided
from hpcpace.runs.imports.input_files import json_value

# memory: of one file; a process with 500 threads has some 500 kB
MAX_BYTES = 32 << 20
_MAX_PROCESSES, _MAX_THREADS, _MAX_FRAMES_READ = 1 << 14, 1 << 12, 1 << 11
_MAX_LETTERS = 300
_MAX_DIGITS = 10  # format: of the number of a line
_JSON = re.compile(r"\s*\[\s*(?:[{\]]|$)")  # a label may begin with `[` as well
_PROCESS = re.compile(r"Process (\d{1,10}): ?(.{0,2000})")
_PARENT = re.compile(r"Parent Process (\d{1,10})")
_THREAD = re.compile(r"Thread (0x[0-9A-Fa-f]{1,16}|\d{1,20})(?: \(([\w+]{1,20})\))?(?:: \"(.{0,200})\")?")
_FRAME = re.compile(r" {4}(\S.{0,300}?) \(([^()]{1,500}|[^ ]{1,500})\)$")
_RANK_WORD = re.compile(r"(?:^|[^\w-])(?:global_)?rank\W{0,3}(\d{1,6})\b", re.IGNORECASE)
_RANK_OPTION = re.compile(r"(?:--rank[= ]|\bRANK=)(\d{1,6})\b")
_RANK_LOCAL = re.compile(r" {8,}(?:global_)?rank: (\d{1,6})$")


@dataclass(frozen=True)
class Frame:
    """A frame of a stack: a function, its file and its line; 0 for the line of a library in C."""

    function: str
    file: str
    line: int

    @property
    def is_python(self) -> bool:
        """Whether it is one of Python code."""
        return self.line > 0 and (".py" in self.file or self.file.startswith("<"))

    @property
    def where(self) -> str:
        """The frame as `file:line in function`."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"[:_MAX_LETTERS]


@dataclass(kw_only=True)
class Thread:
    """A thread: its name, empty where unknown, and its frames, the innermost first."""

    number: int
    name: str
    frames: list[Frame] = field(default_factory=list)


@dataclass(kw_only=True)
class StackDump:
    """The stacks of one process.

    Attributes:
        path: the file.
        pid: of the process; -1 where the file does not say it, as JSON without threads.
        rank: global rank; None where nothing in the file says it.
        parent: pid of the process that started it; None where unknown.
    """

    path: Path
    pid: int
    rank: int | None = None
    parent: int | None = None
    threads: list[Thread] = field(default_factory=list)
    is_listed_in_reverse: bool = False

    @property
    def main(self) -> Thread | None:
        """The main thread: the one with that name, else the one that began the process, else the one of `<module>`."""
        threads = [thread for thread in self.threads if thread.frames]
        found = [
            *(thread for thread in threads if thread.name == "MainThread"),
            *(thread for thread in threads if thread.number == self.pid),
            *(thread for thread in threads if thread.frames[-1].function == "<module>"),
            *(reversed(threads) if self.is_listed_in_reverse else threads),
        ]
        return found[0] if found else None


class _JsonFrame(msgspec.Struct, frozen=True):
    """A frame as JSON has it."""

    name: Annotated[str, Meta(max_length=4096)]
    filename: Annotated[str, Meta(max_length=4096)]
    line: Annotated[int, Meta(ge=-1, le=1 << 31)] = 0
    short_filename: Annotated[str, Meta(max_length=4096)] | None = None


class _JsonThread(msgspec.Struct, frozen=True):
    """A thread as JSON has it."""

    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    thread_id: int
    frames: Annotated[tuple[_JsonFrame, ...], Meta(max_length=_MAX_FRAMES_READ)]
    thread_name: Annotated[str, Meta(max_length=4096)] | None = None
    os_thread_id: int | None = None


def is_py_spy(start: str) -> bool:
    """Return whether a text begins as a dump of py-spy does."""
    if _JSON.match(start):
        return '"frames"' in start and ('"thread_id"' in start or '"thread_name"' in start or '"pid"' in start)
    return bool(re.search(r"^.{0,160}Process \d{1,10}: ?", start, re.MULTILINE)) and bool(
        re.search(r"^.{0,160}(?:Python v\d|Thread (?:0x)?[0-9A-Fa-f]+ \()", start, re.MULTILINE)
    )


def read_stacks(path: Path, data: bytes) -> list[StackDump]:
    """Return the stacks in a file.

    Raises:
        ValueError: it has none, or is cut off or damaged as JSON.
    """
    text = plain_text(data).replace("\r", "")
    if _JSON.match(text):
        return _from_json(path, text)
    dumps = [dump for label, lines in _streams(text) for dump in _from_text(path, lines, label)]
    known = {dump.pid for dump in dumps}
    dumps = [dump for dump in dumps if dump.threads and dump.parent not in known]
    if not dumps:
        raise ValueError("it has no stack: py-spy could not read the process, or the file is cut off")
    return dumps


def _from_json(path: Path, text: str) -> list[StackDump]:
    threads = convert(json_value(text.encode()), tuple[_JsonThread, ...])
    by_pid: dict[int, StackDump] = {}
    for thread in threads[:_MAX_THREADS]:
        dump = by_pid.setdefault(thread.pid, StackDump(path=path, pid=thread.pid, is_listed_in_reverse=True))
        frames = [Frame(one.name, one.short_filename or one.filename, max(one.line, 0)) for one in thread.frames]
        number = thread.os_thread_id if thread.os_thread_id is not None else thread.thread_id
        dump.threads.append(Thread(number=number, name=thread.thread_name or "", frames=frames))
    if not by_pid:
        raise ValueError("it has no thread")
    return list(by_pid.values())


def _streams(text: str) -> Iterator[tuple[int | None, Iterable[str]]]:
    """Yield the lines behind each label of a launcher, with the rank that it names, or all where there are none."""
    lines = text.split("\n")
    fronts = (front_of(line) for line in lines if _PROCESS.search(line) and not _PROCESS.match(line))
    known = {front.labels for front in fronts if _PROCESS.match(front.text)}
    if not known:
        yield None, lines
        return
    of_label: dict[str, tuple[int | None, list[str]]] = {}
    for line in lines:
        front = front_of(line)
        if front.labels in known:
            of_label.setdefault(front.labels, (front.task, []))[1].append(front.text)
    yield from of_label.values()


def _from_text(path: Path, lines: Iterable[str], label: int | None) -> Iterator[StackDump]:
    dump: StackDump | None = None
    title = ""
    for line in lines:
        if process := _PROCESS.match(line):
            if dump is not None:
                yield dump
            option = _RANK_OPTION.search(process[2])
            word = _RANK_WORD.search(title)
            named = [int(found[1]) for found in (word, option) if found]
            rank = label if label is not None else named[0] if named else None
            dump = StackDump(path=path, pid=int(process[1]), rank=rank)
            title = ""
        elif dump is None:
            title = line if line.strip() else title
        elif parent := _PARENT.match(line):
            dump.parent = int(parent[1])
        elif thread := _THREAD.match(line):
            if len(dump.threads) < _MAX_THREADS:
                number = int(thread[1], 16 if thread[1].startswith("0x") else 10)
                dump.threads.append(Thread(number=number, name=thread[3] or ""))
        elif dump.threads and (frame := _FRAME.match(line)):
            if len(dump.threads[-1].frames) < _MAX_FRAMES_READ:
                dump.threads[-1].frames.append(_frame(frame[1], frame[2]))
        elif (local := _RANK_LOCAL.match(line)) and dump.rank is None:
            dump.rank = int(local[1])
        elif line.strip() and not line.startswith(" "):
            title = line
    if dump is not None:
        yield dump


def _frame(function: str, place: str) -> Frame:
    file, _, line = place.rpartition(":")
    if file and line.isdecimal() and len(line) < _MAX_DIGITS:
        return Frame(function, file, int(line))
    return Frame(function, place, 0)


STACKS = "stacks"
"""What the view of a job that has nothing else is made of."""
_MAX_FRAMES_SHOWN = 16  # display: of a stack
_MAX_GROUPS = 6  # display: of stacks that differ
_MAX_NAMED = 2  # display: of them in a headline
_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "deepspeed/comm/",
    "horovod/torch/mpi_ops.py",
)
_WRAPPERS = ("torch/distributed/c10d_logger.py", "torch/utils/_contextlib.py", "deepspeed/utils/")
_COLLECTIVE_NATIVE = ("c10d::", "nccl", "gloo::", "PMPI_", "MPI_", "ucp_")
_DEVICE_NATIVE = (
    *(f"{library}{what}Synchronize" for library in ("cuda", "cu", "hip") for what in ("Stream", "Device", "Event")),
    "cuCtxSynchronize",
)
_BACKWARD = frozenset({"_engine_run_backward", "backward", "grad"})
_OF_AUTOGRAD = ("pt_autograd", "Dummy-")  # threads that Python did not start have no name at first
_DEVICE_FILES = ("torch/cuda/__init__.py", "torch/cuda/streams.py", "torch/accelerator/__init__.py")
_OWN = {
    "torch/utils/data/": Doing.LOADING,
    "torch/serialization.py": Doing.SAVING,
    "torch/distributed/checkpoint/": Doing.SAVING,
    "safetensors/": Doing.SAVING,
}


@dataclass(frozen=True, kw_only=True)
class StackState:
    """What one rank does by its stack.

    Attributes:
        op: the collective in which it waits, as its function is called; empty where it is in none.
        waits_for_device: whether it waits for its GPU.
        is_sure: whether it is known to be in no collective.
        where: the line of the user's code that called it, or the innermost one.
        frames: `file:line in function`, the innermost last.
    """

    op: str
    waits_for_device: bool
    is_sure: bool
    doing: Doing
    where: str
    frames: tuple[str, ...]


def stack_state(dump: StackDump) -> StackState | None:
    """Return what a process does by its main thread; None where it has no frame."""
    thread = dump.main
    if thread is None:
        return None
    frames = _of_backward(dump, thread) or thread.frames
    native = [frame.function for frame in frames if not frame.is_python]
    python = [frame for frame in frames if frame.is_python] or frames
    inner = _library_frames(python)
    called = _collectives(inner)
    is_native = any(name in function for function in native for name in _COLLECTIVE_NATIVE)
    op = called[-1].function if called else "collective" if is_native else ""
    on_device = any(name in function for function in native for name in _DEVICE_NATIVE) or any(
        frame.function == "synchronize" and any(file in frame.file for file in _DEVICE_FILES) for frame in inner
    )
    doing = next((doing for frame in python for part, doing in _OWN.items() if part in frame.file), Doing.UNKNOWN)
    is_own = doing is not Doing.UNKNOWN or bool(native) or _is_of_python(python[0])
    user = next((frame for frame in python if not _is_of_library(frame)), python[0])
    return StackState(
        op=op,
        waits_for_device=on_device and not op,
        is_sure=is_own and not op and not on_device and not _waits_for_backward(python),
        doing=Doing.UNKNOWN if op else doing,
        where=user.where,
        frames=tuple(frame.where for frame in reversed(python[:_MAX_FRAMES_SHOWN])),
    )


def _of_backward(dump: StackDump, main: Thread) -> list[Frame]:
    """Return the stack of a thread of autograd that is in a collective for which the main one waits; empty for none.

    Hooks of ZeRO and FSDP run in the thread of a device, and `backward` in the main one waits for that.
    """
    if not _waits_for_backward([frame for frame in main.frames if frame.is_python]):
        return []
    others = (thread.frames for thread in dump.threads if thread.name.startswith(_OF_AUTOGRAD) or not thread.name)
    return next((frames for frames in others if _collectives(_library_frames(frames))), [])


def _waits_for_backward(python: Sequence[Frame]) -> bool:
    return any("torch/autograd/" in frame.file and frame.function in _BACKWARD for frame in python[:1])


def _collectives(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of functions that call a collective."""
    return [frame for frame in frames if any(file in frame.file for file in _COLLECTIVE_FILES)]


def _is_of_library(frame: Frame) -> bool:
    return _is_of_python(frame) or "torch/" in frame.file or any(part in frame.file for part in _LIBRARIES)


def _library_frames(python: Sequence[Frame]) -> list[Frame]:
    """Return the innermost frames of a stack up to the first one of the user's code."""
    found = []
    for frame in python:
        if not any(part in frame.file for part in (*_COLLECTIVE_FILES, *_WRAPPERS, *_DEVICE_FILES, "torch/")):
            break
        found.append(frame)
    return found


def _is_of_python(frame: Frame) -> bool:
    """Return whether a frame is of Python's own library: a lock, a pipe, a socket, a subprocess."""
    short = frame.file
    folder, _, name = short.rpartition("/")
    if "site-packages" in short or "dist-packages" in short:
        return False
    if "/lib/python3" in short or "/lib64/python3" in short:
        return True
    return (folder.rpartition("/")[2] in _STANDARD) or (not folder and name in _STANDARD_FILES)


_LIBRARIES = ("site-packages/", "dist-packages/", *_COLLECTIVE_FILES, *_WRAPPERS, *_OWN)
_STANDARD = frozenset({"multiprocessing", "concurrent", "asyncio", "urllib", "http", "json", "email", "logging"})
_STANDARD_FILES = frozenset(
    {"threading.py", "queue.py", "selectors.py", "socket.py", "ssl.py", "subprocess.py", "shutil.py", "pickle.py"}
)


def stack_job(states: Mapping[int, StackState]) -> JobView:
    """Return what the stacks of ranks show of a job; ranks between those that have one are unknown."""
    everyone = tuple(range(max(states) + 1))
    ops = sorted({state.op for state in states.values() if state.op})
    channel = Channel(0)
    views = {rank: RankView(rank=rank, is_recorded=False) for rank in everyone}
    for rank, state in states.items():
        is_inside = bool(state.op)
        call = Call(
            channel=channel,
            seq=0,
            op=state.op if len(ops) == 1 else "collective",
            is_open=True,
            is_numbered=False,
            where=state.where,
        )
        views[rank] = RankView(
            rank=rank,
            entered={channel: int(is_inside)},
            completed={channel: 0},
            calls=(call,) if is_inside else (),
            is_complete=is_inside or state.is_sure,
            doing=state.doing,
            stack=state.frames,
        )
    return JobView(groups=(GroupView(name="(not known)", members=everyone),), ranks=views, now_ns=0, source=STACKS)


def judged(hang: Hang | None, states: Mapping[int, StackState]) -> tuple[Hang | None, str]:
    """Return a verdict as far as stacks carry it, and why there is none where nobody waits in a collective."""
    inside = [rank for rank, state in states.items() if state.op]
    outside = sorted(states.keys() - set(inside))
    if hang is None or not inside:
        few = _apart(states, outside)
        told = f"; {rank_list(few)} differ{'s' * (len(few) == 1)} from most, at {states[few[0]].where}" if few else ""
        return None, f"no stack is in a collective, and those of NCCL run on after the call has returned{told}"
    calls = {(states[rank].op, states[rank].where) for rank in inside}
    if not outside and len(calls) > 1:
        told = listed(grouped(states)[:_MAX_NAMED])
        reason = f"stacks are in different calls, which may be of different groups: {told}"
        return replace(undecided(hang, reason), could_be=_apart(states, inside)), ""
    if len(outside) > len(inside):
        reason = (
            f"{rank_list(sorted(inside))} {is_or_are(inside)} in it, and {rank_list(outside)} are not: either these"
            " have not come, or the former called one too many"
        )
        return undecided(hang, reason), ""
    unsure = [rank for rank in outside if not states[rank].is_sure]
    if hang.kind is HangKind.UNKNOWN and unsure:
        where = states[unsure[0]].where
        reason = (
            f"{rank_list(unsure)} {is_or_are(unsure)} outside of it, at {where}, but waiting for a GPU looks the same"
        )
        return replace(hang, could_be=tuple(outside), reason=reason), ""
    if hang.kind is HangKind.UNKNOWN and hang.could_be:
        return replace(hang, reason=f"there is no stack of {rank_list(hang.could_be)}"), ""
    if hang.kind is HangKind.NETWORK:
        reason = f"all {plural(len(states), 'stack')} are in it, and may be in different calls of it"
        return undecided(hang, reason), ""
    return hang, ""


def _apart(states: Mapping[int, StackState], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose stacks differ from those of more than half; nothing where no stack is that of so many."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        places.setdefault((states[rank].op, states[rank].where), []).append(rank)
    most = max(places.values(), key=len)
    return tuple(sorted(set(ranks) - set(most))) if 2 * len(most) > len(ranks) else ()


def grouped(states: Mapping[int, StackState]) -> list[str]:
    """Return the ranks by what they do, the most first, a sentence each."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        what = state.op or ("waiting for the GPU" if state.waits_for_device else "")
        groups.setdefault((what, state.where), []).append(rank)
    order = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    told = [f"{rank_list(ranks)}: {f'{what}, ' if what else ''}at {where}" for (what, where), ranks in order]
    rest = len(told) - _MAX_GROUPS
    return [*told[:_MAX_GROUPS], *([plural(rest, "more stack")] if rest > 0 else [])]
