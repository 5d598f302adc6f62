"""Runs of ranks with a device whose truth is known: hosts issue work ahead of streams that do it, and buckets overlap.

A small model of each rank: its host issues the kernels of a phase one after the other and marks the compute stream at
the phase's ends; the stream does each kernel when it is issued and the one before is done. Gradients go out in buckets
on a second stream while backward still runs, and the compute stream waits for them before the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op, Phase, StepFlag, TraceHeader

MS, US = 1_000_000, 1_000
START_NS = 5_000 * MS
LATENCY_NS = 6 * US
"""From issuing to running, on an idle stream."""

Ns = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A phase of every step: `host_ns` to issue it, in `num_kernels` equal kernels of together `device_ns`."""

    phase: Phase
    host_ns: float
    device_ns: float
    num_kernels: int = 100


STEP = (
    Work(phase=Phase.DATA, host_ns=0.3 * MS, device_ns=0.1 * MS, num_kernels=1),
    Work(phase=Phase.FORWARD, host_ns=3 * MS, device_ns=10 * MS),
    Work(phase=Phase.BACKWARD, host_ns=4 * MS, device_ns=20 * MS),
    Work(phase=Phase.OPTIMIZER, host_ns=1 * MS, device_ns=3 * MS, num_kernels=40),
)


