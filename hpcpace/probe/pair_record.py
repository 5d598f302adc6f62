"""What pairs of hosts reached, as it is saved: transfers, sums over uplinks, and the links that are slow."""

from __future__ import annotations

from dataclasses import dataclass


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
        note: why nothing, or not everything, could be told; empty otherwise.
    """

    carrier: str
    usual: float | None = None
    usual_of_limit: float | None = None
    usual_latency_ns: float | None = None
    rows: tuple[PairRow, ...] = ()
    bisections: tuple[BisectionRow, ...] = ()
    findings: tuple[LinkFinding, ...] = ()
    note: str = ""
