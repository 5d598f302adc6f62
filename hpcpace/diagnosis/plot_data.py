"""The arrays that the plots of the HTML report show, before anything is thinned out.

Every field is optional: a plot without its data is left out, and the page says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.diagnosis.summary import Growth

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Transfer between units relative to the usual one of the same operation, size and number of members.

    Attributes:
        labels: names of the units, (num_units,).
        ratio: 1 is usual, (num_units, num_units); NaN where never together.
    """

    labels: tuple[str, ...]
    ratio: Values

    def __post_init__(self) -> None:
        _check_lengths("Matrix", len(self.labels), self.ratio.shape)


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """The error of one host's clock; each array (num_times,).

    Attributes:
        host: its name.
        time_s: seconds since the run began.
        halfwidth_us: certified bound of the error, microseconds.
        residual_us: leave-one-out residual, signed, microseconds; NaN where there is none.
        allowed_us: the largest that the bounds of the three synchronisations allow, likewise.
    """

    host: str
    time_s: Values
    halfwidth_us: Values
    residual_us: Values
    allowed_us: Values

    def __post_init__(self) -> None:
        arrays = (self.halfwidth_us, self.residual_us, self.allowed_us)
        _check_lengths("HostClock", len(self.time_s), [len(array) for array in arrays])


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one rank did during one step; arrays (num_stretches,), in order of time.

    Attributes:
        rank, host: whose.
        part: what each stretch went to, by name of `Part` in lower case.
        begin_ms, end_ms: of each stretch, milliseconds since the first rank shown began the step.
        are_waits_known: whether waits can be distinguished from transfers.
    """

    rank: int
    host: str
    part: tuple[str, ...]
    begin_ms: Values
    end_ms: Values
    are_waits_known: bool = True

    def __post_init__(self) -> None:
        _check_lengths("Lane", len(self.part), [len(self.begin_ms), len(self.end_ms)])


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """The slowest step, of those without checkpoint and evaluation that are taken apart operation by operation.

    Attributes:
        step: its number.
        time_ms, median_ms: its time, and the median of steps without checkpoint and evaluation.
        slowest, slowest_ms: number and time of the slowest of all of these, another one where that is not taken apart.
        num_ranks: how many ranks the run has.
        lanes: all ranks, or those that represent them.
    """

    step: int
    time_ms: float
    median_ms: float
    slowest: int
    slowest_ms: float
    num_ranks: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, kw_only=True)
class InterfaceLine:
    """What one interface carried over time; each array (2, num_cells): sent, received.

    Attributes:
        host, interface: whose, and its name.
        line_mbps: line rate in Mb/s; None where it is not known.
        total_mbps: all bytes; NaN where nothing was sampled.
        foreign_mbps: what no connection of this job carried; NaN where that is not known.
    """

    host: str
    interface: str
    line_mbps: float | None
    total_mbps: Values
    foreign_mbps: Values

    def __post_init__(self) -> None:
        _check_lengths("InterfaceLine", self.total_mbps.shape[1], [self.foreign_mbps.shape[1]])


@dataclass(frozen=True, kw_only=True)
class NetworkPlots:
    """What the plots of the network show.

    Attributes:
        time_s: begin of each interval, seconds since the first used step, (num_cells,).
        lines: the interfaces, the busiest first; of very many a part.
        num_interfaces: all of them.
        hosts: names of hosts, (num_hosts,).
        step_mb: payload from host (row) to host in a step, in MB, (num_hosts, num_hosts); NaN without connection.
        rate_mbps: achieved rate in Mb/s, likewise; NaN where that is not known, or next to nothing was sent.
    """

    time_s: Values
    lines: tuple[InterfaceLine, ...]
    num_interfaces: int
    hosts: tuple[str, ...]
    step_mb: Values
    rate_mbps: Values

    def __post_init__(self) -> None:
        _check_lengths("lines of NetworkPlots", len(self.time_s), [line.total_mbps.shape[1] for line in self.lines])
        _check_lengths("hosts of NetworkPlots", len(self.hosts), [*self.step_mb.shape, *self.rate_mbps.shape])


@dataclass(frozen=True, kw_only=True)
class CoreTimes:
    """How ranks spend their own work in a step, in milliseconds; each array (num_ranks, num_phases).

    Attributes:
        ranks, hosts: whose, (num_ranks,).
        phases: names of the phases, (num_phases,).
        running_ms, queued_ms: on a core, and ready to run without one.
        idle_ms: neither, as with I/O, locks and sleep.
        unknown_ms: own work of which that is not known.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    phases: tuple[str, ...]
    running_ms: Values
    queued_ms: Values
    idle_ms: Values
    unknown_ms: Values

    def __post_init__(self) -> None:
        arrays = (self.running_ms, self.queued_ms, self.idle_ms, self.unknown_ms)
        _check_lengths("ranks of CoreTimes", len(self.ranks), [len(self.hosts), *(len(array) for array in arrays)])
        _check_lengths("phases of CoreTimes", len(self.phases), [array.shape[1] for array in arrays])


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What operations of one kind, size and number of ranks achieve.

    Attributes:
        op: name of the operation.
        group_size: ranks that take part in one.
        size_bytes: content of one.
        low, median, high: algorithm bandwidth in bytes per second: 5 %, 50 % and 95 % quantile over steps and groups.
        bus_factor: bus over algorithm bandwidth; None where the operation has none.
    """

    op: str
    group_size: int
    size_bytes: int
    low: float
    median: float
    high: float
    bus_factor: float | None


@dataclass(frozen=True, kw_only=True)
class PlotData:
    """What the plots show; None where it is not known.

    Attributes:
        step: numbers of the used steps, int64, (num_steps,).
        step_ms: step times, (num_steps,).
        parts_ms: mean of the ranks of each part of the steps, by name of `Part` in lower case, each (num_steps,); None
            for waits that are not known and in the transfers.
        own_delay_ms: each rank's work beyond the median of its role, (num_ranks, num_steps), NaN where unknown.
        delay_remark: what its rows show of ranks with one other of their role or none, a sentence; may be empty.
        rank_labels: names of its rows, (num_ranks,), each unique, like `3 n1`.
        communication_share: exposed transfer of each step over own work and transfer, waits left out, (num_steps,).
        slow_step: the slowest step, rank by rank.
        core_times: how ranks spend their own work.
        bandwidths: what operations achieve, by kind, number of ranks and size; empty where nothing is known.
        growth: how the loss grows with scale, with its interval and that of independent units.
        leaf_matrix, node_matrix: transfer between leaf switches and between nodes.
        clocks: the error of each host's clock.
        network: what interfaces and hosts carried.
        versions: names and versions of what ran.
        reasons: why data is missing, by name of a field above, as a clause: `the run is too short`.
    """

    step: NDArray[np.int64] | None = None
    step_ms: Values | None = None
    parts_ms: Mapping[str, Values | None] | None = None
    own_delay_ms: Values | None = None
    delay_remark: str = ""
    rank_labels: tuple[str, ...] = ()
    communication_share: Values | None = None
    slow_step: SlowStep | None = None
    core_times: CoreTimes | None = None
    bandwidths: tuple[Bandwidth, ...] = ()
    growth: Growth | None = None
    leaf_matrix: Matrix | None = None
    node_matrix: Matrix | None = None
    clocks: tuple[HostClock, ...] | None = None
    network: NetworkPlots | None = None
    versions: tuple[tuple[str, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.parts_ms.values() if self.parts_ms is not None else ()
        series = [len(each) for each in (self.step_ms, self.communication_share, *parts) if each is not None]
        if self.own_delay_ms is not None:
            _check_lengths("rank_labels of PlotData", len(self.own_delay_ms), [len(self.rank_labels)])
            series.append(self.own_delay_ms.shape[1])
        if series:
            _check_lengths("PlotData", 0 if self.step is None else len(self.step), series)


def _check_lengths(what: str, expected: int, found: tuple[int, ...] | list[int]) -> None:
    if any(length != expected for length in found):
        raise ValueError(f"{what}: lengths {list(found)} where all must be {expected}")
