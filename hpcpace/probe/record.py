"""A saved probe: what `hpcpace probe` measured, as frozen dataclasses and as a file of JSON.

docs/probe.md describes the file. A reader refuses what is no probe, is cut off, or has another version; times are
nanoseconds, sizes bytes, rates bytes per second.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import hpcpace
from hpcpace.core.codec import MIN_VALUE_BYTES, WrongValue, check_values, convert, parse_json, plain
from hpcpace.core.errors import ProbeError
from hpcpace.core.files import read_file
from hpcpace.core.records import dataclass
from hpcpace.core.text import printable, shown


@dataclass(frozen=True, kw_only=True)
class MemoryRate:
    """How fast the cores of one NUMA node copy within its memory.

    Attributes:
        host: its name.
        numa_node: number of the node, as Linux counts.
        num_threads: cores that copied at once, one thread each.
        rate: read and written together, as STREAM's copy counts, bytes per second.
    """

    host: str
    numa_node: int
    num_threads: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class DeviceRate:
    """How fast a device copies from and to the memory of one NUMA node.

    Attributes:
        host: its name.
        device: number of the device, as the rank sees it.
        bus_id: its PCI address; empty if unknown.
        numa_node: node whose memory it copies from and to.
        is_pinned: whether that memory is pinned.
        to_device, from_device: bytes per second.
        limit: of its PCIe link, bytes per second; None if unknown.
    """

    host: str
    device: int
    bus_id: str
    numa_node: int
    is_pinned: bool
    to_device: float
    from_device: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class CopiesRecord:
    """Rates of copies on all hosts.

    Attributes:
        memory: by host and NUMA node.
        devices: by host, device, NUMA node, pinned first.
        notes: what was not measured, and why.
    """

    memory: tuple[MemoryRate, ...] = ()
    devices: tuple[DeviceRate, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CoreFigures:
    """What kept one core from its work.

    Attributes:
        share: part of the time that detours cost.
        longest_ns: what the longest detour cost.
        num_detours: how many there were.
        quantum_ns: usual time of a piece of work.
        resolution_ns: shortest detour that shows.
        span_ns: time measured.
        period_ns: distance of detours that recur; None if they do not.
        period_share: part of the time that these cost; None likewise.
    """

    share: float
    longest_ns: float
    num_detours: int
    quantum_ns: float
    resolution_ns: float
    span_ns: int
    period_ns: float | None
    period_share: float | None


@dataclass(frozen=True, kw_only=True)
class CoreNoise:
    """The noise of one core of a host.

    Attributes:
        host: its name.
        cpu: number of the core, as Linux counts.
        figures: what was found.
    """

    host: str
    cpu: int
    figures: CoreFigures


@dataclass(frozen=True, kw_only=True)
class NoiseRecord:
    """The noise of all cores that the ranks may use.

    Attributes:
        cores: in the order of hosts and cores.
        notes: what has to be known to read them, such as that hosts share a machine.
    """

    cores: tuple[CoreNoise, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """Two hosts in one round.

    Attributes:
        first, second: names of the hosts.
        is_apart: whether no other pair of the round shared a link with them.
        forward: rate of data from the first to the second host, bytes per second; None if not measured.
        backward: rate from the second to the first host.
        least_ns, p50_ns, p99_ns: half round trips of 8 bytes; None if not measured.
        problem: why something was not measured; empty if all was.
    """

    first: str
    second: str
    is_apart: bool
    forward: float | None
    backward: float | None
    least_ns: float | None = None
    p50_ns: float | None = None
    p99_ns: float | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class BisectionRow:
    """What the hosts of one leaf switch sent to those of another one, all at once.

    Attributes:
        source, target: names of the leaf switches.
        num_pairs: pairs of hosts.
        rate: of all pairs together, bytes per second.
        possible: what the links of these hosts allow, by what they reached alone, bytes per second.
    """

    source: str
    target: str
    num_pairs: int
    rate: float
    possible: float


@dataclass(frozen=True, kw_only=True)
class LinkFinding:
    """A slow link, or links of which one is slow.

    Attributes:
        kind: `link` if it is this one, `unclear` if it is one of `names`, `between` if it is neither host's link but
            something between the two.
        names: hosts, or uplinks as `leaf2 uplink`.
        way: `sends`, `receives` or `both`; of a pair, `sends` means from the first to the second.
        measure: `rate`, `bisection` (a rate of many hosts together) or `latency`.
        value: what it reaches, bytes per second or nanoseconds.
        usual: what its kind usually reaches.
        words: all of this in a sentence.
    """

    kind: str
    names: tuple[str, ...]
    way: str
    measure: str
    value: float
    usual: float
    words: str


@dataclass(frozen=True, kw_only=True)
class PairsRecord:
    """What the pairs of hosts reached.

    Attributes:
        carrier: what carried the data, such as `TCP over eth0`.
        usual: what a host's link usually reaches, bytes per second; None if nothing was measured.
        usual_of_limit: that by what the hosts' interfaces allow; None if they do not say.
        usual_latency_ns: the usual least half round trip; None if nothing was measured.
        rows: in the order measured.
        bisections: sums over uplinks; empty where the network is unknown.
        findings: slow links, certain ones first.
        note: why nothing, or not everything, could be said; empty otherwise.
    """

    carrier: str
    usual: float | None = None
    usual_of_limit: float | None = None
    usual_latency_ns: float | None = None
    rows: tuple[PairRow, ...] = ()
    bisections: tuple[BisectionRow, ...] = ()
    findings: tuple[LinkFinding, ...] = ()
    note: str = ""


SCHEMA = "hpcpace-probe/1"
MAX_BYTES = 1 << 26
MAX_PIECES = 6
"""Pieces of a law."""
MIN_TIME_NS = 1.0
"""Shortest time of an operation."""
_FAMILY = SCHEMA.partition("/")[0] + "/"


@dataclass(frozen=True, kw_only=True)
class ProbedHost:
    """One host, and what its hardware allows by the audit's facts.

    Attributes:
        name: its name; hosts with the same name have a number behind it.
        topology_addr: Slurm's address of it in the network; empty if unknown.
        ranks: ranks of the probe on it.
        interfaces: network interfaces or RDMA ports that carry the probe, such as `eth0` or `mlx5_0/1`.
        line_rate: of all these interfaces together, bytes per second; None if the kernel does not say.
        pcie_rate: of the PCIe links of their adapters together, bytes per second; None if there are none or unknown.
        rate_words: where the line rate comes from, such as `2 x 200 Gb/s`; why it is unknown otherwise.
    """

    name: str
    topology_addr: str
    ranks: tuple[int, ...]
    interfaces: tuple[str, ...]
    line_rate: float | None
    pcie_rate: float | None
    rate_words: str

    @property
    def limit(self) -> float | None:
        """The lower one of line rate and PCIe rate, bytes per second; None if the line rate is unknown."""
        if self.line_rate is None:
            return None
        return min(self.line_rate, self.line_rate if self.pcie_rate is None else self.pcie_rate)


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One operation of one size on some of the hosts.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, or send_recv: each rank sends to the next one
            and receives from the one before.
        num_nodes: hosts that took part, the first ones.
        num_ranks: ranks that took part, all of these hosts.
        size_bytes: as nccl-tests count it: of all_gather what each rank has afterwards, of reduce_scatter before, of
            all_to_all what each rank sends, its own part included.
        num_repetitions: measured ones.
        p50_ns, p95_ns, p99_ns: quantiles of the time of an operation, the mean over ranks, over all repetitions.
        rounds_ns: the median of each round through the sweep; rounds are apart in time.
        algbw: size_bytes per p50_ns, bytes per second.
        busbw: algbw times what the operation's algorithm moves over the slowest link (nccl-tests, PERFORMANCE.md).
        limit: the busbw that the hosts' interfaces allow; None if unknown, or between ranks of one host.
    """

    op: str
    num_nodes: int
    num_ranks: int
    size_bytes: int
    num_repetitions: int
    p50_ns: float
    p95_ns: float
    p99_ns: float
    rounds_ns: tuple[float, ...]
    algbw: float
    busbw: float
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class LawPiece:
    """One piece of a law: time = latency_ns + ns_per_byte * size, for sizes of at least from_bytes.

    Attributes:
        from_bytes: the switch point; 0 for the first piece.
        from_low_bytes, from_high_bytes: its 95 % interval.
        latency_ns: with its 95 % interval, latency_low_ns and latency_high_ns.
        ns_per_byte: with its 95 % interval, ns_per_byte_low and ns_per_byte_high.
    """

    from_bytes: float
    from_low_bytes: float
    from_high_bytes: float
    latency_ns: float
    latency_low_ns: float
    latency_high_ns: float
    ns_per_byte: float
    ns_per_byte_low: float
    ns_per_byte_high: float


