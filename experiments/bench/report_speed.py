"""Measures how fast a whole report is, from the start of Python to its end: `python -m experiments.bench.report_speed`.

Traces of several sizes are written through the real format, as a rank leaves them that closed its recording, and read
with a warm page cache: 64 ranks, of each step 32 operations in three groups and to its neighbours, with log-normal
jitter, five phases, clocks that drift; and 1,024 ranks with 10 operations a step. `hpcpace report` takes turns with
the floor, h5py and numpy alone, and with `--numpy` also with a report without kernels: each a process of its own whose
start counts, of which and whose children the memory is looked at twenty times a second. Where the time goes inside is
measured once, in one more process.

Options:
  --records N...  write this many operations in all ranks together, in place of the usual
  --ranks N       [64]
  --operations N  of each step: 4, 10 or 32 [32]
  --all           also measure 4,096 ranks
  --repeats N     [3]
  --folder PATH   keep the traces in this folder and reuse those in it
  --plot PATH     draw time against records into this picture
  --numpy         also measure without the compiled kernels
  --measure PATH  measure the parts of one report of this run
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from experiments.bench.pairs import compiled_kept, header, measured_apart, taken, timed
from experiments.options import command_line
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
from hpcpace.report.run_report import page
from hpcpace.trace.schema import Op, Phase, round_times, row_dtypes
from hpcpace.trace.writer import TraceWriter

_SIZES = (1_000_000, 3_000_000, 10_000_000)
_NUM_RANKS = 64
_SLOT_SIZE = 8
_MANY_RANKS = 4096
_SAMPLE_S = 0.05
_TARGET, _TARGET_OF_MANY = 4.0, 3.0
_MANY_RECORDS = 10_000_000
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
_TEN = (_OPERATIONS[0], *_FORWARD[:2], _OPERATIONS[9], *_BACKWARD[:3], *_OPERATIONS[-3:])
_SHAPES = {len(shape): shape for shape in (FEW, _TEN, _OPERATIONS)}
# Each phase lasts from the begin of one of a step's operations to that of another, as shares of a step.
_PHASES = (
    (Phase.DATA, 0.0, 0.02),
    (Phase.FORWARD, 0.03, 0.35),
    (Phase.BACKWARD, 0.36, 0.85),
    (Phase.GRAD_SYNC, 0.80, 0.85),
    (Phase.OPTIMIZER, 0.88, 0.98),
)


def main() -> None:
    args = command_line(__doc__, operations=_SHAPES)
    if args.measure:
        print(json.dumps(measure(RunDirectory(args.measure))))
        return
    cases = [(args.ranks, args.operations, number, args.repeats) for number in args.records or _SIZES]
    if not args.records:
        cases.append((1024, len(_TEN), 1024 * 100 * len(_TEN), args.repeats))
    if args.all:
        cases.append((_MANY_RANKS, len(FEW), len(FEW) * _MANY_RANKS * 1000, 1))
    measured: list[tuple[int, list[Whole], list[Whole]]] = []
    with tempfile.TemporaryDirectory() as temporary, compiled_kept(Path(temporary)):
        for num_ranks, num_operations, num_records, repeats in cases:
            num_steps = -(-num_records // (num_ranks * num_operations))
            run = (args.folder or Path(temporary)) / f"{num_ranks}x{num_steps}x{num_operations}"
            if not run.exists():
                write_run(RunDirectory(run), num_ranks, num_steps, _SHAPES[num_operations])
            stages = measured_apart("experiments.bench.report_speed", "--measure", run)
            # The first turn keeps what Python compiles, and warms the page cache.
            turns = [_turn(run, is_numpy_measured=args.numpy) for _ in range(repeats + 1)][1:]
            reports, floors = ([turn[name] for turn in turns] for name in ("report", "floor"))
            measured.append((num_ranks * num_steps * num_operations, reports, floors))
            _print(num_ranks, num_steps, num_operations, reports, floors)
            print("  of it " + ", ".join(f"{name} {value:.2f} s" for name, value in stages.items()), flush=True)
            if args.numpy:
                _print_without_kernels(reports, [turn["numpy"] for turn in turns])
    if args.plot:
        _plot(args.plot, measured)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What a process took from its start to its end, with its children; their memory together."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def _turn(run: Path, *, is_numpy_measured: bool) -> dict[str, Whole]:
    """Return what the report and the floor take, and the report without kernels if that is measured."""
    split = "import sys, pathlib; from experiments.bench.floor import split; split(pathlib.Path(sys.argv[1]))"
    without = "import os, pathlib; from hpcpace.metrics import kernels; kernels._SOURCE = pathlib.Path(os.devnull); "
    without += "from hpcpace.cli import main; main()"
    found = {
        "floor": _whole("-c", split, str(RunDirectory(run).attempt(0).trace_dir)),
        "report": _whole("-m", "hpcpace", "report", str(run)),
    }
    return found | ({"numpy": _whole("-c", without, "report", str(run))} if is_numpy_measured else {})


def _whole(*arguments: str) -> Whole:
    """Run a program of Python.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        taken(resource.RUSAGE_CHILDREN) as found,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        peak_bytes = 0
        while True:
            peak_bytes = max(peak_bytes, _memory_bytes(process.pid))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_S)
                break
        errors.seek(0)
        if process.returncode not in (0, 1, 3) or "Traceback" in (said := errors.read()):
            raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
    return Whole(wall_s=found.wall_s, cpu_s=found.cpu_s, peak_bytes=peak_bytes)


