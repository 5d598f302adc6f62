"""What can be wrong with a link, and what a job's connections show of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpcpace.metrics.topology import unit_name


class LinkCause(StrEnum):
    """What is wrong with a link."""

    FOREIGN = "foreign traffic"
    SLOW = "slow link"
    UPLINK = "slow or oversubscribed uplink"
    FLAPPING = "flapping link"
    LOSSY = "lossy link"
    SMALL_MTU = "small MTU"


@dataclass(frozen=True, kw_only=True)
class FlowLimits:
    """Thresholds.

    Attributes:
        rate_share: by which share connections must take longer for their bytes than others.
        uplink_factor: how many times as long connections between leaves may take as those within one, by design.
        foreign_share: least rate of foreign traffic that counts, relative to that of a connection that is not slow.
        repeat_share: least share of segments that are sent again.
        level: largest probability of a false culprit.
    """

    rate_share: float = 0.3
    uplink_factor: float = 3.0
    foreign_share: float = 0.1
    repeat_share: float = 0.002
    level: float = 0.005


@dataclass(frozen=True, kw_only=True)
class LinkFault:
    """A link that holds connections up, or several of which at least one does.

    Attributes:
        cause: what is wrong with it.
        is_certain: whether the cause is told from others; else the link may be slow as well.
        ids: names of links, as of `Topology.links`; several if the data cannot separate them.
        direction: `up` or `down` where the other direction is known to be well; else empty.
        flows: which connections it holds up, as (source node, destination node).
        returning: connections whose acknowledgements pass it, and may be slow for that.
        effect_share: by which share they take longer for their bytes than others.
        interval: 95 % interval of the share.
        p_value: probability that chance alone gives as much, over all connections.
        slow_bytes_per_s, usual_bytes_per_s: rate of the slowest of them while it was busy, and of others of its kind.
        foreign_bytes_per_s: foreign traffic on it, in the direction of these connections; 0 where none is known.
        repeat_share: share of segments that they sent again.
        others_repeat_share: the same of the other connections.
        stall_share: share of the time for which they stood still.
        busy_share: share of the time for which the slowest of them was busy.
        segment_bytes, usual_segment_bytes: largest payload of their segments, and of those of others; 0 unknown.
    """

    cause: LinkCause
    is_certain: bool
    ids: tuple[str, ...]
    direction: str
    flows: tuple[tuple[int, int], ...]
    returning: tuple[tuple[int, int], ...]
    effect_share: float
    interval: tuple[float, float]
    p_value: float
    slow_bytes_per_s: float
    usual_bytes_per_s: float
    foreign_bytes_per_s: float
    repeat_share: float
    others_repeat_share: float
    stall_share: float
    busy_share: float
    segment_bytes: int = 0
    usual_segment_bytes: int = 0

    @property
    def aliases(self) -> tuple[str, ...]:
        """The links as `link n3`, `link leaf2 uplink`."""
        return tuple(unit_name(("link", name)) for name in self.ids)


@dataclass(frozen=True, kw_only=True)
class FlowFindings:
    """What connections show about links.

    Attributes:
        faults: links that hold connections up, largest effect first.
        num_flows: how many connections were compared.
        is_compared: whether a slow link would have shown: at least two connections of a kind, which differ in links.
        reason: why nothing is compared; empty otherwise.
        crossing_factor: how many times as long connections between leaves take as those within one; None without both.
        line_share: largest part of its interface's line rate that a connection reached while it was busy, headers
            included; None if not known.
    """

    faults: tuple[LinkFault, ...]
    num_flows: int
    is_compared: bool
    reason: str
    crossing_factor: float | None = None
    line_share: float | None = None
