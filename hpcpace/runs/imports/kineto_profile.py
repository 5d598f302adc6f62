"""One profile of torch.profiler: its steps, phases, collectives and device events.

Annotations become phases, and calls and kernels become collectives, by their names.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable
from hpcpace.runs.imports.input_files import ChromeEvents, InputFile, json_bytes
from hpcpace.trace.schema import Op, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable


class KinetoArgs(msgspec.Struct, gc=False, frozen=True):
    """What is used of the arguments of an event, each of any type: files of many versions differ."""

    correlation: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    seq: Any = msgspec.field(default=None, name="Seq")
    dtype: Any = None
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    source: Any = msgspec.field(default=None, name="Src Rank")
    destination: Any = msgspec.field(default=None, name="Dst Rank")
    root: Any = msgspec.field(default=None, name="Root rank")


NO_ARGS = KinetoArgs()


class KinetoEvent(msgspec.Struct, gc=False):
    """One event; times in microseconds, negative where the file has none."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = -1.0
    dur: float = -1.0
    args: KinetoArgs = NO_ARGS


OPS = {
    "allreduce": Op.ALL_REDUCE,
    "allgather": Op.ALL_GATHER,
    "allgatherintotensor": Op.ALL_GATHER,
    "reducescatter": Op.REDUCE_SCATTER,
    "reducescattertensor": Op.REDUCE_SCATTER,
    "broadcast": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "alltoallv": Op.ALL_TO_ALL,
    "send": Op.SEND,
    "recv": Op.RECV,
    "recvanysource": Op.RECV,
    "barrier": Op.BARRIER,
    "allreducebarrier": Op.BARRIER,
    "monitoredbarrier": Op.BARRIER,
}
"""Names of collectives without underscores, and without what says how they were called: `_base`, `_coalesced`, ..."""

_WAYS_OF_CALLING = ("base", "oop", "coalesced", "single")

_PHASES = (
    (re.compile(r"Optimizer\.step#|(^|\W)optimizer(\W|$)", re.IGNORECASE), Phase.OPTIMIZER),
    (re.compile(r"dataloader|(^|\W)data(\W|$)", re.IGNORECASE), Phase.DATA),
    (re.compile(r"(^|\W)forward(\W|$)", re.IGNORECASE), Phase.FORWARD),
    (re.compile(r"(^|\W)backward(\W|$)", re.IGNORECASE), Phase.BACKWARD),
)
_NOT_A_PHASE = re.compile(r"zero_grad|^nn\.Module|autograd::")


def phase_of(name: str) -> Phase | None:
    """Return the phase that an annotation's name says; None for any other name."""
    if name.startswith("nccl:") or _NOT_A_PHASE.search(name):
        return None
    return next((phase for pattern, phase in _PHASES if pattern.search(name)), None)


def op_of(name: str) -> Op | None:
    """Return the operation that a name like `all_reduce`, `allreduce` or `_allgather_base` means; None if none."""
    bare = name.lower().replace("_", "")
    for way in _WAYS_OF_CALLING:
        bare = bare.removesuffix(way)
    return OPS.get(bare)


def is_of_nccl(name: str) -> bool:
    """Return whether a kernel is one of NCCL, or of AMD's RCCL.

    RCCL has one kernel for all operations, such as `ncclDevKernel_Generic_4` or `void rcclGenericKernel<1, false>`.
    """
    return bool(_OF_NCCL.match(name))


def kernel_op(name: str) -> str:
    """Return what a kernel of NCCL does: the word behind the first underscore, as in `ncclDevKernel_AllReduce_Sum_f32`.

    Of a batch of messages, `SendRecv`, no name says the direction: it counts as a send.
    """
    word = name.partition("_")[2].partition("_")[0].partition("(")[0]
    return "send" if word == "SendRecv" else word


Int64Array = NDArray[np.int64]

