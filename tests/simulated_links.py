"""A job whose ranks reduce their gradients in a ring over links of known rates, as tables of what hosts count.

A fluid model: in each step, the ring takes as long as its slowest connection; the others are busy for what their bytes
take at the rate of their own way, and wait for data in between. Every kind of fault of a link is one setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.diagnosis.judged import flow_limits
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.metrics import link_faults
from hpcpace.metrics.flow_figures import FlowFindings, flow_figures, flow_paths, foreign_on_links
from hpcpace.metrics.flows import Connections, Flows, InterfaceUse
from hpcpace.metrics.interface_use import interface_loads
from hpcpace.metrics.topology import Topology, topology_of

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LIMITS = flow_limits(DiagnosisConfig())
locate_by_flows = partial(link_faults.locate_by_flows, limits=LIMITS)

SEGMENT_BYTES = 1448
HEADERS = 66 / SEGMENT_BYTES
MIN_ROUND_TRIP_S, QUEUE_S = 50e-6, 2e-3
FULL_QUEUE_S = 0.03
TIMEOUT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class SimulatedLinks:
    """A job and its network.

    Attributes:
        seed: of all that is random.
        num_hosts, num_leaves: one rank a host; hosts in blocks below the leaves.
        link_bps, uplink_bps: rates of the hosts' links and of the uplinks.
        is_shuffled: whether neighbours in the ring are random hosts, and not neighbours on a leaf.
        fault: what is wrong: `none`, `slow`, `foreign`, `latency`, `flapping`, `lossy`, `reordering` or `small_mtu`.
            Foreign traffic on an uplink comes from the first host of its leaf, and goes to it.
        links: names of the links, as `n3` or `leaf2 uplink`.
        is_one_way: whether only the direction upwards is slow.
        size: of the fault: the part of the rate that is left, that foreign traffic takes, or of the packets sent again;
            of latency, the seconds that a link adds to each round trip, and so to each step.
        slow_s: when a slow link is slow, from second to second; none for always.
        compute_s: own work of a step.
        message_bytes: gradients of a step.
        num_seconds: length of the run.
        noise: deviation of the logarithm of rates, half of it from step to step and half for good.
        has_leaves: whether the tables come with a topology.
    """

    seed: int = 0
    num_hosts: int = 4
    num_leaves: int = 2
    link_bps: float = 1e9
    uplink_bps: float = 2e9
    is_shuffled: bool = False
    fault: str = "none"
    links: tuple[str, ...] = ("n2",)
    is_one_way: bool = False
    size: float = 0.1
    slow_s: tuple[tuple[float, float], ...] = ()
    compute_s: float = 0.1
    message_bytes: float = 20e6
    num_seconds: int = 20
    noise: float = 0.05
    has_leaves: bool = True

    @property
    def right_links(self) -> tuple[str, ...]:
        """Links that it is right to name: foreign traffic on an uplink is also on the link of the host that has it."""
        if self.fault != "foreign":
            return self.links
        leaves = [int(name.removeprefix("leaf").removesuffix(" uplink")) - 1 for name in self.links if " " in name]
        return (*self.links, *(f"n{first_host(self, leaf) + 1}" for leaf in leaves))


def first_host(job: SimulatedLinks, leaf: int) -> int:
    """Return the first host of a leaf."""
    return next(host for host in range(job.num_hosts) if host * job.num_leaves // job.num_hosts == leaf)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """Its tables: where hosts are, connections, and interfaces; `num_steps` of it are done in time."""

    topology: Topology
    flows: Flows
    use: InterfaceUse
    num_steps: int


def simulate(job: SimulatedLinks) -> SimulatedRun:
    """Run a job and return what its hosts counted once a second."""
    random = np.random.default_rng(job.seed)
    topology = _topology(job)
    ring = random.permutation(job.num_hosts) if job.is_shuffled else np.arange(job.num_hosts)
    source, destination = ring, np.roll(ring, 1)
    paths = flow_paths(_topology(job, has_leaves=True), source, destination)
    rates, foreign, is_faulty = _rates(job, paths)
    is_hit, is_hit_back = ((ways & is_faulty).any(axis=(1, 2)) for ways in (paths, paths[:, :, ::-1]))
    own_noise = np.exp(job.noise / 2 * random.standard_normal((job.num_hosts, 1)))
    num_steps = int(job.num_seconds / job.compute_s) + 1
    step_noise = np.exp(job.noise / 2 * random.standard_normal((job.num_hosts, num_steps)))
    rates = rates[:, None] * own_noise * step_noise
    num_bytes = 2 * (job.num_hosts - 1) / job.num_hosts * job.message_bytes
    busy_s = num_bytes / rates
    if job.slow_s:
        busy_s = _slow_at_times(job, is_hit, busy_s)
    num_late = (paths.any(axis=2) & is_faulty.any(axis=1)).sum(axis=1)
    added_s = (job.size if job.fault == "latency" else 0.0) * num_late
    busy_s = busy_s + added_s[:, None]
    compute_s = job.compute_s * np.exp(0.02 * random.standard_normal(num_steps))
    length_s = compute_s + busy_s.max(axis=0)
    end_s = np.cumsum(length_s)
    if job.fault == "flapping":
        stall_s = _stalls(end_s, length_s, compute_s)
        busy_s = busy_s + is_hit[:, None] * stall_s
        end_s = np.cumsum(length_s + stall_s)
    done = int(np.searchsorted(end_s, job.num_seconds))
    # Acknowledgements queue as well, in front of a slow link on their way back.
    is_queued = (is_hit | is_hit_back) & (job.fault == "slow")
    flows = _flows(job, source, destination, end_s, num_bytes, busy_s, is_hit, is_queued, added_s, random)
    use = _interfaces(job, source, flows, foreign, random)
    return SimulatedRun(topology=topology, flows=flows, use=use, num_steps=done)


def _topology(job: SimulatedLinks, *, has_leaves: bool | None = None) -> Topology:
    ranks = range(job.num_hosts)
    hosts = [f"n{rank + 1}" for rank in ranks]
    is_known = job.has_leaves if has_leaves is None else has_leaves
    leaves = [f"leaf{rank * job.num_leaves // job.num_hosts + 1}" for rank in ranks]
    addresses = [f"spine.{leaf}.{host}" if is_known else "" for leaf, host in zip(leaves, hosts, strict=True)]
    return topology_of(ranks=ranks, nodes=ranks, hosts=hosts, addresses=addresses)


def _rates(job: SimulatedLinks, paths: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """Return bytes per second of each connection, foreign ones on each link and way, and which ways have the fault."""
    topology = _topology(job, has_leaves=True)
    capacity = np.where(topology.is_uplink, job.uplink_bps, job.link_bps)[:, None] / 8 * np.ones(2)
    foreign, is_faulty = np.zeros(capacity.shape), np.zeros(capacity.shape, np.bool_)
    if job.fault != "none":
        for name in job.links:
            is_faulty[topology.links.index(name), : 1 if job.is_one_way else 2] = True
    if job.fault == "slow":
        capacity[is_faulty] *= job.size
    elif job.fault == "foreign":
        foreign[is_faulty] = job.size * capacity[is_faulty]
        for leaf in range(job.num_leaves if job.num_leaves > 1 else 0):
            host = first_host(job, leaf)
            foreign[host] = np.maximum(foreign[host], foreign[job.num_hosts + leaf])
    left = np.maximum(capacity - foreign, capacity / 2)
    rates = np.where(paths, left[None], np.inf).min(axis=(1, 2))
    return rates / (1 + HEADERS), foreign, is_faulty


def _slow_at_times(job: SimulatedLinks, is_hit: NDArray[np.bool_], busy_s: FloatArray) -> FloatArray:
    """Return how long connections are busy if those that pass the link are slow in some stretches alone."""
    well_s = np.where(is_hit[:, None], busy_s * job.size, busy_s)
    found, now_s = well_s.copy(), 0.0
    for step in range(busy_s.shape[1]):
        if any(begin <= now_s < end for begin, end in job.slow_s):
            found[:, step] = busy_s[:, step]
        now_s += job.compute_s + float(found[:, step].max())
    return found


def _stalls(end_s: FloatArray, length_s: FloatArray, compute_s: FloatArray) -> FloatArray:
    """Return how long each step stands still where a link is down for half a second in every four."""
    transfer = np.stack([end_s - length_s + compute_s, end_s])
    down_s = np.arange(2.0, end_s[-1], 4.0)
    stall_s = np.zeros(len(end_s))
    for begin in down_s:
        inside = (transfer[0] < begin + 0.5) & (transfer[1] > begin)
        stall_s[np.flatnonzero(inside)[:1]] += 0.5 + TIMEOUT_S
    return stall_s


def _flows(
    job: SimulatedLinks,
    source: IntArray,
    destination: IntArray,
    end_s: FloatArray,
    num_bytes: float,
    busy_s: FloatArray,
    is_hit: NDArray[np.bool_],
    is_queued: NDArray[np.bool_],
    added_s: FloatArray,
    random: np.random.Generator,
) -> Flows:
    seconds = np.arange(job.num_seconds + 1.0)
    at = np.concatenate([[0.0], end_s])
    is_limiting = busy_s > 0.9 * busy_s.max(axis=0)
    columns = []
    for row in range(job.num_hosts):
        acked = np.diff(np.interp(seconds, at, np.arange(len(at)) * num_bytes))
        busy = np.diff(np.interp(seconds, at, np.concatenate([[0.0], np.cumsum(busy_s[row])])))
        share = job.size if job.fault in ("lossy", "reordering") and is_hit[row] else 1e-5
        again = random.binomial((acked / SEGMENT_BYTES).astype(np.int64), share) * SEGMENT_BYTES
        queue_s = FULL_QUEUE_S if is_queued[row] else QUEUE_S
        rtt_s = MIN_ROUND_TRIP_S + queue_s * (0.3 + 0.7 * float(is_limiting[row].mean()))
        rtt = added_s[row] + rtt_s * np.exp(0.2 * random.standard_normal(job.num_seconds))
        columns.append(np.stack([acked, busy * NS_PER_S, again, rtt * NS_PER_S]))
    num_rows = job.num_hosts * job.num_seconds
    acked, busy, again, rtt = (np.rint(column).astype(np.int64) for column in np.concatenate(columns, axis=1))
    nothing = np.zeros(num_rows, np.int64)
    ends = np.concatenate([source, destination]), np.concatenate([destination, source])
    is_small = np.repeat(is_hit if job.fault == "small_mtu" else np.zeros(job.num_hosts, np.bool_), job.num_seconds)
    begin_ns = np.tile(np.arange(job.num_seconds) * NS_PER_S, 2 * job.num_hosts)
    zero = np.zeros(2 * num_rows, np.int64)
    least_rtt_ns = np.rint((np.tile(added_s, 2) + MIN_ROUND_TRIP_S) * NS_PER_S).astype(np.int64)
    return Flows(
        connections=Connections(
            rank=ends[0],
            peer_rank=ends[1],
            node=ends[0],
            peer_node=ends[1],
            local=tuple(f"10.0.0.{host + 1}:4000" for host in ends[0]),
            remote=tuple(f"10.0.0.{host + 1}:5000" for host in ends[1]),
        ),
        connection=np.repeat(np.arange(2 * job.num_hosts), job.num_seconds),
        begin_ns=begin_ns,
        end_ns=begin_ns + NS_PER_S,
        sent_bytes=np.concatenate([acked + again, nothing]),
        acked_bytes=np.concatenate([acked, nothing]),
        received_bytes=np.concatenate([nothing, acked]),
        retransmitted_bytes=np.concatenate([again, nothing]),
        duplicate_segments=np.concatenate(
            [again // SEGMENT_BYTES // (1 if job.fault == "reordering" else 10), nothing]
        ),
        busy_ns=np.concatenate([busy, nothing]),
        receiver_limited_ns=zero,
        sender_limited_ns=zero,
        rtt_ns=np.concatenate([rtt, nothing]),
        least_rtt_ns=np.repeat(least_rtt_ns, job.num_seconds),
        unsent_bytes=zero,
        segment_bytes=np.tile(np.where(is_small, 548, SEGMENT_BYTES), 2),
    )


def _interfaces(
    job: SimulatedLinks, source: IntArray, flows: Flows, foreign: FloatArray, random: np.random.Generator
) -> InterfaceUse:
    """Return the counters of each host's interface: this job's bytes with headers, and foreign ones."""
    of_host = foreign[: job.num_hosts]
    sent = np.zeros((job.num_hosts, job.num_seconds))
    received = np.zeros((job.num_hosts, job.num_seconds))
    by_flow = flows.sent_bytes.reshape(2 * job.num_hosts, job.num_seconds)[: job.num_hosts] * (1 + HEADERS)
    sent[source] = by_flow
    received[np.roll(source, 1)] = by_flow
    sent, received = sent + received / (32 * 1024) * 66, received + sent / (32 * 1024) * 66
    sent = sent + of_host[:, :1] * np.exp(0.05 * random.standard_normal(sent.shape))
    received = received + of_host[:, 1:] * np.exp(0.05 * random.standard_normal(received.shape))
    number = np.repeat(np.arange(job.num_hosts), job.num_seconds)
    begin_ns = np.tile(np.arange(job.num_seconds) * NS_PER_S, job.num_hosts)
    zero = np.zeros(len(number), np.int64)
    return InterfaceUse(
        names=tuple((f"n{host + 1}", "eth0") for host in range(job.num_hosts)),
        node=np.arange(job.num_hosts),
        line_rate_bps=np.full(job.num_hosts, round(job.link_bps)),
        interface=number,
        begin_ns=begin_ns,
        end_ns=begin_ns + NS_PER_S,
        sent_bytes=np.rint(sent.ravel()).astype(np.int64),
        received_bytes=np.rint(received.ravel()).astype(np.int64),
        errors=zero,
        drops=zero,
        pauses=zero,
        marks=zero,
    )


SIZES = {
    "slow": (0.1, 0.5),
    "foreign": (0.4, 0.6),
    "flapping": (0.0, 0.0),
    "lossy": (0.01, 0.03),
    "reordering": (0.01, 0.03),
    "small_mtu": (0, 0),
}


def located(job: SimulatedLinks) -> FlowFindings:
    """Return what is found in a simulated job."""
    run = simulate(job)
    window = {"begin_ns": 2 * NS_PER_S, "end_ns": job.num_seconds * NS_PER_S}
    figures = flow_figures(run.flows, run.topology, **window)
    loads = interface_loads(run.use, run.flows, **window, is_recorded=np.ones(job.num_hosts, np.bool_))
    return locate_by_flows(figures, run.topology, foreign_bytes_per_s=foreign_on_links(loads, run.topology))


def random_job(seed: int, fault: str, *, is_uplink: bool) -> SimulatedLinks:
    """Return a job of random size and place with a fault of random size on a random link."""
    random = np.random.default_rng([seed, 7])
    num_leaves = int(random.choice([1, 2, 3, 4]))
    if is_uplink:
        num_leaves = max(num_leaves, 2)
    num_hosts = num_leaves * int(random.integers(2, 5))
    low, high = SIZES.get(fault, (0.0, 0.0))
    name = f"leaf{random.integers(num_leaves) + 1} uplink" if is_uplink else f"n{random.integers(num_hosts) + 1}"
    size = float(random.uniform(low, high))
    return SimulatedLinks(
        seed=seed,
        num_hosts=num_hosts,
        num_leaves=num_leaves,
        is_shuffled=bool(random.random() < 0.3),
        uplink_bps=1e9 if is_uplink else float(random.choice([1e9, 2e9, 4e9])),
        fault=fault,
        links=(name,),
        # Two leaves: all connections between them are slow then, which is told from a design by a factor of 3.
        size=size / 2 if is_uplink and fault == "slow" else size,
        compute_s=float(random.uniform(0.05, 0.6)),
    )
