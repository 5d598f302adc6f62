"""Measures bytes on disk per record of a long job when it is killed: `python -m experiments.bench.trace_size`.

The real recorder records 100,000 steps of ten records each at 100, 200 and 500 records a second and flushes once a
second of the recorded time, on a clock that runs faster than ours. Everything in the files counts, HDF5's own share,
the journal and the other tables too, and is charged to the one kind of record that the job makes.

Options:
  --steps N  [100000]
  --rates N...  [100 200 500]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.options import command_line
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, TABLES, Op, Phase, TraceHeader, row_dtypes

_HEADER = TraceHeader(
    run_id="bench", attempt=0, rank=0, world_size=16, local_rank=0, local_size=8, node=0, host="n1", mesh="dp=4,pp=4"
)
_BLOCK_STEPS = 10_000
# One step of a rank in a 4 x 4 mesh of pipeline and data parallelism, with a tensor-parallel pair: operation, group,
# peer, size in bytes, whether the caller blocks on it, milliseconds that it takes and that pass before it.
_OPERATIONS = (
    (Op.RECV, 1, 0, 3_145_728, True, 0.9, 0.4),
    (Op.ALL_REDUCE, 2, -1, 3_145_728, True, 0.6, 1.8),
    (Op.ALL_REDUCE, 2, -1, 3_145_728, True, 0.6, 0.9),
    (Op.SEND, 1, 2, 3_145_728, False, 1.2, 0.3),
    (Op.RECV, 1, 2, 3_145_728, True, 0.3, 0.05),
    (Op.ALL_REDUCE, 2, -1, 3_145_728, True, 0.6, 2.4),
    (Op.SEND, 1, 0, 3_145_728, False, 1.1, 0.2),
    (Op.REDUCE_SCATTER, 3, -1, 26_214_400, False, 5.0, 0.1),
    (Op.ALL_GATHER, 3, -1, 13_107_200, True, 2.5, 0.3),
    (Op.ALL_REDUCE, 0, -1, 8, True, 0.05, 0.05),
)
# Phase, microbatch and the milliseconds of a phase and before it.
_PHASES = (
    (Phase.DATA, -1, 0.2, 0.05),
    (Phase.FORWARD, 0, 1.5, 0.05),
    (Phase.FORWARD, 1, 1.5, 0.4),
    (Phase.FORWARD, 2, 1.5, 0.4),
    (Phase.BACKWARD, 0, 3.0, 0.1),
    (Phase.BACKWARD, 1, 3.0, 0.1),
    (Phase.BACKWARD, 2, 3.0, 0.1),
    (Phase.GRAD_SYNC, -1, 0.9, 0.05),
    (Phase.OPTIMIZER, -1, 0.7, 0.06),
    (Phase.OTHER, -1, 0.05, 0.05),
)


def main() -> None:
    args = command_line(__doc__)
    for table, end, target, make_rows, of_device in (
        ("collectives", "exit_ns", 8, _collective_rows, ()),
        ("phases", "end_ns", 10, _phase_rows, ()),
        ("phases", "end_ns", 16, _device_phase_rows, ("phases",)),
    ):
        for rate in args.rates:
            begin_s, name = time.perf_counter(), f"{table} with device times" if of_device else table
            with tempfile.TemporaryDirectory() as folder:
                path, rows = Path(folder) / "rank-00000.h5", make_rows(args.steps, rate)
                sizes = np.array(record_and_kill(path, table, end, rows, of_device))
            # A kill comes at any time: the journal is empty or nearly a chunk long then.
            last = (sizes[:, 1] / sizes[:, 0])[-len(sizes) // 10 :]
            print(
                f"{name}, {rate} records/s, {args.steps} steps: {last.mean():.2f} bytes a record on disk, at most "
                f"{last.max():.2f} (target {target}), when killed in the last tenth; {len(sizes)} flushes, "
                f"{time.perf_counter() - begin_s:.0f} s"
            )


def record_and_kill(
    path: Path, table: str, end: str, blocks: Iterator[np.ndarray], device_tables: Collection[str]
) -> list[tuple[int, int]]:
    """Record rows, and leave in their place the files as they are before they are closed.

    Args:
        end: the column with the time at which a row was recorded.
        blocks: the rows, in the order of recording.
        device_tables: the tables that have columns of a device.

    Returns:
        after each flush, the number of rows so far and the bytes of both files.
    """
    now_ns = 0
    files = (path, path.with_suffix(".journal"))
    sizes: list[tuple[int, int]] = []
    recorder = Recorder(
        path, _HEADER, warn=_refuse, clock=lambda: now_ns, flush_interval_s=1e6, device_tables=device_tables
    )
    recorder.start()
    add = {"collectives": recorder.add_collective, "phases": recorder.add_phase}[table]
    num_rows = 0
    for block in blocks:
        for second in np.split(block, np.flatnonzero(np.diff(block[end] // NS_PER_S) > 0) + 1):
            for row in second.tolist():
                add(*row)
            now_ns = int(second[end][-1])
            assert recorder.flush()
            num_rows += len(second)
            sizes.append((num_rows, sum(file.stat().st_size for file in files)))
    kept = [(file, file.read_bytes()) for file in files]
    recorder.close()
    for file, content in kept:
        file.write_bytes(content)
    trace = read_trace(path)
    assert len(trace.tables[table]) == num_rows and not trace.problems, trace.problems
    return sizes


def _collective_rows(num_steps: int, rate: int) -> Iterator[np.ndarray]:
    ops, groups, peers, sizes, blocking, durations_ms, gaps_ms = map(np.array, zip(*_OPERATIONS, strict=True))
    channels = [(group, peer, op) if op in (Op.SEND, Op.RECV) else (group,) for op, group, peer, *_ in _OPERATIONS]
    places = np.array([channels[:index].count(channel) for index, channel in enumerate(channels)])
    strides = np.array([channels.count(channel) for channel in channels])
    busy_ms = np.where(blocking, durations_ms, 0.02)
    for steps, enter_ns, taken_ns in _times(num_steps, rate, busy_ms, gaps_ms):
        rng = np.random.default_rng(steps[0] + 1)
        rows = np.zeros(enter_ns.shape, dtype=TABLES["collectives"].dtype)
        rows["step"], rows["group"], rows["op"], rows["bytes"], rows["peer"] = steps[:, None], groups, ops, sizes, peers
        rows["seq"] = steps[:, None] * strides + places
        rows["enter_ns"] = enter_ns
        elapsed_ns = durations_ms * NS_PER_MS * rng.lognormal(0, rng.uniform(0.1, 0.3, len(ops)), enter_ns.shape)
        rows["exit_ns"] = enter_ns + np.where(blocking, taken_ns, elapsed_ns)
        rows["blocked_ns"] = np.where(blocking, taken_ns - 15_000 * rng.lognormal(0, 0.3, enter_ns.shape), 0)
        rows["exit_kind"] = ~blocking.astype(bool) & np.isin(ops, (Op.SEND, Op.RECV))
        rows = rows.reshape(-1)
        # Rows are recorded when operations complete.
        yield rows[np.argsort(rows["exit_ns"], kind="stable")]


def _phase_rows(num_steps: int, rate: int) -> Iterator[np.ndarray]:
    phases, microbatches, durations_ms, gaps_ms = map(np.array, zip(*_PHASES, strict=True))
    for steps, begin_ns, taken_ns in _times(num_steps, rate, durations_ms, gaps_ms):
        rows = np.zeros(begin_ns.shape, dtype=TABLES["phases"].dtype)
        rows["step"], rows["phase"], rows["microbatch"] = steps[:, None], phases, microbatches
        rows["begin_ns"], rows["end_ns"] = begin_ns, begin_ns + taken_ns
        yield rows.reshape(-1)


def _device_phase_rows(num_steps: int, rate: int) -> Iterator[np.ndarray]:
    """Phases that the device reaches about half a step after the host, a distance that wanders by 0.2 ms a phase."""
    rng, lead_ns = np.random.default_rng(1), 50e6
    for plain in _phase_rows(num_steps, rate):
        rows = np.zeros(plain.shape, dtype=row_dtypes(DEVICE_TABLES)["phases"])
        for name in plain.dtype.names or ():
            rows[name] = plain[name]
        leads_ns = np.abs(lead_ns + np.cumsum(rng.normal(0, 2e5, len(rows) + 1))).astype(np.int64)
        rows["device_begin_ns"] = rows["begin_ns"] + leads_ns[:-1]
        rows["device_end_ns"] = rows["end_ns"] + leads_ns[1:]
        lead_ns = float(leads_ns[-1])
        yield rows


def _times(
    num_steps: int, rate: int, durations_ms: np.ndarray, gaps_ms: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield step numbers, begins and durations in ns, (steps, records), with log-normal jitter of 10 to 30 %."""
    rng = np.random.default_rng(rate)
    jitter = rng.uniform(0.1, 0.3, size=(2, len(gaps_ms)))
    step_ms = 1e3 * len(gaps_ms) / rate
    # What the rate leaves over is computing between the records; most of it before the first of a step.
    left_ms = step_ms - (durations_ms + gaps_ms).sum()
    gaps_ms = gaps_ms + left_ms * np.array([0.6, *[0.4 / (len(gaps_ms) - 1)] * (len(gaps_ms) - 1)])
    now_ns = 3_600_000_000_000
    for first in range(0, num_steps, _BLOCK_STEPS):
        steps = np.arange(first, min(first + _BLOCK_STEPS, num_steps))
        shape = len(steps), len(gaps_ms)
        taken_ns = (durations_ms * NS_PER_MS * rng.lognormal(0, jitter[0], shape)).astype(np.int64)
        gaps_ns = (gaps_ms * NS_PER_MS * rng.lognormal(0, jitter[1], shape)).astype(np.int64)
        ends_ns = now_ns + np.cumsum((taken_ns + gaps_ns).reshape(-1)).reshape(shape)
        yield steps, ends_ns - taken_ns, taken_ns
        now_ns = int(ends_ns[-1, -1])


def _refuse(message: str) -> Any:
    raise AssertionError(message)


if __name__ == "__main__":
    main()
