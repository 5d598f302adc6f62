"""NCCL's logs as facts of its processes, read as a stream, and what single messages of NCCL say.

The formats are those of the INFO and WARN calls of NCCL 2.4 to 2.28 and of RCCL; versions differ in spaces and names.
"""

from __future__ import annotations

import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path

from hpcpace.core.errors import UsageError, with_reasons
from hpcpace.core.log_text import MAX_LINE_BYTES, log_lines, without_colours
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import plural, printable

_MAX_FILES, _MAX_PROCESSES = 16_384, 16_384
_MAX_VALUES = 32  # memory: different values of one topic in one process
_MAX_EDGES = 200_000
_MAX_STRAY_LINES = 3
_MAX_EVIDENCE = 240


@dataclass(slots=True)
class Seen:
    """The first line that says something, and how many do."""

    evidence: str
    count: int = 1


@dataclass(kw_only=True, slots=True)
class LogProcess:
    """One process that has written to a log.

    Attributes:
        host, pid: where it ran; an empty host and pid 0 for lines that name none.
        device: its CUDA device, -1 where unknown.
        rank, num_ranks: of its largest communicator; -1 and 0 where unknown.
        comm: id of that communicator; empty where the version prints none.
        num_nodes: of that communicator; 0 where unknown.
        start: which start of the job it belongs to, from 0.
        num_lines: lines that it has written.
        seen: by topic and value.
        via: number of its connections by transport, like `NET/IB/0/GDRDMA` or `NET/IB/0 [send]`, and the first line of
            each.
    """

    host: str
    pid: int
    device: int = -1
    rank: int = -1
    num_ranks: int = 0
    comm: str = ""
    num_nodes: int = 0
    start: int = 0
    num_lines: int = 0
    seen: dict[Topic, dict[str, Seen]] = field(default_factory=dict)
    via: dict[str, Seen] = field(default_factory=dict)

    def note(self, topic: Topic, value: str, evidence: object) -> None:
        """Keep that a line said something; beyond a bound only known values are counted."""
        _count(self.seen.setdefault(topic, {}), value, evidence)

    def values(self, topic: Topic) -> dict[str, Seen]:
        """Return what was said on a topic."""
        return self.seen.get(topic, {})

    def variable(self, name: str) -> str:
        """Return the value of an environment variable that NCCL read; empty if it said nothing of it."""
        found = (value.partition("=")[2] for value in self.values(Topic.VARIABLE) if value.startswith(f"{name}="))
        return next(found, "")

    @property
    def network(self) -> str:
        """The network that it chose; NCCL before 2.8 says only which devices it found."""
        named = list(self.values(Topic.NETWORK))
        if named:
            return named[-1]
        return "IB" if self.values(Topic.RDMA) else "Socket" if self.values(Topic.SOCKETS) else ""


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """What some logs say together.

    Attributes:
        edges: (sender, receiver, transport) of the connections of the largest communicators, each once, with transports
            like `P2P/CUMEM`, `SHM/direct/direct`, `NET/IB/0/GDRDMA`.
        processes: those that wrote to the logs.
        problems: one sentence for each thing that could not be read.
        has_info: whether they have more than warnings.
    """

    edges: frozenset[tuple[int, int, str]]
    processes: tuple[LogProcess, ...] = ()
    problems: tuple[str, ...] = ()
    has_info: bool = True

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in the order of the logs."""
        return tuple(dict.fromkeys(process.host for process in self.processes if process.host))

    @cached_property
    def num_ranks(self) -> int:
        """Number of processes with a rank, in the largest of the starts."""
        ranks: dict[int, set[int]] = {}
        for process in self.processes:  # of some, lines of torch are known as well
            ranks.setdefault(process.start, set()).update({process.rank} - {-1})
        return max(map(len, ranks.values()), default=0)

    @cached_property
    def num_starts(self) -> int:
        """Number of starts of a job."""
        return 1 + max((process.start for process in self.processes), default=0)

    def start_text(self, start: int) -> str:
        """Return which start this is; empty if the logs have one only."""
        return f"start {start + 1} of {self.num_starts}" if self.num_starts > 1 else ""

    def of_start(self, start: int) -> list[LogProcess]:
        """Return the processes of one start that name their host."""
        return [process for process in self.processes if process.start == start and process.host]

    def has_many_hosts(self, start: int) -> bool | None:
        """Return whether a start spans hosts; None where its log does not say."""
        own = self.of_start(start)
        # Without ranks, these may be lines of several jobs, each on one host.
        if len({process.host for process in own if process.rank >= 0}) > 1 or any(
            process.num_nodes > 1 for process in own
        ):
            return True
        ranks = {process.rank for process in own if process.rank >= 0}
        size = max((process.num_ranks for process in own), default=0)
        if any(process.num_nodes == 1 for process in own) or (size and len(ranks) == size):
            return False
        return True if any(name.startswith("NET/") for process in own for name in process.via) else None

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the last start that has it; empty where unknown."""
        return self._host_of.get(rank, "")

    @cached_property
    def _host_of(self) -> dict[int, str]:
        return {process.rank: process.host for process in self.processes if process.rank >= 0 and process.host}


