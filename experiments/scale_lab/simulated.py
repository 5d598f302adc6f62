"""Runs of a simulated job, written by the real recorder: bulk-synchronous, as `hpcpace.simulation.model` has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.scale_lab.judge import Setup
from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op, Phase, StepFlag, TraceHeader

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
    header = TraceHeader(
        run_id="simulated",
        attempt=0,
        rank=rank,
        world_size=num_hosts,
        local_rank=0,
        local_size=1,
        node=rank,
        host=f"n{rank}",
        host_key=f"key-{rank}",
        mesh=f"dp={num_hosts},pp=1,tp=1",
        dp=rank,
        pp=0,
        tp=0,
        samples_unit="tokens",
    )
    recorder = Recorder(path, header, warn=_fail, clock=lambda: _START_NS)
    for member in range(num_hosts):
        recorder.add_group(0, member, b"default", b"gloo")
    return recorder


def _fail(message: str) -> None:
    raise AssertionError(message)
