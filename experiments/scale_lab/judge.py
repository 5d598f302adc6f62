"""The set-ups, simulated runs of them, and the law of smaller sizes held against sizes that it has not seen.

Simulated jobs are bulk-synchronous, as `analysis.library.simulation` has it, and the real recorder writes their runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.pages import cases_of, read_toml
from experiments.synthetic_run import header_of
from hpcpace.core.rundir import RunDirectory
from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.result import scaling_of
from hpcpace.runs.scaling.samples import Sample, sample_of_run
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op, Phase, StepFlag

SIZES, HELD_OUT = (1, 2, 4, 8), (16, 32)
UPLINK_MBIT = 25
"""Rate of the lab's uplinks, one for each host: what messages wait for. It is low, because all hosts of a lab share the
cores of one machine: an all_reduce of 32 takes about 0.2 s of 2 cores, however small or large it is."""
_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One series.

    Attributes:
        name: of it.
        part: of `hpcpace.runs.scaling.samples.PARTS` that stops it.
        is_strong: whether the work is divided among the hosts; else each host has all of it.
        serial_share: part of the work that is not divided.
        event_ms, event_share: length of an event, and the share of steps in which a rank has one.
        slow_ms: what the last rank does on top in each step.
        message_bytes: of the all_reduce that ends a step; 0 for a barrier, which needs few messages.
        work_ms: of one host.
        num_steps: of a run in the lab, after the warm-up.
    """

    name: str
    part: str
    is_strong: bool = False
    serial_share: float = 0.0
    event_ms: float = 0.0
    event_share: float = 0.0
    slow_ms: float = 0.0
    message_bytes: int = 0
    work_ms: float = 120.0
    num_steps: int = 40

    def host_ms(self, num_hosts: int) -> float:
        """Return the work of a host in a step."""
        if not self.is_strong:
            return self.work_ms
        return self.work_ms * (self.serial_share + (1 - self.serial_share) / num_hosts)

    def transfer_ms(self, num_hosts: int) -> float:
        """Return how long a ring takes for the message at the rate of an uplink."""
        if num_hosts == 1:
            return 0.0
        return 2 * (num_hosts - 1) / num_hosts * self.message_bytes * _BITS / (UPLINK_MBIT * 1e3)


SETUPS = cases_of(Setup, read_toml(__file__, "setups")["setup"])