_ITEM_BYTES = {"byte": 1, "char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2, "int": 4, "float": 4}
_ITEM_BYTES |= {"long": 8, "double": 8, "complexfloat": 8, "float8": 1}
_OF_NCCL = re.compile(r"(void )?\w{0,4}(nccl|rccl|msccl)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#(\d{1,9})$")
_BACKWARD = "autograd::engine::evaluate_function"
_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
_MEMBERS = re.compile(r"\[ *\d{1,7}(?: *, *\d{1,7})* *\]$")
"""Ranks of a group; PyTorch writes dots for some of a large one, whose members are not known then."""
_MIN_LAUNCHED = 0.5
MAX_GROUPS = 65_535
"""The trace format numbers process groups with 16 bits, and the last number is that of an unknown one."""
_MAX_GROUP_LETTERS = 60
_MAX_MEMBERS_LETTERS = 1000  # PyTorch names at most 30 members, of some eight letters each
_MAX_NS = 1 << 61
# Memory that what is kept of a profile takes at most until the run is written, measured: an operation, step or phase;
# a kernel, launch or function; a member of a group.
_ROW_BYTES, _KERNEL_BYTES, _MEMBER_BYTES = 400, 128, 200
FREE_BYTES = 640 << 20
"""Memory that profiles of any size may take."""


class _UntimedError(Exception):
    """An event has no begin or no duration."""


class Events:
    """Events of one kind in the order of the file, a row of whole numbers each; times in nanoseconds."""

    def __init__(self, *columns: str) -> None:
        self._dtype = np.dtype([(name, np.int64) for name in columns])
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values) * self._values.itemsize // self._dtype.itemsize

    def add(self, *row: int) -> None:
        """Add an event with a value for each column."""
        self._values.extend(row)

    @property
    def rows(self) -> NDArray[Any]:
        """The events, a field for each column, (num_events,); none can be added while this is in use."""
        return np.frombuffer(self._values, self._dtype)


class Calls(Events):
    """Operations of one kind of source.

    Their columns are `op`, `begin_ns`, `end_ns`; `seq`, the number within the group, or -1; `size_bytes` of the whole
    message, or 0; `link`, the correlation of a kernel with its launch, or 0; `peer`, the rank at the other end of a
    message, or -1; and `external`, the number that PyTorch gives an operator and all that it launches, or 0.

    Attributes:
        group: name of the process group of each, empty if unknown.
        names: the names of groups, each once.
        members: the members of each group as operations say them, such as `[0, 1]`; empty where these differ.
    """

    def __init__(self) -> None:
        super().__init__("op", "begin_ns", "end_ns", "seq", "size_bytes", "link", "peer", "external")
        self.group: list[str] = []
        self.names: dict[str, str] = {}
        self.members: dict[str, str] = {}

    def add_call(
        self,
        op: Op,
        begin_ns: int,
        end_ns: int,
        *,
        group: str = "",
        seq: int = -1,
        size_bytes: int = 0,
        link: int = 0,
        peer: int = -1,
        external: int = 0,
    ) -> None:
        """Add an operation."""
        self.add(int(op), begin_ns, end_ns, seq, size_bytes, link, peer, external)
        self.group.append(group)

    def group_name(self, name: Any) -> str:
        """Return what an operation calls its group, the same object for the same name; empty where it does not say.

        Raises:
            OverflowError: there are more groups than a trace can have.
        """
        name = name[: _MAX_GROUP_LETTERS + 1] if isinstance(name, str) else ""
        if name not in self.names and len(self.names) > MAX_GROUPS:
            raise OverflowError(f"more than {MAX_GROUPS} process groups")
        return self.names.setdefault(name, name)