def measure(run: RunDirectory) -> dict[str, float]:
    """Return the seconds of each stage of a report, without those in which Python starts.

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
    return {**seconds, "rest": all_s - sum(seconds.values())}


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


def _print(num_ranks: int, num_steps: int, num_operations: int, reports: list[Whole], floors: list[Whole]) -> None:
    num_records = num_ranks * num_steps * num_operations
    walls = sorted(report.wall_s for report in reports)
    peak_gib = max(report.peak_bytes for report in reports) / 2**30
    target = _TARGET if num_records < _MANY_RECORDS and num_ranks <= _NUM_RANKS else _TARGET_OF_MANY
    # Beside other work, the seconds of all cores together say more than those of the clock.
    print(
        f"{num_ranks} ranks x {num_steps} steps x {num_operations} operations, {num_records / 1e6:.2f} million: report "
        f"{median(walls):.2f} s ({walls[0]:.2f} to {walls[-1]:.2f} in {len(reports)} runs), floor "
        f"{median(floor.wall_s for floor in floors):.2f} s: {_ratio(reports, floors, 'wall_s')} (target {target:.0f}); "
        f"of all cores {median(report.cpu_s for report in reports):.2f} s, "
        f"{median(floor.cpu_s for floor in floors):.2f} s: {_ratio(reports, floors, 'cpu_s')}; peak {peak_gib:.2f} GiB",
        flush=True,
    )


def _print_without_kernels(reports: list[Whole], others: list[Whole]) -> None:
    print(
        f"  next to a report without kernels: {_ratio(reports, others, 'wall_s')} the time, "
        f"{_ratio(reports, others, 'cpu_s')} that of all cores",
        flush=True,
    )


def _ratio(own: list[Whole], others: list[Whole], name: str) -> str:
    """Return the median of the pairs, and their range."""
    ratios = sorted(getattr(one, name) / getattr(other, name) for one, other in zip(own, others, strict=True))
    return f"{median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _plot(picture: Path, measured: list[tuple[int, list[Whole], list[Whole]]]) -> None:
    """Draw the median times of the report and the floor, and the range of the report's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = np.array([num_records for num_records, _, _ in measured]) / 1e6
    reports, floors = ([[one.wall_s for one in row[side]] for row in measured] for side in (1, 2))
    times = np.array([median(row) for row in reports])
    spread = [times - [min(row) for row in reports], [max(row) for row in reports] - times]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(records, times, yerr=np.abs(spread), marker="o", capsize=3, label="hpcpace report")
    axes.plot(records, [median(row) for row in floors], marker="s", color="gray", label="h5py and numpy alone")
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