@dataclass(frozen=True, kw_only=True)
class Point:
    """A held-out size: what was predicted and what was measured, milliseconds."""

    num_hosts: int
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A set-up: the part that was said to stop it, the sizes that the law rests on, and those held out."""

    setup: Setup
    known: tuple[int, ...]
    stopped_by: str
    lost: float
    points: tuple[Point, ...]

    @property
    def is_named(self) -> bool:
        """Whether the injected part was named."""
        return self.stopped_by == self.setup.part


def judge(folder: Path, setup: Setup) -> Judged:
    """Return how well the runs of `SIZES` predict those of `HELD_OUT` that are there.

    Where none of these are, the largest of `SIZES` is held out.
    """
    there = [size for size in (*SIZES, *HELD_OUT) if (folder / f"{setup.name}-{size}").exists()]
    samples = {size: _sample(folder / f"{setup.name}-{size}") for size in there}
    known = [size for size in there if size in SIZES]
    known = known if len(known) < len(there) else known[:-1]
    scaling = scaling_of([samples[size] for size in known])
    predicted = {size.num_units: size for size in scaling.predictions}
    points = []
    for size in there:
        if size in predicted:
            low, high = predicted[size].step_interval_ns
            times = (value / 1e6 for value in (predicted[size].step_ns, low, high, samples[size].step_ns or 0.0))
            names = ("predicted_ms", "low_ms", "high_ms", "measured_ms")
            points.append(Point(**dict(zip(names, times, strict=True)), num_hosts=size))
    stop = scaling_of([samples[size] for size in there if size in SIZES]).stop
    return Judged(
        setup=setup,
        known=tuple(known),
        stopped_by=stop.part if stop is not None else "",
        lost=stop.lost[stop.part] if stop is not None and stop.part else 0.0,
        points=tuple(points),
    )


def _sample(path: Path) -> Sample:
    (loaded,) = load_runs([path])
    if loaded.measured is None:
        raise SystemExit(f"{path}: {loaded.problem}")
    return sample_of_run(loaded.measured)


MS = 1_000_000
_START_NS, _OWN_MS, _BATCH = 5_000 * MS, 2.0, 64
_HOP_MS = 0.2
_NUM_WARMUP = 2


def write_run(path: Path, setup: Setup, num_hosts: int, *, num_steps: int = 120, seed: int = 0) -> RunDirectory:
    """Write the traces of a run of a set-up on some hosts, with one rank on each."""
    generator = np.random.default_rng([seed, num_hosts])
    host_ns = np.full(num_hosts, setup.host_ms(num_hosts) * MS)
    if num_hosts > 1:
        host_ns[-1] += setup.slow_ms * MS
    shape = (num_steps, num_hosts)
    work_ns = host_ns * (1 + 0.01 * generator.standard_normal(shape))
    work_ns += setup.event_ms * MS * (generator.random(shape) < setup.event_share)
    transfer_ns = MS * (setup.transfer_ms(num_hosts) + _HOP_MS * (num_hosts - 1))
    batch = _BATCH if setup.is_strong else _BATCH * num_hosts
    return _write(
        path, work_ns.astype(np.int64), transfer_ns * (1 + 0.05 * generator.standard_normal(num_steps)), batch
    )


def _write(path: Path, work_ns: NDArray[np.int64], transfer_ns: NDArray[np.float64], batch: int) -> RunDirectory:
    run, (num_steps, num_hosts) = RunDirectory(path), work_ns.shape
    attempt = run.new_attempt()
    recorders = [_recorder(attempt.trace_file(rank), rank, num_hosts) for rank in range(num_hosts)]
    begin_ns = _START_NS
    for step in range(num_steps):
        enter_ns = begin_ns + work_ns[step]
        exit_ns = int(enter_ns.max()) + int(transfer_ns[step]) * (num_hosts > 1)
        end_ns = exit_ns + int(_OWN_MS * MS)
        for rank, recorder in enumerate(recorders):
            enter = int(enter_ns[rank])
            recorder.add_phase(step, Phase.FORWARD, begin_ns, exit_ns, -1)
            recorder.add_phase(step, Phase.OPTIMIZER, exit_ns, end_ns, -1)
            if num_hosts > 1:
                recorder.add_collective(
                    step, 0, step, Op.ALL_REDUCE, 4096, -1, enter, exit_ns, exit_ns - enter, ExitKind.COMPLETION
                )
            samples = batch // num_hosts + (rank < batch % num_hosts)
            flags = StepFlag.WARMUP if step < _NUM_WARMUP else StepFlag.NONE
            recorder.add_step(step, begin_ns, end_ns, samples, flags)
        begin_ns = end_ns
    for rank, recorder in enumerate(recorders):
        for local_ns in (_START_NS, begin_ns):
            recorder.add_clock(0, local_ns, 0, 1000 * bool(rank), 500 * bool(rank), 20)
        recorder.close()
    return run


def _recorder(path: Path, rank: int, num_hosts: int) -> Recorder:
    place = {"local_rank": 0, "local_size": 1, "node": rank, "host": f"n{rank}", "host_key": f"key-{rank}"}
    mesh = {"mesh": f"dp={num_hosts},pp=1,tp=1", "dp": rank, "pp": 0, "tp": 0, "samples_unit": "tokens"}
    header = header_of(rank, num_hosts, run_id="simulated", **place, **mesh)
    recorder = Recorder(path, header, warn=_fail, clock=lambda: _START_NS)
    for member in range(num_hosts):
        recorder.add_group(0, member, b"default", b"gloo")
    return recorder


def _fail(message: str) -> None:
    raise AssertionError(message)