@dataclass
class Profile:
    """What one file says.

    Attributes:
        path: the file.
        rank, world_size: from its `distributedInfo`, else rank from the file's name; None where neither says.
        is_rank_named: whether the rank is that of the file's name.
        backend, groups: of `distributedInfo`: names and members of process groups, else as operations say them.
        only_group: the name of the group where `distributedInfo` has one only; empty.
        host: of the file; empty if it does not say.
        base_ns: what its times count from, Unix nanoseconds; 0 if it does not say.
        steps: number, begin and end of each ProfilerStep.
        marks: phase, begin and end of annotations of the host.
        optimizer: begin and end of optimizer steps.
        backward: each function of the autograd engine.
        kernels: kernels and copies that are no collectives; `link` is their correlation.
        launches: of kernels; `link` is their correlation.
        nccl, gloo, c10d, comms: collectives: kernels of NCCL, operations of gloo, calls of c10d, and their parameters.
        unnamed: kernels of NCCL that do not say what they do; `link` and `external` as of `Calls`.
        num_nameless: kernels without any name.
        num_untimed: events left out because they have no begin or no duration, or a negative one.
    """

    path: Path
    rank: int | None = None
    world_size: int | None = None
    is_rank_named: bool = False
    backend: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    only_group: str = ""
    host: str = ""
    base_ns: int = 0
    problem: str = ""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    optimizer: list[tuple[int, int]] = field(default_factory=list)
    backward: Events = field(default_factory=lambda: Events("begin_ns", "end_ns"))
    kernels: Events = field(default_factory=lambda: Events("begin_ns", "end_ns", "link"))
    launches: Events = field(default_factory=lambda: Events("time_ns", "link"))
    nccl: Calls = field(default_factory=Calls)
    gloo: Calls = field(default_factory=Calls)
    c10d: Calls = field(default_factory=Calls)
    comms: Calls = field(default_factory=Calls)
    unnamed: Events = field(default_factory=lambda: Events("begin_ns", "end_ns", "link", "external"))
    num_untimed: int = 0
    num_nameless: int = 0

    def mark(self, phase: Phase, begin_ns: int, end_ns: int) -> None:
        """Add an annotation of a phase."""
        self.marks.append((int(phase), begin_ns, end_ns))
        if phase is Phase.OPTIMIZER:
            self.optimizer.append((begin_ns, end_ns))

    @property
    def memory_bytes(self) -> int:
        """Memory that the import of it takes at most."""
        num_rows = sum(map(len, (self.nccl, self.gloo, self.c10d, self.comms)))
        num_rows += len(self.steps) + len(self.marks) + len(self.optimizer)
        num_kernels = sum(map(len, (self.backward, self.kernels, self.launches, self.unnamed)))
        num_members = sum(len(members) for members in self.groups.values())
        return _ROW_BYTES * num_rows + _KERNEL_BYTES * num_kernels + _MEMBER_BYTES * num_members

    @property
    def has_device(self) -> bool:
        """Whether the rank used a device: kernels say so, or else a backend of devices that did nothing on the host."""
        backends = re.split("[:,]", self.backend)
        is_of_devices = any(name.endswith("ccl") and name != "ccl" for name in backends)  # "ccl" is that of hosts, too
        return self.has_kernels or len(self.unnamed) > 0 or (is_of_devices and not self.gloo)

    @property
    def shows_device(self) -> bool:
        """Whether what the device did is known, but for steps with kernels of `unnamed`, which may have been waits."""
        return self.has_kernels and self.has_launches and not self.num_nameless

    @property
    def has_kernels(self) -> bool:
        """Whether the device did anything."""
        return bool(self.kernels or self.nccl)

    @cached_property
    def has_launches(self) -> bool:
        """Whether most of what the device did was launched in the profile: else no mark of its host says when.

        The host may be far ahead; a few kernels without a launch are between others of their stream.
        """
        links = np.append(self.kernels.rows["link"], self.nccl.rows["link"])
        is_launched = np.isin(links[links != 0], self.launches.rows["link"])
        return bool(is_launched.sum() >= _MIN_LAUNCHED * len(links))