@dataclass(frozen=True, kw_only=True)
class LatencyLaw:
    """How the time of an operation grows with its size.

    Attributes:
        op, num_nodes, num_ranks: as in `SweepRow`.
        pieces: in ascending order of size, at least one.
        least_bytes, most_bytes: the sizes that it was fitted to.
        least_error, most_error: its relative errors, fitted minus measured over measured, the lowest and highest.
        single_least_error, single_most_error: those of one latency and one rate for all sizes.
    """

    op: str
    num_nodes: int
    num_ranks: int
    pieces: tuple[LawPiece, ...]
    least_bytes: int
    most_bytes: int
    least_error: float
    most_error: float
    single_least_error: float
    single_most_error: float

    def time_ns(self, size_bytes: float) -> float:
        """Return the time of an operation of a size, nanoseconds."""
        piece = [one for one in self.pieces if one.from_bytes <= size_bytes][-1]
        # Sizes below the fitted ones could take less than nothing.
        return max(piece.latency_ns + piece.ns_per_byte * size_bytes, MIN_TIME_NS)


@dataclass(frozen=True, kw_only=True)
class RankSkew:
    """What a rank adds by itself between two operations, apart from all waiting.

    Attributes:
        rank: its number.
        host: its host.
        mean_ns: mean time from the end of an operation to the begin of the next one, minus the median over all ranks.
        p99_ns: its 99 % quantile, minus the same median.
    """

    rank: int
    host: str
    mean_ns: float
    p99_ns: float


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """What one call of `hpcpace probe` found.

    Attributes:
        schema: `hpcpace-probe/1`.
        versions: of hpcpace, Python, torch, NCCL.
        cluster: Slurm's name of the cluster; empty if unknown.
        job_id: Slurm's job; empty outside.
        started_unix_ns: when it began.
        device: `cpu` or `cuda`.
        device_name: such as `NVIDIA H100 80GB HBM3`; empty for CPUs.
        backend: `gloo` or `nccl`.
        time_s: the time that was allowed.
        took_s: the time that it took, from the first measurement to the last.
        part_s: of it, each part's.
        hosts: in the order of their first rank.
        sweep: rows in the order op, num_nodes, size_bytes.
        laws: one for each op and num_nodes with enough sizes.
        skews: one for each rank.
        pairs: what pairs of hosts reached; None if not measured.
        noise: what kept cores from their work; None if not measured.
        copies: rates of copies in memory and to devices; None if not measured.
        problems: what was not measured, and why, a sentence each.
        lost_hosts: hosts that stopped answering.
    """

    schema: str = SCHEMA
    versions: dict[str, str]
    cluster: str
    job_id: str
    started_unix_ns: int
    device: str
    device_name: str
    backend: str
    time_s: float
    took_s: float = 0.0
    part_s: dict[str, float]
    hosts: tuple[ProbedHost, ...]
    sweep: tuple[SweepRow, ...] = ()
    laws: tuple[LatencyLaw, ...] = ()
    skews: tuple[RankSkew, ...] = ()
    pairs: PairsRecord | None = None
    noise: NoiseRecord | None = None
    copies: CopiesRecord | None = None
    problems: tuple[str, ...] = ()
    lost_hosts: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return sum(len(host.ranks) for host in self.hosts)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        content: dict[str, Any] = plain(self)
        return content


