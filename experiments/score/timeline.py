"""When everything happens on the true clock: steps that obey causality, vectorised over ranks.

A rank leaves an all_reduce no earlier than the last one enters it, and a message is there no earlier than it was sent.
Pipelines run GPipe's order: all microbatches forward, then all backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.score.network import ALL_REDUCE_BYTES, MESSAGE_BYTES, NORM_BYTES, Transfers, transfers_of
from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.work import Work, work_of
from hpcpace.trace.schema import Op

DEFAULT_GROUP, DATA_GROUP, PIPELINE_GROUP = 0, 1, 2
SEND_NS, RECV_NS = 20_000.0, 5_000.0
_EXIT_BIAS_NS, _EXIT_NOISE_NS = 15_000.0, 3_000.0

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """One kind of operation within the steps, several a step; nanoseconds on the true clock.

    Attributes:
        group: DEFAULT_GROUP, DATA_GROUP or PIPELINE_GROUP.
        peer_distance: rank of the peer minus the own one; 0 where there is none.
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
    operation = OperationTimes(
        op=Op.ALL_REDUCE,
        group=DEFAULT_GROUP,
        size_bytes=size_bytes,
        peer_distance=0,
        stages=(0, 1),
        enter=enter,
        exit=exit_,
    )
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
            operations.append(
                OperationTimes(
                    op=Op.ALL_REDUCE,
                    group=group,
                    size_bytes=size,
                    peer_distance=0,
                    stages=(0, stages),
                    enter=times[0],
                    exit=times[1],
                )
            )
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
    group = DEFAULT_GROUP if scenario.layout == "pp" else PIPELINE_GROUP
    recv = OperationTimes(
        op=Op.RECV,
        group=group,
        size_bytes=MESSAGE_BYTES,
        peer_distance=-distance,
        stages=inner,
        enter=entered,
        exit=began,
    )
    send = OperationTimes(
        op=Op.SEND,
        group=group,
        size_bytes=MESSAGE_BYTES,
        peer_distance=distance,
        stages=outer,
        enter=computed,
        exit=free,
    )
    return recv, send