def device_notes(profiles: Collection[Profile]) -> Iterator[str]:
    """Yield what is not known of kernels, and why."""
    if num_unnamed := sum(len(one.unnamed) for one in profiles):
        yield (
            f"{plural(num_unnamed, 'kernel')} of NCCL left out: neither name, arguments nor a call of the host say what"
            " they do; what a device did in steps with them is not known"
        )
    if num_nameless := sum(one.num_nameless for one in profiles):
        yield f"{plural(num_nameless, 'kernel')} without a name: any of them may be a collective"
    if any(one.has_kernels and not one.has_launches for one in profiles):
        yield "launches of kernels are not in the files: it is not known in which phase or step a device worked"


def read_profile(
    file: InputFile, progress: Callable[[int, int], None] = lambda *_: None, *, max_bytes: int = FREE_BYTES
) -> Profile:
    """Read one profile.

    Args:
        file: JSON, packed by gzip or not.
        progress: takes how many bytes are read, of how many.
        max_bytes: the most memory that its import may take, see `Profile.memory_bytes`.

    Raises:
        TraceError: it cannot be read, is damaged before its first event, is no profile, or is too large.
    """
    path = file.path
    found = Profile(path=path)
    events = ChromeEvents(json_bytes(file, progress), path, KinetoEvent)
    for batch in events:
        try:
            _take(found, batch)
        except OverflowError as error:
            raise TraceError(f"{path} has {error}, which no profile has, near event {events.num_events}") from error
        _check_memory(found, max_bytes)
    if not events.num_events:
        raise TraceError(f"{path} holds no events: profile at least one step")
    untimed = f"{path}: {plural(found.num_untimed, 'event')} without a duration left out" if found.num_untimed else ""
    found.problem = "; ".join(filter(None, (events.problem, untimed)))
    _take_facts(found, events.facts)
    _check_memory(found, max_bytes)
    return found


def _check_memory(found: Profile, max_bytes: int) -> None:
    if found.memory_bytes > max_bytes:
        raise TraceError(
            f"{found.path} would take more than the {max_bytes >> 20} MiB of memory that are left for profiles of this"
            " size: profile fewer steps, or unpack the files if they are sound"
        )


def _take(found: Profile, batch: Iterable[Any]) -> None:
    """Take what is needed of some events."""
    take_of = {
        "cpu_op": _take_of_host,
        "kernel": _take_kernel,
        "gpu_memcpy": _take_work,
        "gpu_memset": _take_work,
        "cuda_runtime": _take_launch,
        "cuda_driver": _take_launch,
        "user_annotation": _take_annotation,
    }
    for event in batch:
        take = take_of.get(event.cat)
        if take is not None and event.ph == "X":
            try:
                take(found, event)
            except _UntimedError:
                found.num_untimed += 1


def _take_of_host(found: Profile, event: Any) -> None:
    name = event.name
    if name.startswith(_BACKWARD):
        found.backward.add(*_interval_ns(event))
    elif name == "record_param_comms":
        _take_call(found.comms, event, event.args.collective)
    elif name.startswith("c10d::"):
        _take_call(found.c10d, event, name[6:])


def _take_launch(found: Profile, event: Any) -> None:
    if "Launch" in event.name or "Mem" in event.name:
        found.launches.add(_interval_ns(event)[0], _whole(event.args.correlation))


def _take_work(found: Profile, event: Any) -> None:
    found.kernels.add(*_interval_ns(event), _whole(event.args.correlation))


def _take_kernel(found: Profile, event: Any) -> None:
    """Take a kernel; one of NCCL as what PyTorch called, else as what it is named after."""
    if not is_of_nccl(event.name):
        _take_work(found, event)
        return
    names = (event.args.collective, kernel_op(event.name))
    if not any(_take_call(found.nccl, event, name) for name in names):
        found.unnamed.add(*_interval_ns(event), _whole(event.args.correlation), _whole(event.args.external))


def _take_annotation(found: Profile, event: Any) -> None:
    name = event.name
    step = _STEP.match(name)
    if step:
        found.steps.append((int(step.group(1)), *_interval_ns(event)))
    elif name.startswith("gloo:"):
        _take_call(found.gloo, event, name[5:])
    elif (phase := phase_of(name)) is not None:
        found.mark(phase, *_interval_ns(event))


