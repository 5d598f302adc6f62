"""Measures how fast a whole report is, page and summary written: `python -m experiments.bench.report_speed`.

Traces of three sizes are written through the real format, as a rank leaves them that closed its recording, and read
with a warm page cache: 64 ranks, of each step 32 operations in three groups and to its neighbours, with log-normal
jitter, five phases, clocks that drift. Each measurement is a process of its own, whose imports are not counted, and of
which and whose children the memory is looked at twenty times a second. The floor, h5py and numpy alone, takes turns,
and with `--numpy` so does the report without kernels. `--run` measures a run that is there, packed or not, once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from experiments.bench.pairs import header, processor_s, timed
from hpcpace.core.config import Config
from hpcpace.core.pool import keep_freed_memory
from hpcpace.core.rundir import RunDirectory, json_text
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.diagnosis import analyze as analyses
from hpcpace.diagnosis import credible
from hpcpace.diagnosis import measure as examination
from hpcpace.diagnosis.figures import causes
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.metrics import kernels
from hpcpace.report.run_report import page
from hpcpace.trace.encoding import round_times, row_dtypes
from hpcpace.trace.schema import Op, Phase
from hpcpace.trace.writer import TraceWriter

_SIZES = (1_000_000, 3_000_000, 10_000_000)
_NUM_RANKS = 64
_SLOT_SIZE = 8
_MANY_RANKS = 4096
_SAMPLE_S = 0.05
_TARGET_PER_S = 2.5  # million records
_BEGIN_CPU_S = time.process_time()
_STAGES = (
    (analyses, "read_attempt"),
    (examination, "measure_operations"),
    (examination, "take_close_up"),
    (credible, "find_incomplete"),
    (causes, "cause_figures"),
)
_WORLD, _SLOT, _PEERS = range(3)
# One step of a rank: operation, group, size in bytes, whether the caller blocks on it, milliseconds that it takes and
# that pass before it. A group is the world, 8 ranks side by side, or 8 ranks 8 apart.
_FORWARD = ((Op.ALL_REDUCE, _SLOT, 3_145_728, True, 0.3, 0.5),) * 8
_BACKWARD = (
    (Op.ALL_REDUCE, _SLOT, 3_145_728, True, 0.3, 0.7),
    (Op.ALL_REDUCE, _SLOT, 3_145_728, True, 0.3, 0.5),
    (Op.REDUCE_SCATTER, _PEERS, 26_214_400, False, 2.5, 0.05),
) * 6
_OPERATIONS = (
    (Op.SEND, _WORLD, 3_145_728, False, 0.4, 0.4),
    *_FORWARD,
    (Op.RECV, _WORLD, 3_145_728, True, 0.2, 0.2),
    *_BACKWARD,
    (Op.ALL_GATHER, _PEERS, 13_107_200, True, 1.5, 0.4),
    (Op.BROADCAST, _WORLD, 64, True, 0.05, 0.1),
    (Op.ALL_REDUCE, _WORLD, 8, True, 0.05, 0.05),
    (Op.BARRIER, _WORLD, 0, True, 0.05, 0.05),
)
FEW = (*_FORWARD[:1], *_BACKWARD[2:3], *_OPERATIONS[-2:])
# Each phase lasts from the begin of one of a step's operations to that of another, as shares of a step.
_PHASES = (
    (Phase.DATA, 0.0, 0.02),
    (Phase.FORWARD, 0.03, 0.35),
    (Phase.BACKWARD, 0.36, 0.85),
    (Phase.GRAD_SYNC, 0.80, 0.85),
    (Phase.OPTIMIZER, 0.88, 0.98),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--records", type=int, nargs="+", default=_SIZES, help="write this many operations in all ranks together"
    )
    parser.add_argument("--ranks", type=int, default=_NUM_RANKS)
    parser.add_argument("--few", action="store_true", help="use 4 operations per step instead of 32")
    parser.add_argument("--all", action="store_true", help="also measure 4,096 ranks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the traces in this folder and reuse those in it")
    parser.add_argument("--plot", type=Path, help="draw time against records into this picture")
    parser.add_argument("--numpy", action="store_true", help="also measure without the compiled kernels")
    parser.add_argument("--run", type=Path, help="measure this run only")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        if args.numpy:
            kernels._FOLDER = Path(os.devnull)  # where none are
        print(json.dumps(measure(RunDirectory(args.measure))))
        return
    if args.run:
        sample = _measured_apart(args.run)
        print(", ".join(f"{name} {sample[name]:.2f} s" for name in (*_stages(sample), "cpu")), end="")
        print(f", together {_total_s(sample):.2f} s, peak {sample['peak'] / 2**30:.2f} GiB")
        return
    cases = [(args.ranks, args.few, num_records, args.repeats) for num_records in args.records]
    if args.all:
        cases += [(_MANY_RANKS, True, 4 * _MANY_RANKS * 1000, 1)]
    measured: list[tuple[int, list[float], list[float]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for num_ranks, is_few, num_records, repeats in cases:
            operations = FEW if is_few else _OPERATIONS
            num_steps = -(-num_records // (num_ranks * len(operations)))
            run = (args.folder or Path(temporary)) / f"{num_ranks}x{num_steps}x{len(operations)}"
            if not run.exists():
                write_run(RunDirectory(run), num_ranks, num_steps, operations)
            # The first one warms the page cache.
            turns = [_turn(run, is_numpy_measured=args.numpy) for _ in range(repeats + 1)][1:]
            samples = [sample for sample, _ in turns]
            _print(num_ranks, num_steps, len(operations), samples)
            if args.numpy:
                _print_without_kernels(turns)
            totals = [_total_s(sample) for sample in samples]
            measured.append((num_ranks * num_steps * len(operations), totals, [sample["floor"] for sample in samples]))
    if args.plot:
        _plot(args.plot, measured)


def _turn(run: Path, *, is_numpy_measured: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the report takes, and what it takes without kernels; empty if that is not measured."""
    sample = _measured_apart(run) | {"floor": _floor_s(run)}
    return sample, _measured_apart(run, "--numpy") if is_numpy_measured else {}


