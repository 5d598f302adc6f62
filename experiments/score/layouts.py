"""Traces of ranks with devices in all layouts, with known truth, made from docs/trace-format.md alone.

A rank is a program: its host issues work in order, and streams do it. Programs yield tuples: ("host", ns) is time of
the host, ("kernel", ns) work of the stream that computes, ("begin", phase) and ("end", phase) are marks in it. A step
begins with ("step",) and ends with ("done",). ("issue", Operation) issues an operation, which begins when the stream
has come there and all members have; ("wait", key) makes the stream wait for it, ("sync",) the host for its device.
All times are int64 nanoseconds of one true clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, EventKind, ExitKind, Op, Phase, StepFlag, TraceHeader

MS, US = 1_000_000, 1_000
_START_NS = 5_000 * MS
_LAUNCH_NS = 4 * US
Program = Iterator[tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a rank: the same key on all its members, one stream of operations after each other."""

    key: tuple[Any, ...]
    stream: str
    group: str
    members: tuple[int, ...]
    op: Op
    ns: int
    peer: int = -1


def _nothing(rank: int, step: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A job.

    Attributes:
        kind: ddp, fsdp, tensor, experts or pipeline.
        per_node: ranks of a node.
        forward_ns: kernels of a layer; backward takes twice that.
        transfer_ns: an operation of a layer; 0.3 of it within a node.
        issue: time of the host for a layer as a part of its kernels.
        noise, host_noise: standard deviation of the kernels of a layer, and of the host's time for them, relative.
        pp, tp: stages, and ranks of a tensor or expert group.
        slow: factor on the kernels of some ranks.
        slow_hosts: factor on the time of some ranks' hosts.
        slow_links: factor on transfers over the links of some nodes.
        clock_error_ns: by which the recorded offsets of some nodes are wrong.
        kept_steps: the steps that the traces of some ranks have.
        collected_ns: time that the host of a rank collects garbage in a step.
        saved_ns: time that a rank saves a checkpoint at the end of a step.
        seed: of the noise.
        reads_loss: whether the host waits for its device at the end of each step.
        queue: kernels that a host may be ahead of its device before it is held; 0: any number.
    """

    kind: str
    num_ranks: int = 8
    per_node: int = 4
    num_steps: int = 50
    num_layers: int = 8
    forward_ns: int = 1 * MS
    transfer_ns: int = 300 * US
    issue: float = 0.02
    noise: float = 0.01
    host_noise: float = 0.0
    pp: int = 1
    tp: int = 1
    num_microbatches: int = 4
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_hosts: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)
    clock_error_ns: Mapping[int, int] = field(default_factory=dict)
    kept_steps: Mapping[int, int] = field(default_factory=dict)
    collected_ns: Callable[[int, int], int] = _nothing
    saved_ns: Callable[[int, int], int] = _nothing
    seed: int = 1
    reads_loss: bool = False
    queue: int = 0

    def write(self, folder: Path) -> float:
        """Write the traces of a run, and return the mean step time in nanoseconds."""
        ranks, groups = self._run(), dict[str, set[int]]()
        attempt = RunDirectory(folder).new_attempt()
        for rank in ranks:
            for _, operation, *_ in rank.rows:
                groups.setdefault(operation.group, set()).update(operation.members)
        for rank in ranks:
            self._write(rank, attempt.trace_file(rank.number), groups)
        ends = np.array([[step[5] for step in rank.steps] for rank in ranks]).max(axis=0)
        return float(ends[-1] - ends[_NUM_WARMUP - 1]) / (self.num_steps - _NUM_WARMUP)

    def step_ns(self) -> float:
        """Return the mean step time in nanoseconds without writing anything."""
        ends = np.array([[step[5] for step in rank.steps] for rank in self._run()]).max(axis=0)
        return float(ends[-1] - ends[_NUM_WARMUP - 1]) / (self.num_steps - _NUM_WARMUP)

    def _run(self) -> list[_Rank]:
        meetings: dict[tuple[Any, ...], _Meeting] = {}
        programs = [_PROGRAMS[self.kind](self, number) for number in range(self.num_ranks)]
        ranks = [_Rank(number, program, meetings, self.queue) for number, program in enumerate(programs)]
        left = ranks
        while left:
            has_moved = [rank.advance() for rank in left]
            assert any(has_moved), "the ranks wait for each other"
            left = [rank for rank in left if not rank.is_done]
        return ranks

    def _write(self, rank: _Rank, path: Path, members: Mapping[str, set[int]]) -> None:
        node = rank.number // self.per_node
        stage, within = divmod(rank.number % (self.pp * self.tp), self.tp)
        header = TraceHeader(
            run_id="layouts",
            attempt=0,
            rank=rank.number,
            world_size=self.num_ranks,
            local_rank=rank.number % self.per_node,
            local_size=self.per_node,
            node=node,
            host=f"g{node}",
            host_key=f"key-{node}",
            mesh=f"dp={self.num_ranks // (self.pp * self.tp)},pp={self.pp},tp={self.tp}",
            dp=rank.number // (self.pp * self.tp),
            pp=stage,
            tp=within if self.kind in ("tensor", "pipeline") else 0,
            samples_unit="tokens",
        )
        num_kept, last_ns = self.kept_steps.get(rank.number, self.num_steps), rank.steps[-1][5]
        recorder = Recorder(path, header, warn=_fail, clock=lambda: last_ns, device_tables=DEVICE_TABLES)
        groups: dict[str, int] = {}
        numbers: dict[tuple[Any, ...], int] = {}
        for step, operation, enter_ns, blocked_ns, issue_ns in rank.rows:
            group = groups.setdefault(operation.group, len(groups))
            channel = (group, operation.peer, operation.op) if operation.peer >= 0 else (group,)
            seq = numbers[channel] = numbers.get(channel, -1) + 1
            if step < num_kept:
                times = (enter_ns, rank.meetings[operation.key].exit_ns, blocked_ns, ExitKind.COMPLETION, issue_ns)
                recorder.add_collective(step, group, seq, operation.op, 8_000_000, operation.peer, *times)
        for name, group in groups.items():
            for member in sorted(members[name]):
                recorder.add_group(group, member, name.encode(), b"nccl")
        for step, *row in rank.phases:
            if step < num_kept:
                recorder.add_phase(step, *row)
        for row in rank.steps[:num_kept]:
            recorder.add_step(*row[:3], 64, StepFlag.WARMUP if row[0] < _NUM_WARMUP else StepFlag.NONE, *row[4:])
        halfwidth_ns = 2_000 if node else 0
        for time_ns in (_START_NS, last_ns):
            offset_ns = self.clock_error_ns.get(node, 0)
            recorder.add_clock(0, time_ns, offset_ns, 2 * halfwidth_ns, halfwidth_ns, 20)
        recorder.add_event(last_ns, num_kept, EventKind.STEP_SOURCE, 0, b"optimizer")
        recorder.close()

    def across(self, members: Sequence[int], ns: int) -> int:
        """Return how long an operation of some ranks takes."""
        nodes = {member // self.per_node for member in members}
        return int(ns * (max(self.slow_links.get(node, 1.0) for node in nodes) if len(nodes) > 1 else 0.3))


_NUM_WARMUP = 3


@dataclass(kw_only=True)
class _Meeting:
    arrivals: dict[int, int] = field(default_factory=dict)
    exit_ns: int | None = None


class _Rank:
    """A rank while it runs; what a meeting of ranks decides is waited for."""

    def __init__(
        self, number: int, program: Program, meetings: dict[tuple[Any, ...], _Meeting], queue: int = 0
    ) -> None:
        self.number, self.meetings, self._program = number, meetings, program
        self._queue: deque[int] = deque(maxlen=queue)
        self.is_done, self._step, self._now = False, -1, None
        self._host = self._stream = _START_NS
        self._last: dict[str, tuple[Any, ...]] = {}
        self._open: dict[Phase, tuple[int, int, int]] = {}
        self._issued: dict[tuple[Any, ...], list[Any]] = {}
        self.rows: list[list[Any]] = []
        self.phases: list[tuple[int, ...]] = []
        self.steps: list[tuple[int, ...]] = []

    def advance(self) -> bool:
        """Run as far as what is known allows; return whether that is any further."""
        has_moved = False
        while True:
            if self._now is None:
                self._now = next(self._program, None)
            if self._now is None:
                self.is_done = True
                return True
            if not self._do(*self._now):
                return has_moved
            self._now, has_moved = None, True

    def _do(self, what: str, *given: Any) -> bool:
        if what == "host":
            self._host += given[0]
        elif what == "kernel":
            if self._queue and len(self._queue) == self._queue.maxlen:
                self._host = max(self._host, self._queue[0])
            self._host += _LAUNCH_NS
            self._stream = max(self._stream, self._host) + given[0]
            self._queue.append(self._stream)
        elif what == "begin":
            self._host += US
            self._open[given[0]] = (self._host, max(self._stream, self._host), given[1] if given[1:] else -1)
        elif what == "end":
            self._host += US
            begin_ns, device_ns, microbatch = self._open.pop(given[0])
            marks = (begin_ns, self._host, microbatch, device_ns, max(self._stream, self._host))
            self.phases.append((self._step, given[0], *marks))
        elif what == "busy":
            begin_ns, self._host = self._host, self._host + given[1]
            row = (begin_ns, self._host, -1, max(self._stream, begin_ns), max(self._stream, self._host))
            self.phases.append((self._step, given[0], *row))
        elif what == "step":
            self._step += 1
            self._begin = (self._host, max(self._stream, self._host))
        elif what == "done":
            row = (self._step, self._begin[0], self._host, 0, self._begin[1], max(self._stream, self._host))
            self.steps.append(row)
        elif what == "sync":
            self._host = max(self._host, self._stream)
        elif what == "issue":
            return self._issue(given[0])
        else:
            return self._wait(given[0])
        return True

    def _issue(self, operation: Operation) -> bool:
        before = self.meetings[self._last[operation.stream]].exit_ns if operation.stream in self._last else _START_NS
        if before is None:
            return False
        self._host += _LAUNCH_NS
        enter_ns = max(self._stream, self._host)
        meeting = self.meetings.setdefault(operation.key, _Meeting())
        meeting.arrivals[self.number] = max(enter_ns, before)
        if len(meeting.arrivals) == len(operation.members):
            meeting.exit_ns = max(meeting.arrivals.values()) + operation.ns
        self._last[operation.stream] = operation.key
        self._issued[operation.key] = row = [self._step, operation, enter_ns, 0, self._host]
        self.rows.append(row)
        return True

    def _wait(self, key: tuple[Any, ...]) -> bool:
        exit_ns = self.meetings[key].exit_ns
        if exit_ns is None:
            return False
        self._host += US
        at = max(self._stream, self._host)
        self._issued[key][3] += max(exit_ns - at, 0)
        self._stream = max(at, exit_ns)
        return True


def _fail(message: str) -> None:
    raise AssertionError(message)


def _layer(job: Layout, rank: int, random: np.random.Generator, ns: int) -> Program:
    work = ns * job.slow.get(rank, 1.0) * max(random.normal(1.0, job.noise), 0.05)
    issue = job.issue * job.slow_hosts.get(rank, 1.0)
    yield ("host", int(ns * issue * max(random.normal(1.0, job.host_noise), 0.3)))
    yield ("kernel", int(work))


def _blocking(operation: Operation) -> Program:
    yield ("issue", operation)
    yield ("wait", operation.key)


def _in_step(job: Layout, rank: int, step: int, body: Program) -> Program:
    yield ("step",)
    yield ("busy", Phase.DATA, 100 * US)
    if collected_ns := job.collected_ns(rank, step):
        yield ("busy", Phase.GC, collected_ns)
    yield from body
    yield ("begin", Phase.OPTIMIZER)
    yield ("host", 50 * US)
    yield ("kernel", 300 * US)
    yield ("end", Phase.OPTIMIZER)
    saved_ns = job.saved_ns(rank, step)
    if job.reads_loss or saved_ns:
        yield ("sync",)
    if saved_ns:
        yield ("busy", Phase.CHECKPOINT, saved_ns)
    yield ("done",)


_PASSES = ((Phase.FORWARD, 1), (Phase.BACKWARD, 2))


def _of_passes(layers: Callable[[Phase, int], Program]) -> Program:
    for phase, factor in _PASSES:
        yield ("begin", phase)
        yield from layers(phase, factor)
        yield ("end", phase)


def _ddp(job: Layout, rank: int) -> Program:
    random, world = np.random.default_rng([job.seed, rank]), tuple(range(job.num_ranks))

    def layers(step: int, phase: Phase, factor: int) -> Program:
        for layer in range(job.num_layers):
            yield from _layer(job, rank, random, factor * job.forward_ns)
            if phase == Phase.BACKWARD:
                ns = job.across(world, job.transfer_ns)
                bucket = Operation(key=(step, layer), stream="c", group="world", members=world, op=Op.ALL_REDUCE, ns=ns)
                yield ("issue", bucket)
        if phase == Phase.BACKWARD:
            yield ("begin", Phase.GRAD_SYNC)
            yield from (("wait", (step, layer)) for layer in range(job.num_layers))
            yield ("end", Phase.GRAD_SYNC)

    for step in range(job.num_steps):
        yield from _in_step(job, rank, step, _of_passes(lambda phase, factor, step=step: layers(step, phase, factor)))


def _fsdp(job: Layout, rank: int) -> Program:
    """The weights of the next layer are gathered while one computes."""
    random, world = np.random.default_rng([job.seed, rank]), tuple(range(job.num_ranks))
    ns = job.across(world, job.transfer_ns)

    def operation(op: Op, *key: Any) -> Operation:
        return Operation(key=(op, *key), stream="c", group="world", members=world, op=op, ns=ns)

    def layers(step: int, phase: Phase, factor: int) -> Program:
        yield ("issue", operation(Op.ALL_GATHER, step, phase, 0))
        for layer in range(job.num_layers):
            if layer + 1 < job.num_layers:
                yield ("issue", operation(Op.ALL_GATHER, step, phase, layer + 1))
            yield ("wait", (Op.ALL_GATHER, step, phase, layer))
            yield from _layer(job, rank, random, factor * job.forward_ns)
            if phase == Phase.BACKWARD:
                yield ("issue", operation(Op.REDUCE_SCATTER, step, layer))
        if phase == Phase.BACKWARD:
            yield from (("wait", (Op.REDUCE_SCATTER, step, layer)) for layer in range(job.num_layers))

    for step in range(job.num_steps):
        yield from _in_step(job, rank, step, _of_passes(lambda phase, factor, step=step: layers(step, phase, factor)))


def _in_groups(job: Layout, rank: int) -> Program:
    """Groups of `tp` ranks meet after each layer: neighbours in tensor parallelism, experts across all nodes."""
    num_groups = job.num_ranks // job.tp
    number = rank // job.tp if job.kind == "tensor" else rank % num_groups
    near = range(number * job.tp, (number + 1) * job.tp)
    mine = tuple(near if job.kind == "tensor" else range(number, job.num_ranks, num_groups))
    op = Op.ALL_REDUCE if job.kind == "tensor" else Op.ALL_TO_ALL
    random, ns = np.random.default_rng([job.seed, rank]), job.across(mine, job.transfer_ns)

    def layers(step: int, phase: Phase, factor: int) -> Program:
        for layer in range(job.num_layers):
            yield from _layer(job, rank, random, factor * job.forward_ns)
            key = (number, step, phase, layer)
            yield from _blocking(Operation(key=key, stream="c", group=f"g{number}", members=mine, op=op, ns=ns))

    for step in range(job.num_steps):
        yield from _in_step(job, rank, step, _of_passes(lambda phase, factor, step=step: layers(step, phase, factor)))


def _pipeline(job: Layout, rank: int) -> Program:
    """One forward, one backward, with data parallelism over pipelines and tensor ranks that do not communicate."""
    random, stage = np.random.default_rng([job.seed, rank]), rank // job.tp % job.pp
    replica, within = rank // (job.pp * job.tp), rank % job.tp
    chain = f"pp{replica}-{within}"
    peers = tuple(range(stage * job.tp + within, job.num_ranks, job.pp * job.tp))

    def at(other: int) -> int:
        return (replica * job.pp + other) * job.tp + within

    def message(step: int, phase: Phase, microbatch: int, source: int, target: int) -> Operation:
        is_sender, ends = stage == source, (at(source), at(target))
        return Operation(
            key=(chain, step, phase, microbatch, source),
            stream=f"{min(source, target)}{phase}",
            group=chain,
            members=ends,
            op=Op.SEND if is_sender else Op.RECV,
            ns=job.across(ends, job.transfer_ns),
            peer=ends[1] if is_sender else ends[0],
        )

    def one(step: int, phase: Phase, factor: int, microbatch: int) -> Program:
        ahead = 1 if phase == Phase.FORWARD else -1
        if 0 <= stage - ahead < job.pp:
            yield from _blocking(message(step, phase, microbatch, stage - ahead, stage))
        yield ("begin", phase, microbatch)
        for _ in range(job.num_layers):
            yield from _layer(job, rank, random, factor * job.forward_ns)
        yield ("end", phase)
        if 0 <= stage + ahead < job.pp:
            yield ("issue", message(step, phase, microbatch, stage, stage + ahead))

    def schedule(step: int) -> Program:
        num_warm = min(job.pp - 1 - stage, job.num_microbatches)
        for microbatch in range(job.num_microbatches + num_warm):
            if microbatch < job.num_microbatches:
                yield from one(step, *_PASSES[0], microbatch)
            if microbatch >= num_warm:
                yield from one(step, *_PASSES[1], microbatch - num_warm)
        if len(peers) > 1:
            yield ("begin", Phase.GRAD_SYNC)
            name, ns = f"dp{stage}-{within}", job.across(peers, 2 * job.transfer_ns)
            yield from _blocking(
                Operation(key=(name, step), stream="d", group=name, members=peers, op=Op.ALL_REDUCE, ns=ns)
            )
            yield ("end", Phase.GRAD_SYNC)

    for step in range(job.num_steps):
        yield from _in_step(job, rank, step, schedule(step))


_PROGRAMS = {"ddp": _ddp, "fsdp": _fsdp, "tensor": _in_groups, "experts": _in_groups, "pipeline": _pipeline}