@dataclass(frozen=True, kw_only=True)
class DeviceRun:
    """What to write.

    Attributes:
        work: the phases of a step, with one BACKWARD, after which the gradients are awaited.
        slow: factor on the device's work, by rank.
        slow_host: factor on the host's work, by rank.
        factors: on the device's work, (num_steps, num_ranks), on top.
        pauses_ns: of the host for garbage collection in the midst of forward, (num_steps, num_ranks).
        transfers: factors on the transfer, (num_steps,).
        noise: standard deviation of the device's work of a step, relative.
        num_buckets: all-reduces of a step, issued at equal distances of backward.
        transfer_ns: of all of them together.
        blocks: whether the compute stream waits for each all-reduce as it is issued, as in tensor parallelism; else for
            all of them behind backward, as under DDP.
        syncs: whether the host waits for the device at the end of a step, as for a loss that it prints.
        ahead: steps that the host may be ahead, as a prefetching loop or a full launch queue allows.
        on_host: ranks without a device: their host does the work of the device itself.
        has_enqueue: whether collectives have the times of the device; else those at which the host issued them.
        has_device_times: whether phases and steps have them.
        lost_times: steps whose device times are not known, by rank.
        clock_error_ns: what is wrong with the recorded offsets, by rank.
    """

    num_ranks: int = 4
    num_steps: int = 60
    num_warmup: int = 4
    work: tuple[Work, ...] = STEP
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_host: Mapping[int, float] = field(default_factory=dict)
    factors: Ns | None = None
    pauses_ns: Ns | None = None
    transfers: Ns | None = None
    noise: float = 0.01
    num_buckets: int = 4
    transfer_ns: float = 4 * MS
    blocks: bool = False
    syncs: bool = True
    ahead: int = 2
    on_host: tuple[int, ...] = ()
    has_enqueue: bool = True
    has_device_times: bool = False
    lost_times: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    clock_error_ns: Mapping[int, int] = field(default_factory=dict)
    halfwidth_ns: int = 2_000
    hosts: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    seed: int = 1

    def write(self, path: Path) -> RunDirectory:
        """Write the traces of one more attempt and return the run."""
        run = RunDirectory(path)
        attempt = run.new_attempt()
        recorders = [self._open(attempt, rank) for rank in range(self.num_ranks)]
        end_ns = START_NS
        for step in _steps(self):
            for rank, recorder in enumerate(recorders):
                _record(recorder, step, rank, self)
            end_ns = int(step.host_ns[-1].max())
        for rank, recorder in enumerate(recorders):
            halfwidth = 0 if rank == 0 else self.halfwidth_ns
            for local_ns in (START_NS, end_ns):
                error_ns = self.clock_error_ns.get(rank, 0)
                recorder.add_clock(0, local_ns, error_ns, 2 * halfwidth, halfwidth, 20)
            recorder.close()
        return run

    def _open(self, attempt: Attempt, rank: int) -> Recorder:
        node = rank * len(self.hosts) // self.num_ranks
        header = TraceHeader(
            run_id="device",
            attempt=attempt.number,
            rank=rank,
            world_size=self.num_ranks,
            local_rank=rank * len(self.hosts) % self.num_ranks,
            local_size=max(self.num_ranks // len(self.hosts), 1),
            node=node,
            host=self.hosts[node],
            host_key=f"key-{node}",
            samples_unit="tokens",
        )
        path = attempt.trace_file(rank)
        recorder = Recorder(path, header, warn=_fail, clock=lambda: START_NS, device_tables=self._device_tables(rank))
        for member in range(self.num_ranks):
            recorder.add_group(0, member, b"default", b"gloo" if rank in self.on_host else b"nccl")
        return recorder

    def _device_tables(self, rank: int) -> tuple[str, ...]:
        if rank in self.on_host or not self.has_enqueue:
            return ()
        return ("collectives", "steps", "phases") if self.has_device_times else ("collectives",)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What happens in a step, each by rank.

    Attributes:
        host_ns, stream_ns: when host and compute stream pass the marks between phases, (num_phases + 1, num_ranks).
        phases: what the phases between them are.
        issue_ns, enter_ns: when host and compute stream get to each bucket, (num_buckets, num_ranks).
        exit_ns: when it is reduced, (num_buckets,).
        paused_ns, pause_ns: when its host begins to collect garbage, and for how long, (num_ranks,).
    """

    number: int
    host_ns: Ns
    stream_ns: Ns
    phases: tuple[Phase, ...]
    issue_ns: Ns
    enter_ns: Ns
    exit_ns: Ns
    paused_ns: Ns
    pause_ns: Ns


def _steps(run: DeviceRun) -> Iterator[_Step]:
    random = np.random.default_rng(run.seed)
    ranks = range(run.num_ranks)
    device = np.array([run.slow.get(rank, 1.0) for rank in ranks])
    issuing = np.array([run.slow_host.get(rank, 1.0) for rank in ranks])
    is_host = np.isin(ranks, run.on_host)
    host = np.full(run.num_ranks, float(START_NS))
    stream, network = host.copy(), host.max()
    ends: list[Ns] = []
    for number in range(run.num_steps):
        if len(ends) >= run.ahead:
            host = np.maximum(host, ends[-run.ahead])
        host_marks, stream_marks, phases = [host], [np.maximum(stream, host + LATENCY_NS)], []
        issue, enter, leave = [], [], []
        factor = device * np.maximum(random.normal(1.0, run.noise, run.num_ranks), 0.1)
        factor = factor if run.factors is None else factor * run.factors[number]
        pause_ns = np.zeros(run.num_ranks) if run.pauses_ns is None else run.pauses_ns[number]
        transfer_ns = run.transfer_ns * (1.0 if run.transfers is None else run.transfers[number])
        paused = host
        for work in run.work:
            num_parts = {Phase.BACKWARD: run.num_buckets, Phase.FORWARD: 1 + bool(pause_ns.any())}.get(work.phase, 1)
            for part in range(num_parts):
                host, stream = _issue(work, num_parts, host, stream, factor, issuing, is_host)
                if work.phase is Phase.FORWARD and pause_ns.any() and not part:
                    paused, host = host, host + pause_ns
                    stream = np.where(is_host, host, stream)
                if work.phase is Phase.BACKWARD:
                    issue.append(host)
                    enter.append(np.where(is_host, host, np.maximum(stream, host + LATENCY_NS)))
                    network = max(network, float(enter[part].max())) + transfer_ns / num_parts
                    leave.append(network)
                    if run.blocks:
                        stream, host = np.maximum(stream, network), np.where(is_host, network, host)
            host_marks, stream_marks = [*host_marks, host], [*stream_marks, np.maximum(stream, host + LATENCY_NS)]
            phases.append(work.phase)
            if work.phase is Phase.BACKWARD:
                stream = np.maximum(stream, network)
                host = np.where(is_host, np.maximum(host, network), host)
                host_marks, stream_marks = [*host_marks, host], [*stream_marks, np.maximum(stream, host + LATENCY_NS)]
                phases.append(Phase.GRAD_SYNC)
        if run.syncs:
            host = np.maximum(host, stream)
            host_marks[-1], stream_marks[-1] = host, np.maximum(stream, host + LATENCY_NS)
        ends.append(stream)
        yield _Step(
            number=number,
            host_ns=np.array(host_marks),
            stream_ns=np.array(stream_marks),
            phases=tuple(phases),
            issue_ns=np.array(issue),
            enter_ns=np.array(enter),
            exit_ns=np.array(leave),
            paused_ns=paused,
            pause_ns=pause_ns,
        )


def _issue(
    work: Work, parts: int, host: Ns, stream: Ns, device: Ns, issuing: Ns, is_host: NDArray[np.bool_]
) -> tuple[Ns, Ns]:
    """Return when the host has issued one of the equal parts of a phase, and when the stream has done it.

    The last kernel ends when the stream has done all since it was last idle: before the first one, or the last one.
    """
    num_kernels = max(work.num_kernels // parts, 1)
    own_ns = work.device_ns / parts * device
    each_ns = work.host_ns / parts * issuing / num_kernels
    first, last = host + each_ns + LATENCY_NS, host + each_ns * num_kernels + LATENCY_NS
    busy_ns = np.maximum.reduce([stream + own_ns, first + own_ns, last + own_ns / num_kernels])
    done = np.where(is_host, host + own_ns, busy_ns)
    return np.where(is_host, done, host + each_ns * num_kernels), done


def _record(recorder: Recorder, step: _Step, rank: int, run: DeviceRun) -> None:
    host, number = step.host_ns[:, rank].astype(np.int64).tolist(), step.number
    is_timed = "phases" in run._device_tables(rank)
    there = step.stream_ns[:, rank].astype(np.int64) * (number not in run.lost_times.get(rank, ()))
    for index, phase in enumerate(step.phases):
        # The wait for gradients is inside backward; it is recorded apart as well.
        end = index + 2 if phase is Phase.BACKWARD else index + 1
        times = (int(there[index]), int(there[end])) if is_timed else ()
        recorder.add_phase(number, phase, host[index], host[end], -1, *times)
    if pause := int(step.pause_ns[rank]):
        paused = int(step.paused_ns[rank])
        recorder.add_phase(number, Phase.GC, paused, paused + pause, -1)
    for bucket, exit_ns in enumerate(step.exit_ns.astype(np.int64).tolist()):
        enter, issue = int(step.enter_ns[bucket, rank]), int(step.issue_ns[bucket, rank])
        seq = number * len(step.exit_ns) + bucket
        enter, exit_ns = (enter, exit_ns) if run.has_enqueue else (issue, issue + 20 * US)
        blocked = exit_ns - enter if run.blocks and (is_timed or rank in run.on_host) else 0
        row = (number, 0, seq, Op.ALL_REDUCE, 1 << 20, -1, enter, exit_ns, blocked, ExitKind.COMPLETION)
        recorder.add_collective(*row, *((issue,) if run._device_tables(rank) else ()))
    flags = StepFlag.WARMUP if number < run.num_warmup else StepFlag.NONE
    times = (int(there[0]), int(there[-1])) if is_timed else ()
    recorder.add_step(number, host[0], host[-1], 64 // run.num_ranks, flags, *times)


def _fail(message: str) -> None:
    raise AssertionError(message)
