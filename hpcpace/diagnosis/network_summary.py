"""Parts of a summary: the network, a probe of the hosts, and what comparisons need."""

from __future__ import annotations

from typing import Literal

from hpcpace.core.records import dataclass
from hpcpace.metrics.communication import Overlap as Overlap

RateSource = Literal["device", "tc", ""]

_PER_UNKNOWN_BPS = 1e-15  # format: orders interfaces of unknown line rate behind all others


@dataclass(frozen=True, kw_only=True)
class DirectionUse:
    """What an interface sent, or received; bytes with headers, rates in bit/s.

    Attributes:
        bytes_per_step: mean over the used steps.
        mean_bps: mean over the time of these steps.
        peak_bps: of the busiest interval of `NetworkFigures.peak_s`.
        utilisation, peak_utilisation: the same as shares of the line rate; None where that is not known.
        foreign_bps: what no connection of this job's ranks carried; None where that is not known.
        foreign_share: the same as a share of the bytes.
        foreign_utilisation: the same as a share of the line rate.
        is_foreign: whether foreign traffic shares the interface with this job and is 5 % of the line rate (or else of
            the bytes) or more, beyond what headers can explain.
    """

    bytes_per_step: float
    mean_bps: float
    peak_bps: float
    utilisation: float | None
    peak_utilisation: float | None
    foreign_bps: float | None
    foreign_share: float | None
    foreign_utilisation: float | None
    is_foreign: bool

    @property
    def load(self) -> float:
        """By what interfaces are ordered: utilisation, or a tiny number that grows with the rate where unknown."""
        return self.utilisation if self.utilisation is not None else self.mean_bps * _PER_UNKNOWN_BPS


@dataclass(frozen=True, kw_only=True)
class InterfaceRow:
    """One network interface.

    Attributes:
        host, interface: `n3`, and `eth0` or `mlx5_0/1`.
        line_rate_bps: None where it is not known.
        rate_source: who says so: the `device`, or `tc`, which shapes what the interface sends; empty where nobody does.
        carries_job: whether it carries this job's connections of the host.
        why_unknown: why foreign traffic is not known; empty where it is.
        errors, drops, pauses, marks: events in the time of the used steps.
        raised: which of these the host has far more of than the other hosts.
    """

    host: str
    interface: str
    line_rate_bps: int | None
    rate_source: RateSource
    carries_job: bool
    why_unknown: str
    sent: DirectionUse
    received: DirectionUse
    errors: int
    drops: int
    pauses: int
    marks: int
    raised: tuple[str, ...]

    @property
    def load(self) -> float:
        """By what interfaces are ordered: that of the busier direction."""
        return max(self.sent.load, self.received.load)


@dataclass(frozen=True, kw_only=True)
class HostRetransmissions:
    """What the connections of a host's ranks sent again.

    Attributes:
        sent_bytes: payload sent, repetitions included.
        share: of it, what was sent again.
        usual_share: median of the other hosts; None where there is none.
        is_raised: whether the host repeats far more than the others.
    """

    host: str
    sent_bytes: int
    share: float
    usual_share: float | None
    is_raised: bool


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """What one rank sent to another over TCP; None where only the receiver was recorded.

    Attributes:
        bytes_per_step: payload that arrived.
        rate_bps: payload for each second in which data was outstanding.
        busy_share: for how much of the time data was outstanding.
        retransmitted_share: of what was sent.
    """

    source: int
    destination: int
    source_host: str
    destination_host: str
    bytes_per_step: float
    rate_bps: float | None
    busy_share: float | None
    retransmitted_share: float | None


@dataclass(frozen=True, kw_only=True)
class NetworkFigures:
    """What interfaces and connections carried during the used steps.

    Attributes:
        duration_s: time from the begin of the first used step to the end of the last.
        peak_s: length of the intervals of peaks, 1 but for long runs of very many interfaces.
        has_flows: whether ranks recorded their connections.
        interfaces: those that carried anything, the busiest first.
        num_idle: those that did not.
        retransmissions: by host, the largest share first; empty without connections.
        pairs: rank pairs, those longest busy first, last those with less than 1 % of the most bytes; the first 2,000.
        num_pairs: all of them.
        median_rate_bps: median achieved rate of pairs with a tenth of the most bytes or more; None without any.
    """

    duration_s: float
    peak_s: float
    has_flows: bool
    interfaces: tuple[InterfaceRow, ...]
    num_idle: int
    retransmissions: tuple[HostRetransmissions, ...]
    pairs: tuple[PairRow, ...]
    num_pairs: int
    median_rate_bps: float | None


@dataclass(frozen=True, kw_only=True)
class ProbedRow:
    """Operations of one kind and size, over groups that are alike.

    Attributes:
        op: name of the operation.
        num_nodes, num_ranks: of each group.
        size_bytes: content of one operation.
        num_groups: groups that did it.
        transfer_ns: median over steps of the mean transfer of an operation, the mean over the groups.
        probed_ns: what it takes by the law of the probe.
        achieved: probed_ns over transfer_ns, the share of the probed rate.
        is_beyond: whether the size is larger than any that was probed.
    """

    op: str
    num_nodes: int
    num_ranks: int
    size_bytes: int
    num_groups: int
    transfer_ns: float
    probed_ns: float
    achieved: float
    is_beyond: bool


@dataclass(frozen=True, kw_only=True)
class ProbedFigures:
    """A run next to a probe of its hosts.

    Attributes:
        source: the file of the probe.
        probed_unix_ns: when it was taken.
        refused: why it is not used, such as a probe of other hosts; empty if it is.
        achieved: of all rows together, probed time over transfer; None without rows.
        rows: the operations with the most transfer first.
        num_unprobed: kinds of operations that the probe did not measure.
    """

    source: str
    probed_unix_ns: int
    refused: str
    achieved: float | None
    rows: tuple[ProbedRow, ...]
    num_unprobed: int


@dataclass(frozen=True, kw_only=True)
class ComparedRank:
    """How one rank compares with itself in another run.

    Attributes:
        work_ns: own work per step, the mean; None where it is not known.
        work_error: its standard error relative to it, over blocks of steps; None likewise, and for few steps.
        caused_wait_ns: exposed wait of all ranks that began at this one, mean over ranks and steps.
    """

    rank: int
    work_ns: float | None
    work_error: float | None
    caused_wait_ns: float


@dataclass(frozen=True, kw_only=True)
class Comparable:
    """What a comparison with other runs takes from this one besides all else; see docs/compare.md.

    Attributes:
        is_all: whether all steps but the warm-up were used, as by a report without `--steps`.
        samples_per_step: samples of the global batch, mean over the used steps.
        log_p50_error: standard error of the logarithm of the median step time by a block bootstrap over steps; None for
            fewer than 8 steps.
        log_mean_error: the same of the mean step time.
        block_p50_ns: median step times of up to 20 blocks of consecutive steps, in their order.
        ranks: ascending.
        overlap: which transfers are hidden, by phase and kind; None where that is not known.
    """

    is_all: bool
    samples_per_step: float
    log_p50_error: float | None
    log_mean_error: float | None
    block_p50_ns: tuple[float, ...]
    ranks: tuple[ComparedRank, ...]
    overlap: tuple[Overlap, ...] | None = None
