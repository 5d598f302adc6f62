"""The part of a summary about the network: interfaces, and what ranks sent to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RateSource = Literal["device", "tc", ""]


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
        return self.utilisation if self.utilisation is not None else self.mean_bps * 1e-15


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