def _take_call(calls: Calls, event: Any, name: Any) -> bool:
    """Add an event that is the operation of this name; return whether there is such an operation."""
    op = op_of(name) if isinstance(name, str) else None
    if op is None:
        return False
    args = event.args
    group = calls.group_name(args.group)
    if isinstance(args.members, str):
        members = args.members if len(args.members) <= _MAX_MEMBERS_LETTERS and args.members.isascii() else ""
        if calls.members.setdefault(group, members) != members:
            calls.members[group] = ""
    peer = args.destination if op is Op.SEND else args.source if op is Op.RECV else args.root
    calls.add_call(
        op,
        *_interval_ns(event),
        group=group,
        seq=_whole(args.seq, -1),
        size_bytes=_size_bytes(op, args),
        link=_whole(args.correlation),
        peer=_whole(peer, -1),
        external=_whole(args.external),
    )
    return True


def _size_bytes(op: Op, args: Any) -> int:
    item = _ITEM_BYTES.get(args.dtype.lower().split("_")[0]) if isinstance(args.dtype, str) else None
    elements = args.elements_in if op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL) else args.elements_out
    count = _whole(elements, -1)
    return item * count if item and 0 <= count < 1 << 48 else 0


def _take_facts(found: Profile, facts: dict[str, Any]) -> None:
    info = info if isinstance(info := facts.get("distributedInfo"), dict) else {}
    rank, world_size = _rank(info.get("rank")), _rank(info.get("world_size"), MAX_RANKS)
    if rank is not None and (world_size is None or rank < world_size):
        found.rank, found.world_size = rank, world_size
    found.backend = _text(info.get("backend"))
    groups = info.get("pg_config")
    for one in groups if isinstance(groups, list) else ():
        members, name = (one.get("ranks"), one.get("pg_name")) if isinstance(one, dict) else (None, None)
        if isinstance(members, list) and members and all(_rank(member) is not None for member in members):
            found.groups[_text(name if isinstance(name, str) else str(_whole(name)), _MAX_GROUP_LETTERS)] = tuple(
                members
            )
    found.only_group = next(iter(found.groups)) if len(found.groups) == 1 else ""
    for name, text in (*found.nccl.members.items(), *found.comms.members.items()):
        if name and len(name) <= _MAX_GROUP_LETTERS and _MEMBERS.match(text):
            members = tuple(map(int, text[1:-1].split(",")))
            if max(members) < MAX_RANKS:
                found.groups.setdefault(name, members)
    found.host = _text(facts.get("host_name"))
    found.base_ns = base_ns if 0 <= (base_ns := _whole(facts.get("baseTimeNanoseconds"))) < _MAX_NS else 0
    if found.rank is None:
        named = _RANK.findall(found.path.name)
        if len(named) == 1 and int(named[0]) < MAX_RANKS:
            found.rank, found.is_rank_named = int(named[0]), True


def _text(value: Any, max_letters: int = 64) -> str:
    return printable(value[:max_letters]) if isinstance(value, str) else ""


def _rank(value: Any, most: int = MAX_RANKS - 1) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None


def _whole(value: Any, default: int = 0) -> int:
    if type(value) is int and abs(value) < 1 << 62:
        return value
    return int(value) if isinstance(value, str) and len(value) < 19 and value.isdecimal() else default


def _interval_ns(event: Any) -> tuple[int, int]:
    """Return when an event began and ended.

    Raises:
        _UntimedError: it does not say.
    """
    if event.ts < 0 or event.dur < 0:
        raise _UntimedError
    return _ns(event.ts), _ns(event.ts + event.dur)


def _ns(time_us: float) -> int:
    if not time_us * 1000 < _MAX_NS:
        raise OverflowError(f"a time of {time_us:g} us")
    return round(time_us * 1000)
