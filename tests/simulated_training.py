"""Data-parallel training on simulated devices, observed and recorded by the code that observes real ones.

    write_device_traces(folder, DeviceJob(num_ranks=4, num_steps=50, step_of=lambda rank, step: DeviceStep(...)))

writes `rank-00000.h5` and so on into a folder, and returns the truth (`RankTruth`). Each step fetches a batch, runs
forward, backward with one all-reduce a bucket that begins as soon as its gradients are there, and the optimizer. The
host runs ahead as far as `DeviceStep` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from simulated_device import DeviceClock as TrueClock
from simulated_device import HostCosts, Program, SimulatedGroup, SimulatedRank, SimulatedWork, known, run

from hpcpace.observe.device.clock import DeviceClock, DeviceMarks
from hpcpace.observe.device.times import DeviceTimes
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, EventKind, ExitKind, Op, Phase, TraceHeader

_FLUSH_EVERY_STEPS = 500
_START_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """What one rank does in one step.

    Attributes:
        data_ns: the host's time for a batch; what a loader has prefetched costs little.
        kernel_ns: duration of a kernel.
        num_forward, num_backward, num_optimizer: kernels of each phase.
        num_buckets: all-reduces, spread over the backward pass; 0 without communication.
        transfer_ns: duration of an all-reduce once all ranks are there.
        bucket_bytes: size of an all-reduce.
        reads_loss: whether the host waits for its device at the end of the step, as `loss.item()` does.
        waits_itself: whether the program waits for each all-reduce where the observer sees it; DDP's waits are hidden.
    """

    data_ns: int = 100_000
    kernel_ns: int = 500_000
    num_forward: int = 20
    num_backward: int = 40
    num_optimizer: int = 5
    num_buckets: int = 4
    transfer_ns: int = 1_000_000
    bucket_bytes: int = 25 << 20
    reads_loss: bool = False
    waits_itself: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceJob:
    """A job to simulate.

    Attributes:
        num_ranks, num_steps: its size; all ranks are on one host.
        step_of: what a rank (first argument) does in a step (second one).
        costs: of the hosts.
        clock_of: the clock of a rank's device.
        is_observed: whether devices are observed; otherwise the trace has host times only, as one of an older hpcpace.
        run_id: of the traces.
    """

    num_ranks: int
    num_steps: int
    step_of: Callable[[int, int], DeviceStep]
    costs: HostCosts = field(default_factory=HostCosts)
    clock_of: Callable[[int], TrueClock] = lambda rank: TrueClock(rate_ppm=7.0 * rank - 10.0)
    is_observed: bool = True
    run_id: str = "simulated"


@dataclass(frozen=True, kw_only=True)
class RankTruth:
    """What a rank's device did, int64 nanoseconds, (num_steps, number of phases) each, by `Phase`.

    Attributes:
        first_ns: when the first kernel of a phase began; 0 without one.
        own_ns: time of kernels on the main stream.
        held_ns: time for which the main stream waited for all-reduces.
        idle_ns: time for which the main stream had nothing to do, because the host had issued nothing.
    """

    first_ns: NDArray[np.int64]
    own_ns: NDArray[np.int64]
    held_ns: NDArray[np.int64]
    idle_ns: NDArray[np.int64]


def write_device_traces(folder: Path, job: DeviceJob) -> list[RankTruth]:
    """Run a job, write the trace of each rank, and return the truth by rank."""
    group = SimulatedGroup(job.num_ranks)
    traced = [_TracedRank(folder, job, number) for number in range(job.num_ranks)]
    run({one.rank: _train(one, group, job) for one in traced})
    return [one.truth() for one in traced]


class _TracedRank:
    """A simulated rank with the observing code and the recorder on it."""

    def __init__(self, folder: Path, job: DeviceJob, number: int) -> None:
        self.number, self._num_steps = number, job.num_steps
        self.rank = SimulatedRank(now_ns=_START_NS, costs=job.costs, device_clock=job.clock_of(number))
        self.device = DeviceClock(
            self.rank.new_event,
            current_device=lambda: 0 if job.is_observed else None,
            clock=self.rank.clock,
        )
        self.marks = DeviceMarks(self.device)
        self.recorder = Recorder(
            folder / f"rank-{number:05d}.h5",
            _header(job, number),
            flush_interval_s=3600.0,  # only when told to, so that a run is like any other
            warn=_refuse,
            clock=self.rank.clock,
            mark=self.marks.now,
            device_tables=DEVICE_TABLES if job.is_observed else ("collectives",),
        )
        self.recorder.device_ns = self.marks.device_ns if job.is_observed else None
        self.times = DeviceTimes(self.device, self.recorder.add_collective)
        self.recorder.open_collectives = self.times.open_rows
        self.recorder.start()
        for member in range(job.num_ranks):
            self.recorder.add_group(0, member, b"default_pg", b"nccl")
        self.step = self._num_issued = 0
        self._phase = Phase.OTHER
        self.begin_ns = self.marks.now()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Record the block as a phase."""
        outer, self._phase = self._phase, phase
        begin_ns = self.marks.now()
        yield
        self.recorder.add_phase(self.step, phase, begin_ns, self.marks.now(), -1)
        self._phase = outer

    def kernels(self, count: int, duration_ns: int) -> None:
        """Issue kernels."""
        for _ in range(count):
            self.rank.launch(duration_ns, label=(self.step, self._phase, "own"))

    def all_reduce(self, group: SimulatedGroup, step: DeviceStep) -> SimulatedWork:
        """Issue an all-reduce of a bucket."""
        begin = self.times.begin() if self.device.is_usable else None
        enter_ns = self.rank.now_ns
        work = group.all_reduce(self.rank, step.transfer_ns)
        row = (
            self.step, 0, self._num_issued, Op.ALL_REDUCE, step.bucket_bytes, -1, enter_ns, 0, 0, ExitKind.COMPLETION,
        )  # fmt: skip
        self._num_issued += 1
        if begin is not None:
            self.times.follow(row, begin, work)
        return work

    def wait(self, work: SimulatedWork, *, is_seen: bool) -> None:
        """Let the stream wait for an all-reduce, between marks of the observer if it sees that."""
        operation = self.times.waits_for(work) if is_seen else None
        label = (self.step, self._phase, "held")
        if operation is None:
            work.wait(label=label)
        else:
            self.times.blocked(operation, work.wait, label=label)

    def end_step(self) -> Program:
        """End the step, and tie the clocks together where that is due."""
        end_ns = self.marks.now()
        self.recorder.add_step(self.step, self.begin_ns, end_ns, 1, 0)
        self.times.resolve(self.step)
        if self.device.is_due:
            yield from self.rank.synchronize()
            self.device.anchor(self._resolve)
        self.step += 1
        if self.step % _FLUSH_EVERY_STEPS == 0:
            self.marks.resolve()
            self.recorder.flush()
        self.begin_ns = self.marks.now()

    def close(self) -> Program:
        """End the recording, once the device is done."""
        yield from self.rank.synchronize()
        self.device.anchor(self._resolve)
        self.recorder.add_event(self.rank.now_ns, self.step, EventKind.DEVICE_SOURCE, 0, b"simulated")
        self.recorder.close()

    def truth(self) -> RankTruth:
        """Return what the device did."""
        shape = self._num_steps, len(Phase)
        found = {kind: np.zeros(shape, np.int64) for kind in ("first", "own", "held", "idle")}
        for work in self.rank.done:
            if isinstance(work.label, tuple):
                step, phase, kind = work.label
                begin_ns = known(work.begin_ns)
                found["idle"][step, phase] += work.idle_ns
                found[kind][step, phase] += known(work.end_ns) - begin_ns
                if kind == "own" and not found["first"][step, phase]:
                    found["first"][step, phase] = begin_ns
        return RankTruth(**{f"{kind}_ns": values for kind, values in found.items()})

    def _resolve(self) -> None:
        self.marks.resolve()
        self.times.resolve()