def read_nccl_log(*paths: Path) -> NcclLog:
    """Return what NCCL says in some logs, files or folders of files, plain or gzip, in any Unicode encoding.

    Raises:
        UsageError: none can be read, or none has lines of NCCL.
    """
    reader, problems = _Reader(), []
    for path, is_named in _log_files(paths):
        before, bare, name = reader.num_lines, reader.num_bare, path.name
        try:
            for number, line in log_lines(path):
                reader.read(line, name, number)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.append(f"cannot read the NCCL log {path}: {printable(reason)}")
        else:
            if is_named and reader.num_lines == before:
                problems.append(_without_lines(path, reader.num_bare - bare))
    if not reader.num_lines:
        raise UsageError(
            with_reasons(problems[0], problems[1:])
            if problems
            else f"no file in {paths[0]} has a line of NCCL: run the job with NCCL_DEBUG=INFO"
        )
    if reader.num_bare > _MAX_STRAY_LINES:
        problems.append(f"{plural(reader.num_bare, 'line')} of NCCL left out: {_BARE}")
    if reader.num_left_out:
        problems.append(f"{plural(reader.num_left_out, 'line')} of further processes or connections left out: too many")
    processes = _without_cut_names(reader.processes.values())
    _number_starts(processes)
    return NcclLog(
        edges=frozenset(reader.edges), processes=processes, problems=tuple(problems), has_info=reader.has_info
    )


_BARE = "without host:pid:thread [device] in front, it is not known of which process they are"


def _without_lines(path: Path, num_bare: int) -> str:
    """Return why nothing was taken from a file."""
    if num_bare:
        return f"{path} has {plural(num_bare, 'line')} of NCCL, but {_BARE}"
    return f"{path} has no line of NCCL: run the job with NCCL_DEBUG=INFO"


