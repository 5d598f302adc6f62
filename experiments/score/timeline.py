"""When everything happens on the true clock: steps that obey causality, vectorised over ranks.

A rank leaves an all_reduce no earlier than the last one enters it, and a message is there no earlier than it was sent.
Pipelines run GPipe's order: all microbatches forward, then all backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.score.scenario import EVERYWHERE, NUM_WARMUP, Scenario
from hpcpace.trace.schema import Op

MS = 1e6
DATA_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 1 * MS, 33 * MS, 67 * MS, 3 * MS
COMPUTE_NS = FORWARD_NS + BACKWARD_NS
WARMUP_FACTOR = 1.5
MIN_FACTOR = 0.5
WAIT_SPREAD = 0.3
NOISE_PERIOD_STEPS = 10
SERVICE_PERIOD_NS = 1500 * MS
TRANSIENT_SHARE = 0.25
# Of a piece of a step against the step: what the pieces' own noise is, next to what all of a step have in common.
_PIECE_SHARE = 0.3
_OWN_SHARE = 0.2

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Nanoseconds of work; the last axis is the rank.

    Attributes:
        data, optimizer: (total_steps, num_ranks).
        forward: (total_steps, num_pieces, num_ranks): a piece a microbatch, or one where there is no pipeline.
        backward: (total_steps, num_pieces, num_ranks): a piece a microbatch, or one a bucket.
        service: which ranks a periodic service disturbs, bool, (total_steps, num_ranks).
    """

    data: FloatArray
    forward: FloatArray
    backward: FloatArray
    optimizer: FloatArray
    service: NDArray[np.bool_]


def work_of(scenario: Scenario, *, with_noise: bool = True, with_fault: bool = True) -> Work:
    """Return the work of a scenario; the noise is the same with and without the fault."""
    shape = (scenario.total_steps, scenario.num_ranks)
    is_pipeline = scenario.num_stages > 1
    num_forward = scenario.num_microbatches if is_pipeline else 1
    num_backward = scenario.num_microbatches if is_pipeline else scenario.num_buckets
    random = scenario.random("pieces")
    level = scenario.level if with_noise else 0.0
    factor = noise_factors(scenario) if with_noise else np.ones(shape)
    service = service_activations(scenario) if scenario.fault == "periodic_service" else np.zeros(shape, bool)
    if with_fault:
        factor = factor * fault_factors(scenario) + scenario.size * service
    factor[:NUM_WARMUP] *= WARMUP_FACTOR

    def pieces(number: int, total_ns: float) -> FloatArray:
        own = random.normal(0.0, _PIECE_SHARE * level, (shape[0], number, shape[1])) if level else 0.0
        return np.broadcast_to(factor[:, None, :] * (1.0 + own), (shape[0], number, shape[1])) * (total_ns / number)

    data = DATA_NS * random.lognormal(0.0, 0.05, shape)
    if with_fault and scenario.fault == "input_bound":
        data += scenario.size * COMPUTE_NS * scenario.random("input").lognormal(0.0, 0.2, shape)
    return Work(
        data=data,
        forward=pieces(num_forward, FORWARD_NS),
        backward=pieces(num_backward, BACKWARD_NS),
        optimizer=OPTIMIZER_NS * factor,
        service=service,
    )


def noise_factors(scenario: Scenario) -> FloatArray:
    """Return the noise as factors of mean 1 and standard deviation `level`, (total_steps, num_ranks).

    The ranks' own speeds come on top.
    """
    random = scenario.random("noise")
    shape, level = (scenario.total_steps, scenario.num_ranks), scenario.level
    own = random.standard_normal(shape)
    if scenario.noise == "normal":
        deviation = level * own
    elif scenario.noise == "lognormal":
        variance = np.log1p(level**2)
        deviation = np.exp(np.sqrt(variance) * own - variance / 2) - 1
    elif scenario.noise == "heavy":
        deviation = level * random.standard_t(3, shape) / np.sqrt(3)
    elif scenario.noise == "periodic":
        begin = random.integers(NOISE_PERIOD_STEPS, size=shape[1])
        is_busy = (np.arange(shape[0])[:, None] + begin) % NOISE_PERIOD_STEPS == 0
        share = 1 / NOISE_PERIOD_STEPS
        deviation = level * (is_busy - share) / np.sqrt(share * (1 - share)) + _OWN_SHARE * level * own
    elif scenario.noise == "common_mode":
        deviation = level * random.standard_normal((shape[0], 1)) + _OWN_SHARE * level * own
    else:
        of_node = random.standard_normal((shape[0], scenario.num_nodes))
        deviation = level * of_node[:, scenario.node_of_rank] + _OWN_SHARE * level * own
    speed = 1.0 + scenario.spread * scenario.random("spread").standard_normal(shape[1])
    return np.maximum(1.0 + deviation, MIN_FACTOR) * speed