def probe_from(content: str | bytes, name: str = "the file") -> ProbeRecord:
    """Return the probe that a JSON text encodes.

    Args:
        content: of the file.
        name: what errors call it.

    Raises:
        ProbeError: it is cut off, foreign, of another version, or has a value of the wrong type.
    """
    try:
        encoded = content.encode() if isinstance(content, str) else content
        check_values(encoded, MAX_BYTES // MIN_VALUE_BYTES)
        document = parse_json(encoded)
    except ValueError as error:
        reason = printable(str(error))[:100]
        raise ProbeError(f"{name} is cut off or not JSON ({reason}): save the probe again with --json") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_FAMILY):
        raise ProbeError(
            f"{name} is no saved probe: its `schema` is not {SCHEMA}; name a file of `hpcpace probe --json`"
        )
    if schema != SCHEMA:
        seen = printable(schema[:60])
        raise ProbeError(f"{name} has schema {seen}; hpcpace {hpcpace.__version__} reads {SCHEMA}: probe again")
    try:
        record = convert(document, ProbeRecord)
        _check(record)
    except WrongValue as error:
        raise ProbeError(f"{name} is damaged: {error}") from None
    return record


def read_probe(path: Path) -> ProbeRecord:
    """Return the probe saved in a file.

    Raises:
        ProbeError: it cannot be read, or see `probe_from`.
    """
    try:
        content = read_file(path, most_bytes=MAX_BYTES)
    except OSError as error:
        hint = "save one with `hpcpace probe --json FILE`" if error.errno == errno.ENOENT else "name another file"
        raise ProbeError(f"cannot read the probe {path} ({error.strerror or error}): {hint}") from error
    return probe_from(content, printable(str(path)))


def _check(record: ProbeRecord) -> None:
    """Refuse what its types allow and no probe writes.

    Raises:
        WrongValue: naming the field.
    """
    for row in record.sweep:
        if not (0 < row.p50_ns <= row.p95_ns <= row.p99_ns and row.size_bytes > 0 and row.num_ranks > 0):
            raise WrongValue(f"sweep has a row with p50_ns {row.p50_ns:g} and size_bytes {row.size_bytes}")
        if not all(time_ns > 0 for time_ns in row.rounds_ns):
            raise WrongValue(f"sweep has a row of which a round took {min(row.rounds_ns):g} ns")
    for law in record.laws:
        starts = [piece.from_bytes for piece in law.pieces]
        if not 0 < len(starts) <= MAX_PIECES or starts[0] > 0 or starts != sorted(starts):
            raise WrongValue(f"laws has one of {shown(law.op)} whose {len(starts)} pieces begin at {shown(starts)}")