def _log_files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Return the files at some paths, and whether they are named themselves; those of a folder are sorted by name.

    Raises:
        UsageError: a path does not exist, or is neither a folder nor something to read.
    """
    found: dict[Path, bool] = {}
    for path in paths:
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                entries = sorted(entry for entry in path.iterdir() if entry.is_file())[:_MAX_FILES]
                found = dict.fromkeys(entries, False) | found
                continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot read the NCCL log {path}: {reason}") from error
        found[path] = True
    return list(found.items())


# host:pid:thread [device] [time] file:line NCCL INFO; since 2.24 a time may stand before the host of a warning.
_PREFIX = re.compile(
    rb"(?<![A-Za-z0-9_.\-])([A-Za-z0-9_.\-]{1,255}):(\d{1,10}):(\d{1,10}) \[(-?\d{1,4})\] "
    rb"(?:\S{1,200} ){0,2}?NCCL (INFO|WARN|TRACE) "
)
_TORCH_TIMEOUT = re.compile(
    rb"\[(?:PG .{0,80}?)?[Rr]ank (\d{1,7})\] (?:Watchdog caught|Found) collective operation timeout: "
    rb"WorkNCCL\((.{0,300}?)\) ran for (\d{1,12}) milliseconds"
)
_OPERATION = re.compile(rb"SeqNum=(\d{1,19}), OpType=([A-Z_]{1,40})")


class _Reader:
    """What the lines read so far say."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LogProcess] = {}
        self.edges: dict[tuple[int, int, str], None] = {}
        self.num_lines = 0
        self.num_left_out = 0
        self.num_bare = 0
        self.has_info = False
        self._sizes: dict[tuple[str, int, int], int] = {}  # ranks of the communicator that a thread works on

    def read(self, line: bytes, name: str, number: int) -> None:
        """Take one line, which may hold those of several processes."""
        if b"NCCL" not in line:
            return
        line = without_colours(line)
        prefixes = list(_PREFIX.finditer(line))
        if not prefixes:
            self._read_torch(line, name, number)
            return
        self.num_lines += 1
        ends = [found.start() for found in prefixes[1:]] + [len(line)]
        for found, end in zip(prefixes, ends, strict=True):
            message = line[found.end() : end].strip()
            key = found[1].decode("ascii"), int(found[2])
            process = self.processes.get(key)
            if process is None:
                if len(self.processes) >= _MAX_PROCESSES:
                    self.num_left_out += 1
                    continue
                process = self.processes[key] = LogProcess(host=key[0], pid=key[1])
            process.num_lines += 1
            self.has_info = self.has_info or found[5] != b"WARN"
            if process.device < 0:
                process.device = int(found[4])
            evidence = _Evidence(name, number, line[found.start() : end])
            is_whole = line[:end].endswith(b"\n")
            self._message(process, int(found[3]), message, evidence, is_warning=found[5] == b"WARN", is_whole=is_whole)

    def _read_torch(self, line: bytes, name: str, number: int) -> None:
        found = _TORCH_TIMEOUT.search(line)
        if not found:
            self.num_bare += b" NCCL INFO " in line or b" NCCL WARN " in line
            return
        self.num_lines += 1
        rank, operation = int(found[1]), _OPERATION.search(found[2])
        what = f" {operation[2].decode()} {operation[1].decode()}" if operation else ""
        process = self.processes.setdefault(("", -1 - rank), LogProcess(host="", pid=0, rank=rank))
        text = f"timeout{what} after {int(found[3]) // 1000} s"
        process.note(Topic.ERROR, text, _Evidence(name, number, line))

    def _message(
        self, process: LogProcess, thread: int, message: bytes, evidence: _Evidence, *, is_warning: bool, is_whole: bool
    ) -> None:
        word = message.partition(b" ")[0].rstrip(b":")
        if word in (b"Channel", b"Ring"):
            if is_whole:
                self._connection(process, thread, message, evidence)
        elif b"rank " in message and (found := _COMM.search(message)):
            self._communicator(process, thread, found)
        else:
            for topic, value in facts_of(word, message, is_warning=is_warning):
                if is_whole or topic not in TO_THE_END:
                    process.note(topic, value, evidence)

    def _communicator(self, process: LogProcess, thread: int, found: re.Match[bytes]) -> None:
        rank, size = int(found[1]), int(found[2])
        self._sizes[process.host, process.pid, thread] = size
        if len(self._sizes) > 4 * _MAX_PROCESSES:
            self._sizes.clear()
        if size >= process.num_ranks:
            comm = (found[4] or b"").decode("ascii")
            process.comm = comm if size > process.num_ranks else process.comm or comm
            process.rank, process.num_ranks = rank, size
            process.num_nodes = int(found[3]) if found[3] else process.num_nodes

    def _connection(self, process: LogProcess, thread: int, message: bytes, evidence: _Evidence) -> None:
        if counted := _RING.match(message):
            process.note(Topic.CHANNELS, str(int(counted[1])), evidence)
            return
        found = _EDGE.match(message)
        if not found:
            return
        transport = printable(found[4].decode("utf-8", "replace")).strip()
        if transport == "direct shared memory":  # before 2.19
            transport = "SHM/direct/direct"
        # Sending GPUs read without GPUDirect more often than receiving ones write: NCCL_NET_GDR_READ.
        _count(process.via, f"{transport} [send]" if found[3] else transport, evidence)
        size = self._sizes.get((process.host, process.pid, thread)) or process.num_ranks
        if size == process.num_ranks:  # ranks of smaller communicators are others
            edge = int(found[1]), int(found[2]), transport
            if len(self.edges) < _MAX_EDGES or edge in self.edges:
                self.edges[edge] = None
            else:
                self.num_left_out += 1