def fault_factors(scenario: Scenario) -> FloatArray:
    """Return by what the fault slows the computation of each rank, (total_steps, num_ranks)."""
    factors = np.ones((scenario.total_steps, scenario.num_ranks))
    random = scenario.random("fault")
    affected = list(scenario.affected_ranks)
    if scenario.fault in ("slow_rank", "slow_node", "slow_stage"):
        factors[:, affected] += scenario.size
    elif scenario.fault == "transient":
        length = max(int(TRANSIENT_SHARE * scenario.num_steps), 1)
        first = NUM_WARMUP + int(random.integers(scenario.num_steps - length + 1))
        factors[first : first + length, affected] += scenario.size
    elif scenario.fault == "rotating":
        steps = np.arange(scenario.total_steps)
        cycles = random.permuted(
            np.tile(np.arange(scenario.num_ranks), (-(-len(steps) // scenario.num_ranks), 1)), axis=1
        )
        factors[steps, cycles.ravel()[: len(steps)]] += scenario.size
    return factors + core_waits(scenario)


def core_waits(scenario: Scenario) -> FloatArray:
    """Return how long each rank waits for a core, relative to its computation of a step, (total_steps, num_ranks)."""
    waits = np.zeros((scenario.total_steps, scenario.num_ranks))
    if scenario.fault not in ("shared_cores", "foreign_load"):
        return waits
    ranks = list(scenario.affected_ranks) or list(range(scenario.num_ranks))
    varying = scenario.random("fault").lognormal(-(WAIT_SPREAD**2) / 2, WAIT_SPREAD, (len(waits), len(ranks)))
    waits[:, ranks] = scenario.size * varying
    return waits


def service_activations(scenario: Scenario) -> NDArray[np.bool_]:
    """Return in which steps a service that recurs by the clock takes a rank's time, bool, (total_steps, num_ranks)."""
    nominal_ns = DATA_NS + COMPUTE_NS + OPTIMIZER_NS
    begin_ns = scenario.random("fault").uniform(0, SERVICE_PERIOD_NS, scenario.num_nodes)
    time_ns = np.arange(scenario.total_steps)[:, None] * nominal_ns + begin_ns
    is_active = time_ns % SERVICE_PERIOD_NS < nominal_ns
    if scenario.resolved_target != EVERYWHERE:
        is_active &= np.arange(scenario.num_nodes) == scenario.resolved_target
    return np.asarray(is_active[:, scenario.node_of_rank])


ALL_REDUCE_NS, MESSAGE_NS, NORM_NS = 8 * MS, 0.7 * MS, 0.04 * MS
ALL_REDUCE_BYTES, MESSAGE_BYTES, NORM_BYTES = 50_000_000, 8_000_000, 4
BURST_SHARE, BURST_STEPS = 0.3, 5
TRANSFER_NOISE = 0.03


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Nanoseconds that transfers take once all have come.

    Attributes:
        all_reduce: by bucket and by group of data parallelism, (total_steps, num_buckets, num_stages).
        message: of each microbatch between stage s and s + 1 of a replica, back and forth,
            (total_steps, 2, num_microbatches, num_replicas, num_stages - 1).
        norm: of the small all_reduce over all ranks, (total_steps,).
        size_factor: by which the messages are larger than usual.
    """

    all_reduce: FloatArray
    message: FloatArray
    norm: FloatArray
    size_factor: float


def link_names(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of all links: those of the nodes, then the uplinks of the leaves."""
    uplinks = [f"leaf{leaf + 1} uplink" for leaf in range(scenario.num_leaves)] if scenario.num_leaves > 1 else []
    return (*(f"n{node + 1}" for node in range(scenario.num_nodes)), *uplinks)


def links_of(scenario: Scenario, ranks: Sequence[int]) -> frozenset[str]:
    """Return the links that an operation of these ranks crosses."""
    nodes = {int(scenario.node_of_rank[rank]) for rank in ranks}
    leaves = {int(scenario.leaf_of_rank[rank]) for rank in ranks}
    names = [f"n{node + 1}" for node in nodes] if len(nodes) > 1 else []
    return frozenset([*names, *(f"leaf{leaf + 1} uplink" for leaf in leaves if len(leaves) > 1)])


def crossings(scenario: Scenario) -> dict[tuple[str, int, int], frozenset[str]]:
    """Return the links of every group of large transfers, by (kind, replica, stage); a group of all replicas has -1."""
    stages, replicas = scenario.num_stages, scenario.num_replicas
    found = {}
    for stage in range(stages):
        if replicas > 1:
            found["dp", -1, stage] = links_of(scenario, range(stage, scenario.num_ranks, stages))
    for replica in range(replicas):
        for stage in range(stages - 1):
            first = replica * stages + stage
            found["pp", replica, stage] = links_of(scenario, (first, first + 1))
    return found


def slow_link(scenario: Scenario) -> str | None:
    """Return the name of the link that the fault slows."""
    if scenario.fault == "slow_link":
        return f"n{scenario.resolved_target + 1}"
    return f"leaf{scenario.resolved_target + 1} uplink" if scenario.fault == "slow_switch" else None


def same_traffic(scenario: Scenario, link: str) -> tuple[str, ...]:
    """Return the links that are crossed by the same operations as this one, so that no trace can tell them apart."""
    carried = {
        name: frozenset(key for key, links in crossings(scenario).items() if name in links)
        for name in link_names(scenario)
    }
    return tuple(name for name, operations in carried.items() if operations == carried[link])


def transfers_of(scenario: Scenario, *, with_fault: bool = True) -> Transfers:
    """Return the transfers of a scenario; their noise is the same with and without the fault."""
    steps, stages, replicas = scenario.total_steps, scenario.num_stages, scenario.num_replicas
    random = scenario.random("transfer")
    all_reduce = random.lognormal(0.0, TRANSFER_NOISE, (steps, scenario.num_buckets, stages))
    # A ring sends 2 (n - 1) / n of the message over each link (Patarasuk and Yuan 2009, section 3).
    all_reduce *= (replicas - 1) / replicas * ALL_REDUCE_NS / scenario.num_buckets
    shape = (steps, 2, scenario.num_microbatches, replicas, stages - 1)
    message = MESSAGE_NS * random.lognormal(0.0, TRANSFER_NOISE, shape)
    norm = NORM_NS + random.exponential(0.2 * NORM_NS, steps)
    size_factor = 1.0
    slower = 1.0 + scenario.size * COMPUTE_NS / ALL_REDUCE_NS
    link = slow_link(scenario)
    if with_fault and link is not None:
        for (kind, replica, stage), links in crossings(scenario).items():
            if link in links and kind == "dp":
                all_reduce[:, :, stage] *= slower
            elif link in links:
                message[:, :, :, replica, stage] *= slower
    elif with_fault and scenario.fault == "communication_bound":
        size_factor = slower
        all_reduce *= slower
        message *= slower
    elif with_fault and scenario.fault == "contention":
        inflation = _bursts(scenario)
        all_reduce *= inflation[:, None, None]
        message *= inflation[:, None, None, None, None]
    return Transfers(all_reduce=all_reduce, message=message, norm=norm, size_factor=size_factor)


def _bursts(scenario: Scenario) -> FloatArray:
    """Return by what other traffic inflates transfers, (total_steps,): bursts of random length, `size` on average."""
    random = scenario.random("fault")
    steps = scenario.total_steps
    quiet_steps = round(BURST_STEPS * (1 - BURST_SHARE) / BURST_SHARE)
    # Quiet spells are of bounded length, so that a short run has a burst too.
    quiet = random.integers(1, 2 * quiet_steps, steps)
    lengths = np.stack([quiet, random.geometric(1 / BURST_STEPS, steps)])
    is_burst = np.repeat(np.tile([False, True], steps), lengths.T.ravel())[:steps]
    is_burst[:NUM_WARMUP] = False
    height = scenario.size / BURST_SHARE * COMPUTE_NS / ALL_REDUCE_NS * random.gamma(4.0, 0.25, steps)
    return 1.0 + is_burst * height


DEFAULT_GROUP, DATA_GROUP, PIPELINE_GROUP = 0, 1, 2
SEND_NS, RECV_NS = 20_000.0, 5_000.0
_EXIT_BIAS_NS, _EXIT_NOISE_NS = 15_000.0, 3_000.0


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """One kind of operation within the steps, several a step; nanoseconds on the true clock.

    Attributes:
        group: DEFAULT_GROUP, DATA_GROUP or PIPELINE_GROUP.
        peer_distance: rank of the peer minus the own one; 0 without a peer.
        stages: which stages take part, as (first, stop).
        enter, exit: (total_steps, num_operations, num_ranks), nothing where the stage takes no part.
    """

    op: Op
    group: int
    size_bytes: int
    peer_distance: int
    stages: tuple[int, int]
    enter: FloatArray
    exit: FloatArray


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A run on the true clock, which begins at 0; nanoseconds.

    Attributes:
        begin, data_end, optimizer_begin, end: (total_steps, num_ranks).
        forward_begin, forward_end, backward_begin, backward_end: (total_steps, num_phases, num_ranks), one a microbatch
            or one a step. Operations within them are not taken out.
        service: which ranks a periodic service disturbed, bool, (total_steps, num_ranks).
    """

    begin: FloatArray
    data_end: FloatArray
    forward_begin: FloatArray
    forward_end: FloatArray
    backward_begin: FloatArray
    backward_end: FloatArray
    optimizer_begin: FloatArray
    end: FloatArray
    operations: tuple[OperationTimes, ...]
    service: NDArray[np.bool_]

    @property
    def mean_step_ns(self) -> float:
        """Mean time of a step behind the warm-up, over which steps add up to wall time."""
        last = self.end.max(axis=1)
        return float((last[-1] - last[NUM_WARMUP - 1]) / (len(last) - NUM_WARMUP))


def simulate(scenario: Scenario, *, with_noise: bool = True, with_fault: bool = True) -> Timeline:
    """Return the run of a scenario; without its noise or fault, all else is the same."""
    work = work_of(scenario, with_noise=with_noise, with_fault=with_fault)
    transfers = transfers_of(scenario, with_fault=with_fault)
    return _data_parallel(scenario, work, transfers) if scenario.num_stages == 1 else _piped(scenario, work, transfers)


def _exit_lags(scenario: Scenario, num_operations: int) -> FloatArray:
    """Return how much later than the operation ends each rank sees it, (total_steps, num_operations, num_ranks)."""
    random = scenario.random("exit")
    bias = random.uniform(0, _EXIT_BIAS_NS, scenario.num_ranks)
    shape = (scenario.total_steps, num_operations, scenario.num_ranks)
    return np.asarray(bias + random.exponential(_EXIT_NOISE_NS, shape))


def _all_reduce(group: int, size_bytes: int, num_stages: int, enter: FloatArray, exit_: FloatArray) -> OperationTimes:
    of = {"op": Op.ALL_REDUCE, "group": group, "size_bytes": size_bytes, "peer_distance": 0, "stages": (0, num_stages)}
    return OperationTimes(**of, enter=enter, exit=exit_)


def _data_parallel(scenario: Scenario, work: Work, transfers: Transfers) -> Timeline:
    steps, buckets, ranks = scenario.total_steps, scenario.num_buckets, scenario.num_ranks
    lag = _exit_lags(scenario, buckets)
    enter, exit_ = np.zeros((steps, buckets, ranks)), np.zeros((steps, buckets, ranks))
    begin = np.zeros((steps, ranks))
    until_backward = work.data + work.forward[:, 0]
    now = np.zeros(ranks)
    for step in range(steps):
        begin[step] = now
        now = now + until_backward[step]
        for bucket in range(buckets):
            np.add(now, work.backward[step, bucket], out=enter[step, bucket])
            done = enter[step, bucket].max() + transfers.all_reduce[step, bucket, 0]
            now = exit_[step, bucket]
            np.add(lag[step, bucket], done, out=now)
        now = now + work.optimizer[step]
    forward_begin = (begin + work.data)[:, None]
    forward_end = forward_begin + work.forward
    size_bytes = int(ALL_REDUCE_BYTES * transfers.size_factor / buckets)
    operation = _all_reduce(DEFAULT_GROUP, size_bytes, 1, enter, exit_)
    return Timeline(
        begin=begin,
        data_end=forward_begin[:, 0],
        forward_begin=forward_begin,
        forward_end=forward_end,
        backward_begin=forward_end,
        backward_end=exit_[:, -1:],
        optimizer_begin=exit_[:, -1],
        end=exit_[:, -1] + work.optimizer,
        operations=(operation,),
        service=work.service,
    )


def _piped(scenario: Scenario, work: Work, transfers: Transfers) -> Timeline:
    steps, ranks, micro = scenario.total_steps, scenario.num_ranks, scenario.num_microbatches
    stages, replicas = scenario.num_stages, scenario.num_replicas
    buckets = scenario.num_buckets if replicas > 1 else 0
    cells = (steps, replicas, stages, micro)

    def by_place(pieces: FloatArray) -> FloatArray:
        return np.ascontiguousarray(pieces.reshape(steps, micro, replicas, stages).transpose(0, 2, 3, 1))

    duration = [by_place(work.forward), by_place(work.backward)]
    start, free = [np.zeros(cells), np.zeros(cells)], [np.zeros(cells), np.zeros(cells)]
    # When microbatch k may start if nothing but the stage itself holds it up, against the stage's begin of the pass.
    busy = [d + SEND_NS + RECV_NS for d in duration]
    earliest = [np.cumsum(b, axis=-1) - b for b in busy]
    travel = np.ascontiguousarray(transfers.message.transpose(0, 1, 3, 4, 2))
    lag = _exit_lags(scenario, buckets + 1).reshape(steps, buckets + 1, replicas, stages)
    enter, exit_ = np.zeros(lag.shape), np.zeros(lag.shape)
    begin, end = np.zeros((steps, replicas, stages)), np.zeros((steps, replicas, stages))
    data, optimizer = (w.reshape(steps, replicas, stages) for w in (work.data, work.optimizer))

    for step in range(steps):
        now = end[step - 1] if step else begin[0]
        begin[step] = now
        ready = now + data[step]
        for back in (0, 1):
            first, last = start[back][step], free[back][step]
            order = range(stages) if not back else range(stages - 1, -1, -1)
            for stage in order:
                source = stage - 1 if not back else stage + 1
                since = earliest[back][step, :, stage]
                began = ready[:, stage, None] + RECV_NS
                if 0 <= source < stages:
                    sent = first[:, source] + duration[back][step, :, source]
                    arrival = sent + travel[step, back, :, min(source, stage)]
                    began = np.maximum(began, np.maximum.accumulate(arrival - since, axis=1))
                np.add(began, since, out=first[:, stage])
                np.add(first[:, stage], duration[back][step, :, stage] + SEND_NS, out=last[:, stage])
            ready = last[:, :, -1]
        for bucket in range(buckets):
            enter[step, bucket] = ready
            done = ready.max(axis=0) + transfers.all_reduce[step, bucket]
            ready = exit_[step, bucket] = done + lag[step, bucket]
        if buckets:
            enter[step, -1] = ready
            ready = exit_[step, -1] = ready.max() + transfers.norm[step] + lag[step, -1]
        end[step] = ready + optimizer[step]

    def by_rank(times: FloatArray) -> FloatArray:
        return times.transpose(0, 3, 1, 2).reshape(steps, micro, ranks)

    flat = (steps, ranks)
    computed = [by_rank(start[back] + duration[back]) for back in (0, 1)]
    began_at, done_at = [by_rank(times) for times in start], [by_rank(times) for times in free]
    until = (begin + data).reshape(flat)
    operations = [
        *_messages(scenario, began_at[0], computed[0], done_at[0], until, distance=1),
        *_messages(scenario, began_at[1], computed[1], done_at[1], done_at[0][:, -1], distance=-1),
    ]
    if buckets:
        groups = ((DATA_GROUP, slice(0, buckets), ALL_REDUCE_BYTES), (DEFAULT_GROUP, slice(buckets, None), NORM_BYTES))
        for group, rows, size_bytes in groups:
            size = size_bytes if group == DEFAULT_GROUP else int(size_bytes * transfers.size_factor / buckets)
            times = [array[:, rows].reshape(steps, -1, ranks) for array in (enter, exit_)]
            operations.append(_all_reduce(group, size, stages, *times))
    optimizer_begin = exit_[:, -1].reshape(flat) if buckets else done_at[1][:, -1]
    return Timeline(
        begin=begin.reshape(flat),
        data_end=until,
        forward_begin=began_at[0],
        forward_end=computed[0],
        backward_begin=began_at[1],
        backward_end=computed[1],
        optimizer_begin=optimizer_begin,
        end=end.reshape(flat),
        operations=tuple(operations),
        service=work.service,
    )


def _messages(
    scenario: Scenario, began: FloatArray, computed: FloatArray, free: FloatArray, ready: FloatArray, *, distance: int
) -> tuple[OperationTimes, OperationTimes]:
    """Return the recvs and sends of one pass; a recv is entered when the stage is free, and ends when work begins."""
    stages = scenario.num_stages
    inner, outer = ((1, stages), (0, stages - 1)) if distance > 0 else ((0, stages - 1), (1, stages))
    entered = np.concatenate([ready[:, None], free[:, :-1]], axis=1)
    of: dict[str, Any] = {
        "group": DEFAULT_GROUP if scenario.layout == "pp" else PIPELINE_GROUP,
        "size_bytes": MESSAGE_BYTES,
    }
    recv = OperationTimes(op=Op.RECV, peer_distance=-distance, stages=inner, enter=entered, exit=began, **of)
    send = OperationTimes(op=Op.SEND, peer_distance=distance, stages=outer, enter=computed, exit=free, **of)
    return recv, send