def _train(one: _TracedRank, group: SimulatedGroup, job: DeviceJob) -> Program:
    for number in range(job.num_steps):
        step = job.step_of(one.number, number)
        with one.phase(Phase.DATA):
            one.rank.compute(step.data_ns)
        with one.phase(Phase.FORWARD):
            one.kernels(step.num_forward, step.kernel_ns)
        with one.phase(Phase.BACKWARD):
            _backward(one, group, step)
        with one.phase(Phase.OPTIMIZER):
            one.kernels(step.num_optimizer, step.kernel_ns)
        if step.reads_loss:
            yield from one.rank.synchronize()
        yield from one.rank.wait_for_room()
        yield from one.end_step()
        yield None
    yield from one.close()


def _backward(one: _TracedRank, group: SimulatedGroup, step: DeviceStep) -> None:
    works = []
    num_parts = max(step.num_buckets, 1)
    for part in range(num_parts):
        first, last = (round(step.num_backward * index / num_parts) for index in (part, part + 1))
        one.kernels(last - first, step.kernel_ns)
        if step.num_buckets:
            works.append(one.all_reduce(group, step))
    if works:
        with one.phase(Phase.GRAD_SYNC):
            for work in works:
                one.wait(work, is_seen=step.waits_itself)


def _header(job: DeviceJob, number: int) -> TraceHeader:
    return TraceHeader(
        run_id=job.run_id, attempt=0, rank=number, world_size=job.num_ranks, local_rank=number,
        local_size=job.num_ranks, node=0, host="simulated", host_key="simulated",
    )  # fmt: skip


def _refuse(message: str) -> None:
    raise AssertionError(message)