class _Evidence:
    """A line as a finding cites it, made only if it is: with its file and number, without secrets."""

    def __init__(self, name: str, number: int, line: bytes) -> None:
        self._parts = name, number, line

    def __str__(self) -> str:
        name, number, line = self._parts
        text = Redaction().text(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))
        return f"{printable(name)[:60]}:{number}: {printable(' '.join(text.split()))[:_MAX_EVIDENCE]}"


def _count(values: dict[str, Seen], value: str, evidence: object) -> None:
    known = values.get(value)
    if known is not None:
        known.count += 1
    elif len(values) < _MAX_VALUES:
        values[value] = Seen(str(evidence))


_COMM = re.compile(
    rb"comm 0x[0-9a-f]{1,16} rank (\d{1,7}) n[rR]anks (\d{1,7}) (?:nNodes (\d{1,6}) )?"
    rb"(?:.{0,120}?commId (0x[0-9a-f]{1,16}))?"
)
_RING = re.compile(rb"(?:Channel|Ring) \d{1,3}/(\d{1,3}) :(?: +\d{1,7})+\s*$")
_EDGE = re.compile(
    rb"(?:Channel|Ring) \d{1,3}(?:/\d{1,3})? : (\d{1,7})(?:\[[0-9a-fx]+\])? -> (\d{1,7})(?:\[[0-9a-fx]+\])? "
    rb"(?:(\[send\] )|\[receive\] )?via (direct shared memory|[A-Za-z0-9/_][A-Za-z0-9/_().\- ]{0,80}?)"
    rb"(?: comm 0x.*| *\[.*|\s*)$"
)


def _without_cut_names(processes: Iterable[LogProcess]) -> tuple[LogProcess, ...]:
    """Return processes without those of a few lines whose host is another one's, cut or with other text before it.

    What these lines say goes to that one.
    """
    kept = list(processes)
    by_pid: dict[int, list[LogProcess]] = {}
    for process in kept:
        by_pid.setdefault(process.pid, []).append(process)
    for alike in by_pid.values():
        for process in alike:
            if process.num_lines > _MAX_STRAY_LINES or not process.host:
                continue
            whole = next((one for one in alike if _is_end(one, process)), None)
            if whole is not None:
                for topic, values in process.seen.items():
                    for value, seen in values.items():
                        whole.note(topic, value, seen.evidence)
                process.host = ""
    return tuple(process for process in kept if process.host or process.pid == 0)


def _is_end(whole: LogProcess, part: LogProcess) -> bool:
    """Return whether one of two names of hosts is the end of the other, and the first has written more."""
    if whole.host == part.host or not whole.host or whole.num_lines <= part.num_lines:
        return False
    return whole.host.endswith(part.host) or part.host.endswith(whole.host)