def measure(run: RunDirectory) -> dict[str, float]:
    """Return the seconds of each stage, and those of all cores together.

    Stages are timed by wrapping the functions that the report calls; what is not in one of them is the rest.
    """
    seconds: dict[str, float] = {}
    for module, name in _STAGES:
        setattr(module, name, timed(getattr(module, name), name, seconds))
    keep_freed_memory()
    begin_s = time.perf_counter()
    analysis = analyses.analyze(
        run, run.attempt(0), Selection(), Config(), begin_stage=lambda _: lambda _done, _all: None
    )
    assert analysis is not None
    written_s = time.perf_counter()
    summary = analysis.summary
    run.write(run.summary_json.name, json_text(summary.to_json()))
    run.write(run.report_html.name, page(summary, main_verdict(summary.verdict), analysis.plots))
    all_s = time.perf_counter() - begin_s
    seconds["page"] = time.perf_counter() - written_s
    return {**seconds, "rest": all_s - sum(seconds.values()), "cpu": processor_s() - _BEGIN_CPU_S}


def _floor_s(run: Path) -> float:
    """Return the seconds that h5py and numpy take to read and match the same traces, in a process of their own."""
    program = "import sys, time, json; from experiments.bench.floor import split; begin_s = time.perf_counter(); "
    program += "split(__import__('pathlib').Path(sys.argv[1])); print(time.perf_counter() - begin_s)"
    trace_dir = RunDirectory(run).attempt(0).trace_dir
    done = subprocess.run([sys.executable, "-c", program, str(trace_dir)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _measured_apart(run: Path, *options: str) -> dict[str, float]:
    """Return what a separate process measures, and the peak memory of it and its children together."""
    program = [sys.executable, "-m", "experiments.bench.report_speed"]
    command = [*program, "--measure", str(run), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _memory_bytes(process.pid))
            time.sleep(_SAMPLE_S)
        assert process.stdout is not None
        written = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    measured: dict[str, float] = json.loads(written)
    return measured | {"peak": peak_bytes}


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process and its children: pages that several of them share count once (Pss)."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        threads = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [child for thread in threads for child in thread.read_text().split()]
    except OSError:  # it has ended
        return 0
    own = next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return own * 1024 + sum(_memory_bytes(int(child)) for child in children)


def _print(num_ranks: int, num_steps: int, num_operations: int, samples: list[dict[str, float]]) -> None:
    num_records, peak_bytes = num_ranks * num_steps * num_operations, max(sample["peak"] for sample in samples)
    stages = _stages(samples[0])
    totals = sorted(map(_total_s, samples))
    median_s = totals[len(totals) // 2]
    medians = {
        name: sorted(sample[name] for sample in samples)[len(samples) // 2] for name in (*stages, "cpu", "floor")
    }
    # Beside other work the seconds of all cores together say more than those of the clock.
    print(
        f"{num_ranks} ranks x {num_steps} steps, {num_records / 1e6:.2f} million records: "
        f"{num_records / median_s / 1e6:.2f} million records/s, {median_s:.2f} s "
        f"({totals[0]:.2f} to {totals[-1]:.2f} in {len(samples)} runs), {medians.pop('cpu'):.2f} s of CPU, "
        f"peak {peak_bytes / 2**30:.2f} GiB, {median_s / medians.pop('floor'):.1f} times the floor"
    )
    print("  " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()), flush=True)


def _print_without_kernels(turns: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    times = sorted(_total_s(own) / _total_s(other) for own, other in turns)
    processor = sorted(own["cpu"] / other["cpu"] for own, other in turns)
    print(
        f"  of the time without kernels {times[len(times) // 2]:.2f} ({times[0]:.2f} to {times[-1]:.2f}), "
        f"of the processor time {processor[len(times) // 2]:.2f}",
        flush=True,
    )


def _total_s(sample: dict[str, float]) -> float:
    return sum(sample[name] for name in _stages(sample))


def _stages(sample: dict[str, float]) -> list[str]:
    return [name for name in sample if name not in ("peak", "cpu", "floor")]


def _plot(picture: Path, measured: list[tuple[int, list[float], list[float]]]) -> None:
    """Draw the median times of the report and the floor, the range of the report's, and the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = np.array([num_records for num_records, _, _ in measured]) / 1e6
    times, floors = (np.array([np.median(row[side]) for row in measured]) for side in (1, 2))
    spread = [times - [min(row[1]) for row in measured], [max(row[1]) for row in measured] - times]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(records, times, yerr=np.abs(spread), marker="o", capsize=3, label="hpcpace report")
    axes.plot(records, floors, marker="s", color="gray", label="h5py and numpy alone")
    axes.plot(records, records / _TARGET_PER_S, linestyle=":", color="black", label="2.5 million records/s")
    axes.set(xscale="log", yscale="log", xlabel="million records", ylabel="s", title="Time of a whole report")
    axes.legend()
    axes.grid(which="both", alpha=0.3)
    figure.savefig(picture, dpi=120)


def write_run(run: RunDirectory, num_ranks: int, num_steps: int, operations: tuple[tuple, ...] = _OPERATIONS) -> None:
    """Write the traces of a run, each rank's as its writer leaves it when it closes."""
    attempt = run.new_attempt()
    write: Callable[[int], None] = partial(_write_rank, attempt.trace_dir, num_ranks, num_steps, operations)
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(write, range(num_ranks), chunksize=4):
            pass


def _write_rank(folder: Path, num_ranks: int, num_steps: int, operations: tuple[tuple, ...], rank: int) -> None:
    rng = np.random.default_rng([num_ranks, num_steps, rank])
    node, local_rank = divmod(rank, _SLOT_SIZE)
    mesh = {"mesh": f"dp={num_ranks // _SLOT_SIZE},tp={_SLOT_SIZE}", "dp": node, "pp": 0, "tp": local_rank}
    place = {"local_rank": local_rank, "local_size": _SLOT_SIZE, "node": node, "host": f"n{node}"}
    begins_ns = _step_begins_ns(num_ranks, num_steps, operations)
    offset_ns = int(rng.integers(-NS_PER_S, NS_PER_S)) if rank else 0
    own_ns = begins_ns + (offset_ns + ((begins_ns - begins_ns[0]) * rng.uniform(-2e-5, 2e-5)).astype(np.int64)) * (
        rank > 0
    )
    writer = TraceWriter(folder / f"rank-{rank:05d}.h5", header(rank, num_ranks, host_key=f"n{node}", **place, **mesh))
    dtypes = row_dtypes()
    for name, rows in (
        ("groups", _groups(rank, num_ranks)),
        ("steps", _steps(own_ns)),
        ("phases", _phases(own_ns, rng)),
        ("collectives", _collectives(own_ns, rank, num_ranks, operations, rng)),
        ("clock", _clock(begins_ns, own_ns)),
        ("account", [(int(own_ns[-1]), num_steps * len(operations), 0, num_steps * 20_000)]),
    ):
        rows = np.array(rows, dtypes[name])
        round_times(name, rows)
        writer.add(name, rows)
    writer.close()


def _groups(rank: int, num_ranks: int) -> list[tuple[int, int, bytes, bytes]]:
    first = rank - rank % _SLOT_SIZE
    return [
        *((_WORLD, member, b"world", b"gloo") for member in range(num_ranks)),
        *((_SLOT, member, b"tp", b"gloo") for member in range(first, first + _SLOT_SIZE)),
        *((_PEERS, member, b"dp", b"gloo") for member in range(rank % _SLOT_SIZE, num_ranks, _SLOT_SIZE)),
    ]


def _step_begins_ns(num_ranks: int, num_steps: int, operations: tuple[tuple, ...]) -> np.ndarray:
    """Return the begin of each step and the end of the last one: the same on all ranks but for their clocks."""
    rng = np.random.default_rng([num_ranks, num_steps])
    step_ms = 1.25 * sum((duration_ms if blocks else 0.02) + gap_ms for *_, blocks, duration_ms, gap_ms in operations)
    taken_ns = step_ms * NS_PER_MS * rng.lognormal(0, 0.05, num_steps)
    return 3_600 * NS_PER_S + np.concatenate([[0], np.cumsum(taken_ns.astype(np.int64))])


def _steps(own_ns: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(own_ns) - 1, row_dtypes()["steps"])
    rows["step"], rows["samples"] = np.arange(len(rows)), 8
    rows["begin_ns"], rows["end_ns"] = own_ns[:-1], own_ns[1:] - 2_000
    rows["flags"][:5] = 1
    return rows


def _phases(own_ns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    phases, begins, ends = map(np.array, zip(*_PHASES, strict=True))
    length_ns = np.diff(own_ns)[:, None] * rng.uniform(0.99, 1.0, (len(own_ns) - 1, 1))
    rows = np.zeros((len(own_ns) - 1, len(phases)), row_dtypes()["phases"])
    rows["step"], rows["phase"], rows["microbatch"] = np.arange(len(rows))[:, None], phases, -1
    rows["begin_ns"] = own_ns[:-1, None] + (length_ns * begins).astype(np.int64)
    rows["end_ns"] = own_ns[:-1, None] + (length_ns * ends).astype(np.int64)
    return rows.reshape(-1)


def _collectives(
    own_ns: np.ndarray, rank: int, num_ranks: int, operations: tuple[tuple, ...], rng: np.random.Generator
) -> np.ndarray:
    num_steps = len(own_ns) - 1
    ops, groups, sizes, blocking, durations_ms, gaps_ms = map(np.array, zip(*operations, strict=True))
    shape = (num_steps, len(ops))
    # All ranks leave an operation when the last one has come and the transfer is over, each some microseconds later.
    shared = np.random.default_rng([num_ranks, num_steps])
    taken_ns = durations_ms * NS_PER_MS * shared.lognormal(0, 0.2, shape)
    held_ns = np.where(blocking, taken_ns, 20_000)
    gaps_ns = gaps_ms * NS_PER_MS * shared.lognormal(0, 0.2, shape)
    ends_ns = np.cumsum(held_ns + gaps_ns, axis=1)
    early_ns = np.minimum(0.2 * rng.lognormal(0, 0.5, shape), 0.9) * gaps_ns
    # What jitter makes too long is squeezed into the step, so that operations stay in theirs.
    scale = np.minimum(1.0, 0.98 * np.diff(own_ns) / ends_ns[:, -1])[:, None]
    rows = np.zeros(shape, row_dtypes()["collectives"])
    rows["step"], rows["group"], rows["op"], rows["bytes"] = np.arange(num_steps)[:, None], groups, ops, sizes
    channels = [(group, op) if op in (Op.SEND, Op.RECV) else (group,) for group, op in zip(groups, ops, strict=True)]
    places = np.array([channels[:index].count(channel) for index, channel in enumerate(channels)])
    strides = np.array([channels.count(channel) for channel in channels])
    rows["seq"] = np.arange(num_steps)[:, None] * strides + places
    neighbours = {Op.SEND: (rank + 1) % num_ranks, Op.RECV: (rank - 1) % num_ranks, Op.BROADCAST: 0}
    rows["peer"] = [neighbours.get(op, -1) for op in ops]
    released_ns = (ends_ns - held_ns) * scale
    late_ns = 1_000 * rng.lognormal(0, 0.3, shape)
    rows["enter_ns"] = own_ns[:-1, None] + (released_ns - early_ns * scale).astype(np.int64)
    rows["exit_ns"] = own_ns[:-1, None] + (released_ns + taken_ns * scale + late_ns).astype(np.int64)
    rows["blocked_ns"] = np.where(blocking, np.maximum(rows["exit_ns"] - rows["enter_ns"] - 15_000, 0), 0)
    rows["exit_kind"] = ~blocking
    rows = rows.reshape(-1)
    # Rows are recorded when operations complete.
    return rows[np.argsort(rows["exit_ns"], kind="stable")]


def _clock(begins_ns: np.ndarray, own_ns: np.ndarray) -> np.ndarray:
    at = np.unique(np.linspace(0, len(own_ns) - 1, 20).astype(np.int64))
    rows = np.zeros(len(at), row_dtypes()["clock"])
    rows["local_ns"], rows["offset_ns"] = own_ns[at], own_ns[at] - begins_ns[at]
    rows["halfwidth_ns"] = 9_000 * (own_ns[0] != begins_ns[0])
    rows["rtt_ns"], rows["count"] = 20_000, 40
    return rows


if __name__ == "__main__":
    main()