def _number_starts(processes: Iterable[LogProcess]) -> None:
    """Number the starts of jobs: by the id of their communicator, else each rank that comes again begins another."""
    by_comm: dict[str, int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    latest = 0
    for process in processes:
        if process.comm:
            process.start = by_comm.setdefault(process.comm, len(by_comm))
        elif process.rank >= 0 and process.host:
            process.start = counts[process.rank, process.num_ranks]
            counts[process.rank, process.num_ranks] += 1
        else:
            process.start = latest
        latest = process.start


class Topic(StrEnum):
    """What a line of NCCL's log is about; the value that is kept with it is in the comment."""

    NETWORK = "network"  # "IB", "Socket", the name of a plugin
    SOCKETS = "sockets"  # "[0]eth0:10.0.0.1<0>"
    BOOTSTRAP = "bootstrap"  # "eth0:10.0.0.1<0>"
    RDMA = "RDMA devices"  # "[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE"
    NO_RDMA = "no RDMA device"
    NO_VERBS = "no libibverbs"
    PLUGIN = "plugin"  # what the plugin says of its failure
    NO_PLUGIN = "no plugin"  # "libnccl-net.so"
    VARIABLE = "variable"  # "NCCL_IB_DISABLE=1"
    AFFINITY = "affinity"  # "GPU 1 000f": its CPUs, as a mask or, since 2.27, a list
    GDR_ON = "GPUDirect RDMA"
    GDR_OFF = "no GPUDirect RDMA"  # "HCA 0 'mlx5_0' (no module)"
    P2P_OFF = "no P2P"
    PATTERN = "pattern"  # "NVL/PIX": types of the paths between GPUs, and to adapters
    NIC_PATH = "path"  # "GPU/B000 SYS": the best path of a GPU to an adapter
    CHANNELS = "channels"  # "2"
    SPEED = "speed"  # "mlx5_0 1/IB 100000": port, and its rate in Mb/s
    TOPOLOGY = "topology"
    SETTING = "system setting"  # what RCCL says of the kernel
    RETRY = "retry"
    ERROR = "error"
    WARNING = "other warning"


_T = Topic
# By the first word of a message, so that a log of TRACE passes quickly; the first that fits counts.
_PATTERNS = {
    b"Using": ((_T.NETWORK, rb"Using network (.{1,60})"),),
    b"NET/Socket": (
        (_T.SOCKETS, rb"NET/Socket ?: Using (\[0\].{1,300})"),
        (_T.ERROR, rb"NET/Socket ?: (No usable listening interface found)"),
    ),
    b"Net": ((_T.ERROR, rb"Net ?: (No interface found in the same subnet as remote address \S{1,80})"),),
    b"socketStartConnect": ((_T.ERROR, rb"socketStartConnect: (Connect to \S{1,80} failed ?: .{1,80})"),),
    b"Connect": ((_T.ERROR, rb"(Connect to \S{1,80} failed ?: .{1,80})"),),
    b"Bootstrap": (
        (_T.ERROR, rb"Bootstrap ?: (no socket interface found)"),
        (_T.BOOTSTRAP, rb"Bootstrap ?: Using (?:\[0\])?(.{1,100})"),
    ),
    b"NET/IB": (
        (_T.NO_RDMA, rb"NET/IB ?: (No device found)"),
        (_T.RDMA, rb"NET/IB ?: Using (\[0\].{1,400}?)(?: \[RO\])?(?: ?; ?OOB.*)?$"),
        (_T.SPEED, rb"NET/IB ?: \[\d+\] ([\w.\-]+):(?:[\w.\-]+:)?(\d+/\w+) .{0,80}?speed=(\d{1,8}) "),
        (_T.ERROR, rb"NET/IB ?: (?:\S+ )?(?:Got )?(async (?:error |fatal )?event.{0,120})"),
        (_T.ERROR, rb"NET/IB ?: (collective mismatch)"),
        (_T.ERROR, rb"NET/IB ?: Got (completion )(?:from peer \S+ )?with (?:error |status=)(\d{1,3})[ ,]"),
    ),
    b"GPU": ((_T.GDR_OFF, rb"GPU Direct RDMA Disabled for (.{1,120})"),),
    b"Failed": (
        (_T.NO_VERBS, rb"Failed to open (libibverbs)"),
        (_T.PLUGIN, rb"(Failed to initialize any NET plugin)"),
    ),
    b"NET/Plugin": ((_T.NO_PLUGIN, rb"(?:Could not find ?: ?|No plugin found \()([\w./\-]+)"),),
    b"External": ((_T.PLUGIN, rb"(External network plugin .{1,120} is unsupported)"),),
    b"NET/OFI": ((_T.PLUGIN, rb"NET/OFI .{0,80}?((?:No eligible|Unable to|failed|initialization failed).+)"),),
    b"Setting": ((_T.AFFINITY, rb"Setting affinity for (GPU \d{1,4}) to ([0-9a-fA-F,\-]+)\s*$"),),
    b"Pattern": ((_T.PATTERN, rb"Pattern .{0,160}type (\w{2,4}/\w{2,4})"),),
    b"P2P": ((_T.P2P_OFF, rb"(P2P is disabled between .{0,20}connected GPUs \d+ and \d+)"),),
    b"Missing": ((_T.SETTING, rb'Missing "?(iommu=pt)'),),
    b"NUMA": ((_T.SETTING, rb"(NUMA auto balancing) enabled"),),
    b"Topology": ((_T.TOPOLOGY, rb"(Topology detection ?: could not read .+, using empty affinity)"),),
    b"XML": ((_T.TOPOLOGY, rb"(XML (?:Topology|Parse|Mismatch|Import).{1,200})"),),
    b"Attribute": ((_T.TOPOLOGY, rb"(Attribute \S+ of node \S+ not found)"),),
    b"Set": ((_T.TOPOLOGY, rb"(Set CPU affinity : unable to find GPU/CPU)"),),
    b"Could": (
        (_T.P2P_OFF, rb"(Could not enable P2P between dev \d+)\(\S+ (and dev \d+)"),
        (_T.TOPOLOGY, rb"(Could not (?:open XML topology file|find real path of) .{1,200})"),
    ),
    b"Mismatched": (
        (_T.ERROR, rb"(Mismatched NCCL version)"),
        (_T.ERROR, rb"Mismatched (collective) detected.{0,80}? (around rank \d{1,7})"),
    ),
    b"Your": ((_T.ERROR, rb"Your program may be hanging.{0,40}(collective mismatch around rank \d{1,7})"),),
    b"Duplicate": ((_T.ERROR, rb"(Duplicate GPU detected)"),),
    b"Error": ((_T.ERROR, rb"Error: (failed to (?:extend|create shared memory)|Could not map)"),),
    b"Cuda": ((_T.ERROR, rb"(Cuda failure.{1,80})"),),
    b"Timeout": ((_T.ERROR, rb"(Timeout waiting.{0,80})"),),
}
_BY_WORD = {word: [(topic, re.compile(pattern)) for topic, pattern in patterns] for word, patterns in _PATTERNS.items()}
TO_THE_END = frozenset((_T.AFFINITY, _T.VARIABLE, _T.CHANNELS, _T.SPEED, _T.PATTERN, _T.NIC_PATH))
"""Topics whose value would be another one if the end of its line were missing."""

_GDR = re.compile(rb"NET/(?!Socket)[^:]{1,40} : GPU Direct RDMA (?:\([\w\-]+\) )?([Dd]is|[Ee]n)abled for (.{1,120})")
_SET = re.compile(rb"(NCCL_[A-Z0-9_]{1,60}) set (?:by environment )?to (.{0,200}?)\.?\s*$")
_PATH = re.compile(rb"NET/[^ ]{1,20} \([0-9.]+/[0-9.]+/([A-Z0-9]{2,4})\)")
_COLL_CHANNELS = re.compile(rb"(\d{1,4}) coll channels")
_RETRY = re.compile(rb"((?:Call to \w+|\w+: connect to \S+|ncclSocket\w+).{0,160}?), retrying")
_FAILED_CALL = re.compile(
    rb"(Call to (?:ibv_\w+ failed(?: with (?:error )?[^,]{1,60})?|\w+ (?:from \S+ )?failed)|"
    rb"\w*[cC]onnection closed by remote peer|(?:Net|Call).*timed? ?out)"
)
_NEARNESS = (b"LOC", b"NVL", b"C2C", b"PIX", b"PXB", b"PXN", b"P2C", b"PHB", b"NODE", b"SYS")


def facts_of(word: bytes, message: bytes, *, is_warning: bool) -> Iterator[tuple[Topic, str]]:
    """Yield what a message says."""
    for topic, pattern in _BY_WORD.get(word, ()):
        if found := pattern.search(message):
            yield topic, _text(found.groups())
            return
    if word.startswith(b"NET/") and (found := _GDR.match(message)):
        yield (_T.GDR_ON if found[1].lower() == b"en" else _T.GDR_OFF), _text(found.groups()[1:])
    elif word.startswith(b"NCCL_") and (found := _SET.match(message)):
        name = found[1].decode("ascii")
        value = Redaction().variables({name: found[2].decode("utf-8", "replace")})[name]
        yield _T.VARIABLE, printable(f"{name}={value}")
    elif word.startswith(b"GPU/"):
        paths = [path for path in _PATH.findall(message) if path in _NEARNESS]
        if paths:
            yield _T.NIC_PATH, f"{_text((word,))} {min(paths, key=_NEARNESS.index).decode()}"
    elif word.isdigit() and (found := _COLL_CHANNELS.match(message)):
        yield _T.CHANNELS, str(int(found[1]))
    elif found := _RETRY.search(message):
        yield _T.RETRY, _text(found.groups())
    elif is_warning:
        found = _FAILED_CALL.search(message)
        yield (_T.ERROR, _text(found.groups())) if found else (_T.WARNING, _text((message[:160],)))


@lru_cache(maxsize=4096)
def _text(groups: tuple[bytes | None, ...]) -> str:
    words = (part.decode("utf-8", "replace").strip() for part in groups if part)
    return printable(Redaction().text(" ".join(words)))[:400]
